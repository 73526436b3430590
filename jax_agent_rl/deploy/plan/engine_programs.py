"""The engine's programs: the run's own engine runs over a table that records what it is asked to run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Inventory, Phase, Program, Published
from jax_agent_rl.generation import mask_words
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.decode_batch import (
    ALL_ALLOWED,
    PREFILL_ROWS,
    DecodeBatch,
    make_decode_batch,
    truncation_of,
)
from jax_agent_rl.jetstream.engine import Extension, JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import MOVED_TOGETHER, KVCache
from jax_agent_rl.jetstream.programs import NextCall, ProgramTable, traced
from jax_agent_rl.jetstream.vision_engine import VisionEngine
from jax_agent_rl.jetstream.weights import staging_mesh
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.parameters import PARAMETERS, Kind
from jax_agent_rl.runtime.engines import engine_precision, engine_shapes
from jax_agent_rl.trainer.step import training_sampling

WEIGHTS, CACHE = "engine weights", "KV cache"
_WEIGHTS, _CACHE, _BOTH = frozenset({WEIGHTS}), frozenset({CACHE}), frozenset({WEIGHTS, CACHE})


class RecordingTable(ProgramTable):
    """A table that runs nothing: it records programs, and returns descriptions of their results.

    Ids, which the engine reads on the host, are zeros.
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

        def result(
            sharding: NamedSharding, x: jax.ShapeDtypeStruct
        ) -> jax.ShapeDtypeStruct | np.ndarray:
            zeros = x.dtype == jnp.int32
            return (
                np.broadcast_to(np.zeros((), x.dtype), x.shape)
                if zeros
                else x.update(sharding=sharding)
            )

        return jax.tree.map(
            lambda sharding, part: jax.tree.map(functools.partial(result, sharding), part),
            out,
            program.out_info,
        )


def add_engine(
    made: Inventory,
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    published: Published,
    *,
    compiled_for: Mesh,
    engines: int,
) -> None:
    """Trace the largest programs of one of so many engines, which is given the published parameters.

    Its arrays are counted on ``mesh``; its programs are traced for ``compiled_for``, a mesh of the
    same shape.
    """
    shapes = engine_shapes(config)
    table, kind = RecordingTable(), JaxEngine if model.vision is None else VisionEngine
    precision: dict[str, Any] = engine_precision(config)
    precision["dtype"] = jnp.dtype(precision["dtype"])
    engine = kind(model, shapes, **precision, mesh=compiled_for, table=table)
    weights, cache = engine.load_params(published.params), engine.init_cache()
    last = shapes.cache_length - shapes.decode_steps
    slots = make_decode_batch(shapes.max_concurrent_decodes, shapes.context_pages, last)
    engine.decode(weights, cache, _restricted(slots, config, model), shapes.decode_steps, 1)
    if shapes.num_speculative_tokens:
        engine.verify(weights, cache, slots, [()] * len(slots.tokens))
    size = shapes.chunk_buckets[-1]
    chunk = Extension(
        pages=(), start=max(0, shapes.cache_length - size), ids=np.zeros(size, np.int32)
    )
    engine.extend(weights, cache, [chunk] * PREFILL_ROWS)
    engine.copy_page(cache, 0, 0)
    if shapes.kv_offloading_bytes:
        pages = [NULL_PAGE] * MOVED_TOGETHER[-1]
        engine.overwrite_pages(cache, engine.get_pages(cache, pages), np.asarray(pages, np.int32))
    absent: frozenset[Phase] = (
        frozenset({"learner"}) if config.rollout.sleep_during_update else frozenset()
    )
    made.keep(WEIGHTS, _placed(weights, mesh), absent=absent)
    made.keep(CACHE, _placed(cache, mesh), absent=absent)
    work, running = EngineWork(model, weights, cache), running_share(config, engines)
    rare = config.rollout.temperature == 0  # otherwise no slot is greedy
    for key, program in table.recorded.items():
        needed = work.of(key)
        for one in _engine_programs(key, program, mesh, published, shapes.decode_steps):
            if one.of == "sampled":
                one = replace(one, tokens=max(1, round(one.tokens * running)))
            if needed is not None:
                flops, size = (each * one.loops for each in needed)
                one = replace(one, model_flops=flops, model_bytes=size, rare_branches=rare)
            made.programs.append(one)


def _placed(tree: Any, mesh: Mesh) -> Any:
    """Return described arrays on another mesh of the same shape."""
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), tree)


def running_share(config: Config, engines: int) -> float:
    """Return the share of an engine's slots that run: there are trajectories for them, and KV cache.

    Answers have their full length, and prompts are shared.
    """
    shapes, agent = engine_shapes(config), config.agent
    context = agent.max_prompt_length / config.rollout.group_size + agent.max_response_length / 2
    running = min(config.rollout.max_in_flight / engines, shapes.kv_cache_tokens / context)
    return min(1.0, running / shapes.max_concurrent_decodes)


def _restricted(slots: DecodeBatch, config: Config, model: DecoderConfig) -> DecodeBatch:
    """Add what restricts the draws of training: top-p and the like, and the grammars of tool calls."""
    count = len(slots.tokens)
    if config.rollout.restricts_sampling:
        slots = replace(slots, truncation=truncation_of([training_sampling(config)] * count))
    if config.agent.constrain_tool_calls:
        allowed = np.full((count, mask_words(model.vocab_size)), ALL_ALLOWED)
        slots = replace(slots, allowed=allowed)
    return slots


def _engine_programs(
    key: tuple, program: jax.stages.Traced, mesh: Mesh, published: Published, steps: int
) -> Iterator[Program]:
    """Yield the program of a key of the engine's table; nothing for what only allocates."""
    rollout = functools.partial(
        Program, phase="rollout", mesh=mesh, traced=program, copies=mesh.shape["data"]
    )
    match key:
        case (str(kind), _, width, span) if kind.startswith("decode"):
            steps = (
                1 if kind.endswith("constrained") else steps
            )  # a grammar needs each id before the next
            name, tokens = f"{kind} {width} slots of {span}", width * steps
            yield rollout(
                name=name, holds=_BOTH, donates=_CACHE, loops=steps, tokens=tokens, of="sampled"
            )
        case ("verify", *_):  # how often drafts are verified is found while a run samples
            yield rollout(
                name="verify drafts",
                holds=_BOTH,
                donates=_CACHE if len(key) == 3 else frozenset(),
                calls=0,
            )
        case ("chunks", _, rows, size, span):
            yield rollout(
                name=f"prefill {rows} x {size} after {span}",
                holds=_BOTH,
                tokens=rows * size,
                of="prompts",
            )
        case (
            "write",
            *_,
        ):  # this and the next three touch a few pages of the cache: they take memory, and hardly time
            yield rollout(name="write to the cache", holds=_CACHE, donates=_CACHE, calls=0)
        case ("copy", _):
            yield rollout(name="copy a page", holds=_CACHE, donates=_CACHE, calls=0)
        case ("get", *_):
            yield rollout(name="pages to the host", holds=_CACHE, calls=0)
        case ("put", *_):
            yield rollout(name="pages from the host", holds=_CACHE, donates=_CACHE, calls=0)
        case ("weights", _):
            holds = published.holds | _WEIGHTS
            yield rollout(name="take weights", phase="weights", holds=holds, donates=_WEIGHTS)
        case ("staged weights", _):
            embed = published.params["embed"]
            stage = staging_mesh(mesh, tuple(embed.sharding.devices_indices_map(embed.shape)))
            yield rollout(
                name="arrange weights", phase="weights", mesh=stage, holds=published.holds, copies=1
            )


# --- what a model needs of a call -----------------------------------------------------------------


def pass_flops(model: DecoderConfig, tokens: int, *, visible: float, head: bool = True) -> float:
    """Return the operations of a forward pass over one context; a multiplication and an addition are two.

    Args:
        model: the architecture.
        tokens: tokens of the pass.
        visible: positions that a token attends to on average.
        head: logits of every token are computed.
    """
    chosen = 1.0 if model.experts is None else model.experts.per_token / model.experts.count
    layer = 0.0
    for name, shape in model.layer_shapes().items():
        parameter = PARAMETERS[name]
        if parameter.kind in (Kind.MATRIX, Kind.ROUTER):
            layer += math.prod(shape) * (chosen if parameter.is_of_experts else 1.0)
    spans = [
        min(visible, model.sliding_window or visible) if model.is_windowed(i) else visible
        for i in range(model.num_layers)
    ]
    attention = 4 * model.num_heads * model.head_dim * sum(spans)
    return tokens * (
        2 * (model.num_layers * layer + head * model.vocab_size * model.hidden_size) + attention
    )


class EngineWork(NamedTuple):
    """What an engine has to compute and read, from its described arrays; all devices together."""

    model: DecoderConfig
    weights: EngineParams
    cache: KVCache

    def of(self, key: tuple) -> tuple[float, float] | None:
        """Return operations and bytes of a program of the engine's table, or of one step; None if it runs no model."""
        if self.model.vision is not None:
            return None
        match key:
            case (str(kind), _, width, span) if kind.startswith("decode"):
                return pass_flops(self.model, width, visible=span), self._weights(width) + self._kv(
                    width, span
                )
            case ("chunks", _, rows, count, span):
                flops = pass_flops(
                    self.model, rows * count, visible=span + (count + 1) / 2, head=False
                )
                return flops, self._weights(rows * count, head=False) + self._kv(rows, span)
        return None

    def _weights(self, tokens: int, *, head: bool = True) -> float:
        """Return the bytes of all layers' weights, of the experts that so many tokens choose, and of the head."""
        experts, size = self.model.experts, 0.0
        for layer in self.weights.layers:
            for name, weight in layer.items():
                # Each token misses an expert with probability 1 - k / E.
                missed = (
                    0.0
                    if experts is None or not name.startswith("expert")
                    else (1 - experts.per_token / experts.count) ** tokens
                )
                size += _bytes(weight) * (1 - missed)
        return size + head * _bytes(
            self.weights.embed if self.weights.head is None else self.weights.head
        )

    def _kv(self, contexts: int, span: int) -> float:
        """Return the bytes of the visible positions; keys and values that are kept twice count once."""
        size = 0.0
        for number, layer in enumerate(self.cache.layers):
            windowed = self.model.is_windowed(number)
            visible = min(span, self.model.sliding_window or span) if windowed else span
            kept = layer.values.shape[1] / self.model.num_kv_heads
            size += (
                contexts
                * visible
                * _bytes(layer)
                / (layer.values.shape[0] * layer.values.shape[2])
                / kept
            )
        return size


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
