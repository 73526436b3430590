"""The engine's programs and arrays: the engine itself, over a table that records what it is asked to run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.inventory import Inventory, Phase, Program
from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.engine import PREFILL_ROWS, Extension, JaxEngine
from jax_agent_rl.jetstream.programs import NextCall, ProgramTable, traced
from jax_agent_rl.jetstream.vision_engine import VisionEngine
from jax_agent_rl.jetstream.weights import staging_mesh
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.runtime.engines import engine_precision, engine_shapes

WEIGHTS, CACHE = "engine weights", "KV cache"
_WEIGHTS, _CACHE, _BOTH = frozenset({WEIGHTS}), frozenset({CACHE}), frozenset({WEIGHTS, CACHE})


class RecordingTable(ProgramTable):
    """A table that runs nothing: it records programs, and returns descriptions of their results.

    Ids, which the engine reads on the host, are zeros.

    Attributes:
        noted: by their keys, what would be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[tuple, jax.stages.Traced] = {}

    def call(
        self,
        key: tuple,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        place: NamedSharding,
        out: Any,
        next_call: Callable[[], NextCall] | None = None,
    ) -> Any:
        """Record a program; see :meth:`ProgramTable.call`, but ``next_call`` is never called."""
        program = self.recorded[key] = traced(function, donate, *args, place=place, out=out)
        return jax.tree.map(
            lambda sharding, part: jax.tree.map(functools.partial(_answer, sharding), part), out, program.out_info
        )


def _answer(sharding: NamedSharding, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | np.ndarray:
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if x.dtype == jnp.int32 else x.update(sharding=sharding)


def engine_inventory(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    published: Params,
    holds: frozenset[str],
) -> Inventory:
    """Trace the largest programs of one engine on a mesh.

    Args:
        config: of the run.
        model: its architecture.
        mesh: of the engine.
        published: the parameters it is given.
        holds: names of the residents that these are.

    Raises:
        ConfigError: the devices cannot share the model evenly.
    """
    shapes = engine_shapes(config)
    table, kind = RecordingTable(), JaxEngine if model.vision is None else VisionEngine
    precision: dict[str, Any] = engine_precision(config)
    precision["dtype"] = jnp.dtype(precision["dtype"])
    engine = kind(model, shapes, **precision, mesh=mesh, table=table)
    weights, cache = engine.load_params(published), engine.init_cache()
    last = shapes.cache_length - shapes.decode_steps
    slots = make_decode_batch(shapes.max_concurrent_decodes, shapes.context_pages, last)
    engine.decode(weights, cache, slots, shapes.decode_steps, 1)
    size = shapes.chunk_buckets[-1]
    chunk = Extension(pages=(), start=max(0, shapes.cache_length - size), ids=np.zeros(size, np.int32))
    engine.extend(weights, cache, [chunk] * PREFILL_ROWS)
    engine.copy_page(cache, 0, 0)
    made = Inventory()
    absent: frozenset[Phase] = frozenset({"learner"}) if config.rollout.sleep_during_update else frozenset()
    for name, arrays in ((WEIGHTS, weights), (CACHE, cache)):
        made.keep(name, arrays, absent=absent)
    for key, program in table.recorded.items():
        made.programs += _programs(key, program, mesh, published, holds, shapes.decode_steps)
    return made


def _programs(
    key: tuple, program: jax.stages.Traced, mesh: Mesh, published: Params, holds: frozenset[str], steps: int
) -> Iterator[Program]:
    """Yield the program of a key of the engine's table; nothing for what only allocates."""

    def rollout(phase: Phase = "rollout", mesh: Mesh = mesh, **more: Any) -> Program:
        return Program(phase=phase, mesh=mesh, traced=program, **more)

    match key:
        case ("decode", _, width, span):
            name, tokens = f"decode {width} slots of {span}", width * steps
            yield rollout(name=name, holds=_BOTH, donates=_CACHE, loops=steps, tokens=tokens, of="sampled")
        case ("chunks", _, rows, size, span):
            name = f"prefill {rows} x {size} after {span}"
            yield rollout(name=name, holds=_BOTH, tokens=rows * size, of="prompts")
        case ("write", *_):  # this and the next touch a few pages of the cache: they take memory, and hardly time
            yield rollout(name="write to the cache", holds=_CACHE, donates=_CACHE, calls=0)
        case ("copy", _):
            yield rollout(name="copy a page", holds=_CACHE, donates=_CACHE, calls=0)
        case ("weights", _):
            yield rollout(name="take weights", phase="weights", holds=holds | _WEIGHTS, donates=_WEIGHTS)
        case ("staged weights", _):
            embed = published["embed"]
            stage = staging_mesh(mesh, tuple(embed.sharding.devices_indices_map(embed.shape)))
            yield rollout(name="arrange weights", phase="weights", mesh=stage, holds=holds)
