"""What to change in a configuration that does not fit: keys, by what fills the chip."""

from __future__ import annotations

from collections.abc import Iterator

from jax_agent_rl.config import Config
from jax_agent_rl.plan.rollout_half import CACHE, WEIGHTS
from jax_agent_rl.plan.verdict import BATCH, TEMPORARIES, Load
from jax_agent_rl.runtime.engines import engine_shapes

SHOWN = 3


def advice(config: Config, load: Load) -> list[str]:
    """Keys with the values to try, those first that act on most of the chip's memory.

    Args:
        load: of a program that does not fit.
    """
    found: list[str] = []
    for part in sorted(load.parts, key=lambda name: load.parts[name], reverse=True):
        found += [hint for hint in _hints(config, load, part) if hint not in found]
    return found[:SHOWN]


def _hints(config: Config, load: Load, part: str) -> Iterator[str]:
    engine = part in (WEIGHTS, CACHE)
    if engine and load.program.half == "learner" and config.rollout.placement == "colocated":
        if config.trainer.mode == "sync" and not config.rollout.sleep:
            yield "rollout.sleep=true"
    if part == CACHE or (part in (BATCH, TEMPORARIES) and load.program.half == "rollout"):
        yield from _of_cache(config)
    elif part == WEIGHTS:
        yield from _of_engine(config)
    elif part == TEMPORARIES:
        yield from _of_activations(config)
    else:
        yield from _of_parameters(config)


def _of_cache(config: Config) -> Iterator[str]:
    """Keys of contexts that an engine keeps."""
    shapes = engine_shapes(config)
    if shapes.cache_tokens > shapes.max_model_len:
        yield f"rollout.jetstream.cache_tokens={max(shapes.max_model_len, shapes.cache_tokens // 2)}"
    yield f"rollout.jetstream.max_concurrent_decodes={max(1, shapes.max_concurrent_decodes // 2)}"
    yield from _of_engine(config)
    yield f"rollout.max_model_len below {config.rollout.max_model_len}"


def _of_engine(config: Config) -> Iterator[str]:
    if config.rollout.jetstream.dtype == "float32":
        yield "rollout.jetstream.dtype=bfloat16"
    yield f"rollout.jetstream.mesh.tensor={config.rollout.jetstream.mesh.tensor * 2}"


def _of_activations(config: Config) -> Iterator[str]:
    learner = config.learner
    if learner.remat != "full":
        yield "learner.remat=full"
    if learner.compute_dtype == "float32":
        yield "learner.compute_dtype=bfloat16"
    if learner.rows_per_micro_batch > 1:
        yield f"learner.rows_per_micro_batch={learner.rows_per_micro_batch // 2}"
    need = config.agent.max_prompt_length + config.agent.max_response_length
    if learner.row_length > need:
        yield f"learner.row_length={max(need, learner.row_length // 2)}"
    yield f"learner.mesh.context={learner.mesh.context * 2}"
    yield f"learner.mesh.tensor={learner.mesh.tensor * 2}"


def _of_parameters(config: Config) -> Iterator[str]:
    yield f"learner.mesh.fsdp={config.learner.mesh.fsdp * 2}"
    if config.learner.lora is None:
        yield "learner.lora.rank=16"
    yield "a larger --topology"
