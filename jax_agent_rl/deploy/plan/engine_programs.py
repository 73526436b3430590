"""The engine's programs: the run's engine over a table that records what it is asked to run."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Inventory, Phase, Program, Published
from jax_agent_rl.deploy.plan.model_flops import pass_flops, visible_positions
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
from jax_agent_rl.jetstream.kv_cache import MOVED_TOGETHER, KVCache, LayerKV
from jax_agent_rl.jetstream.programs import CompilerOptions, NextCall, ProgramTable, traced
from jax_agent_rl.jetstream.weights import JointParams, LayerSource, staging_mesh
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.runtime.engines import engine_precision, engine_shapes
from jax_agent_rl.trainer.step import training_sampling
from jax_agent_rl.types.supports import mask_words

WEIGHTS = "engine weights"
CACHE = "KV cache"
_WEIGHTS = frozenset({WEIGHTS})
_CACHE = frozenset({CACHE})
_BOTH = frozenset({WEIGHTS, CACHE})


class RecordingTable(ProgramTable):
    """A table that runs nothing: it records programs, and returns descriptions of their results.

    Ids, which the engine reads on the host, are zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[tuple, jax.stages.Traced] = {}
        self.calls = Counter[tuple]()

    def call(
        self,
        key: tuple,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        default_sharding: NamedSharding,
        out: Any,
        next_call: Callable[[], NextCall] | None = None,
        compiler_options: CompilerOptions | None = None,
    ) -> Any:
        """Record a program; see :meth:`ProgramTable.call`, but ``next_call`` is never called."""
        if key not in self.recorded:
            self.recorded[key] = traced(
                function, donate, *args, default_sharding=default_sharding, out=out
            )
        program = self.recorded[key]
        self.calls[key] += 1

        # ``out`` has one sharding for each part of the results, which may be a tree itself.
        def describe_part(sharding: NamedSharding, part: Any) -> Any:
            return jax.tree.map(functools.partial(_described, sharding), part)

        return jax.tree.map(describe_part, out, program.out_info)


def _described(
    sharding: NamedSharding, result: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | np.ndarray:
    """Return the description of a result with its sharding; zeros for ids."""
    if result.dtype == jnp.int32:
        return np.broadcast_to(np.zeros((), result.dtype), result.shape)
    return result.update(sharding=sharding)


def add_engine(
    inventory: Inventory,
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    published: Published,
    *,
    compiled_for: Mesh,
    engines: int,
) -> None:
    """Trace the largest programs of an engine that is given the published parameters.

    Its arrays are counted on ``mesh``; its programs are traced for ``compiled_for``, a mesh of the
    same shape.

    Args:
        config: of one host's engines, see ``of_one_host``.
        engines: number of engines that share its trajectories.
    """
    shapes = engine_shapes(config)
    precision: dict[str, Any] = engine_precision(config)
    precision["dtype"] = jnp.dtype(precision["dtype"])
    table = RecordingTable()
    engine = JaxEngine(
        model,
        shapes,
        **precision,
        mesh=compiled_for,
        program_table=table,
        takes_images=model.vision is not None and not config.rollout.deterministic,
        deterministic=config.rollout.deterministic,
    )
    params = published.params
    if published.by_layer:
        params = JointParams(params, DescribedCopies())
    weights = engine.load_params(params)
    cache = engine.init_cache()

    # The engine runs each of its programs once, at the largest sizes.
    last_position = shapes.cache_length - shapes.decode_steps
    slots = make_decode_batch(shapes.max_concurrent_decodes, shapes.context_pages, last_position)
    engine.decode(weights, cache, _restricted(slots, config, model), shapes.decode_steps, 1)
    if shapes.num_speculative_tokens:
        engine.verify(weights, cache, slots, [()] * len(slots.tokens))
    chunk_size = shapes.chunk_buckets[-1]
    chunk = Extension(
        pages=(),
        start=max(0, shapes.cache_length - chunk_size),
        ids=np.zeros(chunk_size, np.int32),
    )
    if not config.rollout.deterministic:  # else the same program feeds prompts
        engine.extend(weights, cache, [chunk] * PREFILL_ROWS)
    engine.copy_page(cache, 0, 0)
    if engine.context.has_states:
        engine.copy_state(cache, 0, 0)
    if shapes.kv_offloading_bytes:
        pages = [NULL_PAGE] * MOVED_TOGETHER[-1]
        engine.overwrite_pages(cache, engine.get_pages(cache, pages), np.asarray(pages, np.int32))

    absent: frozenset[Phase] = frozenset()
    if config.rollout.sleep_during_update:
        absent = frozenset({"learner"})
    inventory.keep(WEIGHTS, _placed(weights, mesh), absent=absent)
    inventory.keep(CACHE, _placed(cache, mesh), absent=absent)

    work = EngineWork(model, weights, cache)
    share = running_share(config, engines)
    has_greedy_slots = config.rollout.temperature == 0
    for key, recorded in table.recorded.items():
        model_work = work.of(key)
        for program in _engine_programs(
            key, recorded, mesh, model, weights, published, shapes.decode_steps
        ):
            if program.phase == "weights":
                program = replace(program, calls=table.calls[key])
            if program.token_kind in ("sampled", "fed"):
                program = replace(program, tokens=max(1, round(program.tokens * share)))
            if model_work is not None:
                flops, size = model_work
                program = replace(
                    program,
                    model_flops=flops * program.loops,
                    model_bytes=size * program.loops,
                    rare_branches=has_greedy_slots,
                )
            inventory.programs.append(program)


def _placed(tree: Any, mesh: Mesh) -> Any:
    """Return described arrays on another mesh of the same shape."""

    def move(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return array.update(sharding=NamedSharding(mesh, array.sharding.spec))

    return jax.tree.map(move, tree)


def running_share(config: Config, engines: int) -> float:
    """Return the share of an engine's slots for which there are trajectories and KV cache.

    Answers have their full length, and prompts are shared.
    """
    shapes = engine_shapes(config)
    agent = config.agent
    trajectories = config.rollout.max_in_flight / engines
    context = agent.max_prompt_length / config.rollout.group_size + agent.max_response_length / 2
    contexts_in_cache = shapes.kv_cache_tokens / context
    running = min(trajectories, contexts_in_cache)
    return min(1.0, running / shapes.max_concurrent_decodes)


def _restricted(slots: DecodeBatch, config: Config, model: DecoderConfig) -> DecodeBatch:
    """Add what restricts training's draws: top-p and the like, and the grammars of tool calls."""
    count = len(slots.tokens)
    if config.rollout.restricts_sampling:
        slots = replace(slots, truncation=truncation_of([training_sampling(config)] * count))
    if config.agent.constrain_tool_calls:
        allowed = np.full((count, mask_words(model.vocab_size)), ALL_ALLOWED)
        slots = replace(slots, allowed=allowed)
    return slots


def _engine_programs(
    key: tuple,
    program: jax.stages.Traced,
    mesh: Mesh,
    model: DecoderConfig,
    weights: EngineParams,
    published: Published,
    steps: int,
) -> Iterator[Program]:
    """Yield the program of a key of the engine's table; nothing if it only allocates.

    Args:
        weights: the engine's, described.
        steps: tokens that a call of ``decode`` samples for each slot.
    """
    rollout = functools.partial(
        Program, phase="rollout", mesh=mesh, traced=program, copies=mesh.shape["data"]
    )
    match key:
        case (str(kind), _, width, span) if kind.startswith("decode"):
            if kind.endswith("constrained"):
                steps = 1  # a grammar needs each id before the next
            yield rollout(
                name=f"{kind} {width} slots of {span}",
                holds=_BOTH,
                donates=_CACHE,
                loops=steps,
                tokens=width * steps,
                token_kind="sampled",
            )
        case ("deterministic", _, width, span):
            yield rollout(
                name=f"feed {width} slots of {span}",
                holds=_BOTH,
                donates=_CACHE,
                loops=steps,
                tokens=width * steps,
                token_kind="fed",
            )
        case ("verify", *_):  # how often drafts are verified is found while a run samples
            donates = _CACHE if len(key) == 3 else frozenset()
            yield rollout(name="verify drafts", holds=_BOTH, donates=donates, calls=0)
        case ("chunks", _, rows, size, span):
            yield rollout(
                name=f"prefill {rows} x {size} after {span}",
                holds=_BOTH,
                tokens=rows * size,
                token_kind="prompts",
            )
        # The next five touch a few pages of the cache: they take memory, and hardly any time.
        case ("write", *_):
            yield rollout(name="write to the cache", holds=_CACHE, donates=_CACHE, calls=0)
        case ("copy", _):
            yield rollout(name="copy a page", holds=_CACHE, donates=_CACHE, calls=0)
        case ("copy state", _):
            yield rollout(name="copy a state", holds=_CACHE, donates=_CACHE, calls=0)
        case ("get", *_):
            yield rollout(name="pages to the host", holds=_CACHE, calls=0)
        case ("put", *_):
            yield rollout(name="pages from the host", holds=_CACHE, donates=_CACHE, calls=0)
        case ("weights", *part):
            arranged = _part_of(model, weights, part)
            yield rollout(
                name=f"take weights{_describe_part(part)}",
                phase="weights",
                holds=published.holds,
                donates=_WEIGHTS,
                donated_bytes=_bytes_on_device(arranged),
                model_bytes=_source_bytes(part) + _bytes(arranged),
            )
        case ("staged weights", *part):
            embed = published.params["embed"]
            stage = staging_mesh(mesh, tuple(embed.sharding.devices_indices_map(embed.shape)))
            yield rollout(
                name=f"arrange weights{_describe_part(part)}",
                phase="weights",
                mesh=stage,
                holds=published.holds,
                copies=1,
                model_bytes=_source_bytes(part) + _bytes(_part_of(model, weights, part)),
            )


def _describe_part(part: Sequence[Any]) -> str:
    """Return the words for a part of the weights, by its key in the engine's table."""
    match part:
        case ("layer", LayerKind(mixer=mixer, feed_forward=feed_forward), *_):
            return f" of a layer, {mixer} and {feed_forward}"
    return ", all but layers"


def _part_of(model: DecoderConfig, weights: EngineParams, part: Sequence[Any]) -> Any:
    """Return the part of described weights that a key of the engine's table names."""
    match part:
        case ("layer", LayerKind() as kind, *_):
            return weights.layers[model.layer_kinds.index(kind)]
    return replace(weights, layers=())


def _source_bytes(part: Sequence[Any]) -> float:
    """Return the bytes of the learner's parameters that a part is made of, on all devices."""
    is_layer = part[0] == "layer"
    layouts = part[2:] if is_layer else part[1:]
    size = 0
    for _, shape, dtype, _ in layouts:
        if is_layer:
            shape = shape[1:]  # of stacks of several layers
        size += math.prod(shape) * jnp.dtype(dtype).itemsize
    return float(size)


def _bytes_on_device(tree: Any) -> int:
    """Return a device's bytes of described arrays, without padding."""
    size = 0
    for array in jax.tree.leaves(tree):
        size += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return size


class DescribedCopies:
    """Describes what a process of several gets of the parameters, which are described there."""

    def layer(self, source: LayerSource) -> LayerSource:
        """Return one layer, alone in its arrays."""
        alone = {}
        for name, x in source.stacked.items():
            alone[name] = x.update(shape=(1, *x.shape[1:]))
        return LayerSource(alone, source.indices)

    def others(self, params: Params) -> Params:
        """Return all parameters but the layers."""
        return params


# --- what a model needs of a call -----------------------------------------------------------------


class EngineWork(NamedTuple):
    """What an engine has to compute and read, on all devices together.

    Attributes:
        weights: described arrays.
        cache: described arrays.
    """

    model: DecoderConfig
    weights: EngineParams
    cache: KVCache

    def of(self, key: tuple) -> tuple[float, float] | None:
        """Return operations and bytes of a call of a program in the engine's table.

        Where a call has several steps, they count for one step. None if the program runs no model.
        """
        if self.model.vision is not None:
            return None
        match key:
            case (str(kind), _, width, span) if kind.startswith(("decode", "deterministic")):
                flops = pass_flops(self.model, width, visible=span, over_latents=True)
                return flops, self._weight_bytes(width) + self._kv_bytes(width, span)
            case ("chunks", _, rows, count, span):
                tokens = rows * count
                visible = span + (count + 1) / 2
                flops = pass_flops(
                    self.model, tokens, visible=visible, head=False, over_latents=True
                )
                size = self._weight_bytes(tokens, head=False) + self._kv_bytes(rows, span)
                return flops, size
        return None

    def _weight_bytes(self, tokens: int, *, head: bool = True) -> float:
        """Return the bytes of the weights that a pass reads.

        Of experts, these are the ones that so many tokens choose.
        """
        experts = self.model.experts
        expert_share = 1.0
        if experts is not None:
            # Each token misses an expert with probability 1 - k / E.
            expert_share = 1 - (1 - experts.per_token / experts.count) ** tokens

        size = 0.0
        for layer in self.weights.layers:
            for name, weight in layer.items():
                if name.startswith("expert"):
                    size += _bytes(weight) * expert_share
                else:
                    size += _bytes(weight)
        if head and self.weights.head is not None:
            size += _bytes(self.weights.head)
        elif head:  # the embeddings are the head as well
            size += _bytes(self.weights.embed)
        return size

    def _kv_bytes(self, contexts: int, span: int) -> float:
        """Return the bytes of the visible positions, and of states, which are written as well.

        Keys and values that are kept on several devices count once.
        """
        size = 0.0
        for array in jax.tree.leaves(self.cache.states):
            size += 2 * contexts * _bytes(array) / array.shape[0]
        for number, kind in enumerate(self.model.layer_kinds):
            layer = self.cache.layers[self.model.keys_source(number)]
            if layer is None:  # a recurrent one
                continue
            bytes_per_position = _bytes(layer) / (layer.count * layer.length)
            copies = 1.0
            if isinstance(layer, LayerKV):
                copies = layer.values.shape[1] / self.model.heads(kind.mixer).num_kv_heads
            visible = visible_positions(self.model, number, span)
            size += contexts * visible * bytes_per_position / copies
        return size


def _bytes(tree: Any) -> float:
    return float(sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree)))
