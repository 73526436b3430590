"""The inventory of a run's devices: the programs it compiles, and the arrays resident between them.

Learner and engine are the run's own, given described arrays: the learner's functions are traced, and the engine runs
over a table that records what it is asked to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jax_agent_rl.config import Config, LearnerConfig
from jax_agent_rl.config.rollout import restricts_sampling
from jax_agent_rl.deploy.plan.micro_batches import Arrays, micro_batches
from jax_agent_rl.deploy.plan.prediction import EngineWork, pass_flops
from jax_agent_rl.deploy.plan.teachers import add_teachers
from jax_agent_rl.deploy.plan.topology import DevicePlacement
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.decode_batch import (
    ALL_ALLOWED,
    PREFILL_ROWS,
    DecodeBatch,
    make_decode_batch,
    truncation_of,
)
from jax_agent_rl.jetstream.engine import Extension, JaxEngine
from jax_agent_rl.jetstream.kv_cache import MOVED_TOGETHER
from jax_agent_rl.jetstream.programs import NextCall, ProgramTable, traced
from jax_agent_rl.jetstream.sharding import learner_shardings
from jax_agent_rl.jetstream.vision_engine import VisionEngine
from jax_agent_rl.jetstream.weights import staging_mesh
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.optimized_params import UpdatePrograms
from jax_agent_rl.learner.optimizer import TrainState, learning_rate
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import Device, parameter_shardings, place, replicated, row_sharding, row_shards
from jax_agent_rl.runtime.engines import engine_precision, engine_shapes
from jax_agent_rl.trainer.groups import training_sampling
from jax_agent_rl.utils.sampling_support import mask_words

Phase = Literal["learner", "weights", "rollout"]
Tokens = Literal["prompts", "sampled", "trained"]

WEIGHTS, CACHE = "engine weights", "KV cache"
_WEIGHTS, _CACHE, _BOTH = frozenset({WEIGHTS}), frozenset({CACHE}), frozenset({WEIGHTS, CACHE})


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a run.

    Attributes:
        name: shown to the user.
        phase: phase of a step in which it runs.
        traced: the program, to be compiled.
        mesh: its devices; the compiler numbers them in this order.
        holds: names of the :class:`Resident` arrays among its arguments.
        donates: names of residents whose memory, or as much, its outputs take.
        loops: iterations of a loop whose end is found while it runs.
        tokens: tokens that a full call takes or gives.
        of: which tokens of a step these are; None if the program does not process tokens.
        calls: runs per step over all those tokens; 0 where its time does not count.
        model_flops: operations that the model itself needs for a call, on all devices together: nothing recomputed.
        model_bytes: bytes that have to pass through the memories: weights and the visible KV, once. None, as for
            ``model_flops``: what is counted in the trace.
        rare_branches: what few runs need counts, too, where the program has branches.
    """

    name: str
    phase: Phase
    traced: jax.stages.Traced
    mesh: Mesh
    holds: frozenset[str] = frozenset()
    donates: frozenset[str] = frozenset()
    loops: int = 1
    tokens: int = 0
    of: Tokens | None = None
    calls: int = 1
    model_flops: float | None = None
    model_bytes: float | None = None
    rare_branches: bool = True


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Arrays that stay on devices between programs: a tree of described arrays, except in the ``absent`` phases."""

    name: str
    arrays: Any
    absent: frozenset[Phase] = frozenset()

    @functools.cached_property
    def bytes(self) -> Mapping[Device, int]:
        """Bytes on each device that holds some, without padding."""
        sums: dict[Device, int] = {}
        for x in jax.tree.leaves(self.arrays):
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for device in x.sharding.device_set:
                sums[device] = sums.get(device, 0) + size
        return sums


@dataclass(kw_only=True)
class Inventory:
    """Programs and resident arrays of a run, or of a phase of it."""

    programs: list[Program] = field(default_factory=list)
    residents: list[Resident] = field(default_factory=list)

    def keep(self, name: str, arrays: Any, *, absent: frozenset[Phase] = frozenset()) -> frozenset[str]:
        """Record resident arrays, if there are any; return their name for :attr:`Program.holds`."""
        if not jax.tree.leaves(arrays):
            return frozenset()
        self.residents.append(Resident(name=name, arrays=arrays, absent=absent))
        return frozenset({name})


class Published(NamedTuple):
    """The parameters an engine is given, and the names of the residents that they are (none if they are copies)."""

    params: Params
    holds: frozenset[str]


def inventory(config: Config, model: DecoderConfig, where: DevicePlacement, *, only: Phase | None = None) -> Inventory:
    """Return programs and arrays of a run.

    Args:
        config: configuration of the run.
        model: its architecture.
        where: devices of each phase.
        only: leave out what this phase does not need, ``learner`` or ``rollout``; None leaves out nothing.

    Raises:
        ConfigError: a mesh does not divide the model, or the configuration does not go with it.
    """
    made = Inventory()
    published = None if only == "rollout" else _add_learner(made, config, model, where.learner)
    if where.engines and only != "learner":
        mesh = where.engines[0]  # the others are like it
        shapes, there = model.parameter_shapes(), learner_shardings(model, mesh)
        if published is None or config.rollout.placement == "separate":  # from files, read for these very devices
            published = Published(_describe(shapes, there), frozenset())
        elif len(where.engines) > 1:  # copied for each of them
            published = Published(_describe(shapes, there, dtype=config.rollout.jetstream.dtype), frozenset())
        _add_engine(made, config, model, mesh, published)
    return made


def _describe(shapes: Any, shardings: Any, *, dtype: str = "float32") -> Any:
    """Return a described array for every shape of a tree, with its sharding."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, tuple),
    )


# --- learner ------------------------------------------------------------------------------------------------------


def _add_learner(made: Inventory, config: Config, model: DecoderConfig, mesh: Mesh) -> Published:
    """Trace the learner; return the parameters that an engine of its process is given."""
    learner, algorithm, steps = config.learner, config.algorithm, config.trainer.steps
    params = _describe(model.parameter_shapes(), parameter_shardings(mesh, model.parameter_shapes()))
    policy = Parameterization.policy(model, params, learner, mesh=mesh)
    programs = LearnerPrograms.of(
        model,
        policy,
        algorithm=algorithm,
        config=learner,
        temperature=config.rollout.temperature,
        mesh=mesh,
        rate=learning_rate(learner, steps),
    )
    scores_old = not (programs.objective.on_policy or programs.objective.bypass)
    builder = LearnerBuilder(made, mesh, learner, model, learner.micro_batch_size * row_shards(mesh))
    batches = micro_batches(config, model, rows=builder.rows, scored=scores_old)
    state, holds = builder.update("policy", programs.policy, policy.params, policy.frozen, batches["policy"])
    weights, layout = (state.params, policy.frozen), batches["layout"]
    with_reference, top_k = algorithm.kl.where != "none" and config.distill is None, algorithm.kl.top_k > 0
    if with_reference:
        made.keep("reference", policy.reference()[0])
    if scorings := scores_old + (with_reference and not top_k):
        builder.read("score", programs.score, weights, layout, holds, calls=scorings)
    if with_reference and top_k:
        builder.read("likeliest", programs.likeliest, weights, layout, holds)
    add_teachers(builder, config, layout)
    if learner.router_aux_loss_coef:
        builder.read("route", programs.route, weights, layout, holds, calls=learner.ppo_epochs)
    if "critic" in batches:
        initial, rate = jax.eval_shape(critic_params, params), learning_rate(config.critic, steps)
        own = Parameterization.critic(model, initial, learner, mesh=mesh)
        update = programs.critic(own, config.critic, rate=rate)
        critic, holds_critic = builder.update("critic", update, own.params, own.frozen, batches["critic"])
        builder.read("values", programs.values, (critic.params, own.frozen), layout, holds_critic)
    return builder.publish(policy, state, holds)


class LearnerBuilder(NamedTuple):
    """Adds the learner's programs to an inventory; ``rows`` counts those of a micro-batch."""

    inventory: Inventory
    mesh: Mesh
    config: LearnerConfig
    model: DecoderConfig
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.config.pack_length

    def flops(self, passes: int) -> float | None:
        """Operations of so many passes over the model; a backward pass is two. Unknown with a vision tower."""
        if self.model.vision is not None:
            return None
        count = self.config.pack_length
        return passes * self.rows * pass_flops(self.model, count, visible=(count + 1) / 2)

    def update(
        self, name: str, programs: UpdatePrograms, params: Params, frozen: Params, batch: Arrays
    ) -> tuple[TrainState, frozenset[str]]:
        """Add a model's gradient and update; return its state, and the names of what passes over it hold."""
        state = jax.tree.map(place, jax.eval_shape(programs.init, params), programs.places)
        holds = self.inventory.keep(f"{name} parameters", state.params)
        both = holds | self.inventory.keep(f"{name} optimizer", state.opt_state)
        reads = holds | self.inventory.keep(f"{name} frozen", frozen)
        gradients, epochs = state.params, self.config.ppo_epochs
        accumulate = programs.accumulate.trace(state.params, frozen, gradients, self._describe_batch(batch))
        tokens = {"tokens": self.tokens, "of": "trained"}
        passes = 3 if self.config.lora is None else 2  # frozen weights have no gradients
        flops = self.flops(passes)
        self._add(f"{name} gradient", accumulate, reads, donates=holds, calls=epochs, model_flops=flops, **tokens)
        apply = programs.apply.trace(state, gradients, state.updates)
        self._add(f"{name} update", apply, both, donates=both, calls=epochs * self.config.num_minibatches)
        return state, reads

    def read(
        self,
        name: str,
        program: Any,
        weights: tuple[Params, Params],
        batch: Arrays,
        holds: frozenset[str],
        calls: int = 1,
    ) -> None:
        """Add a pass that changes nothing."""
        traced = program.trace(*weights, batch=self._describe_batch(batch))
        flops = self.flops(1)
        self._add(name, traced, holds, tokens=self.tokens, of="trained", calls=calls, model_flops=flops)

    def publish(self, policy: Parameterization, state: TrainState, holds: frozenset[str]) -> Published:
        """Describe ``Learner.params``, or ``LeadingLearner.params`` with several processes."""
        merged = self.config.lora is not None
        if merged:
            merge = policy.merge.trace(state.params, policy.frozen)
            whole = jax.tree.map(place, merge.out_info, merge.lower().compile().output_shardings)
            program = Program(name="merge adapters", phase="weights", traced=merge, mesh=self.mesh)
            self.inventory.programs.append(program)
        else:
            whole = policy.merge(state.params, policy.frozen)
        if len({device.process_index for device in self.mesh.devices.flat}) == 1:
            return Published(whole, frozenset() if merged else holds)
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        return Published(jax.tree.map(lambda x: place(x, first), whole), frozenset())

    def _add(self, name: str, traced: jax.stages.Traced, holds: frozenset[str], **more: Any) -> None:
        program = Program(name=name, phase="learner", traced=traced, mesh=self.mesh, holds=holds, **more)
        self.inventory.programs.append(program)

    def _describe_batch(self, batch: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe micro-batches as ``Learner`` places them: rows sharded, scalars of the update replicated."""
        rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim > 1 else everywhere)
            for name, x in batch.items()
        }


# --- engine -------------------------------------------------------------------------------------------------------


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

        def result(sharding: NamedSharding, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | np.ndarray:
            zeros = x.dtype == jnp.int32
            return np.broadcast_to(np.zeros((), x.dtype), x.shape) if zeros else x.update(sharding=sharding)

        return jax.tree.map(
            lambda sharding, part: jax.tree.map(functools.partial(result, sharding), part), out, program.out_info
        )


def _add_engine(made: Inventory, config: Config, model: DecoderConfig, mesh: Mesh, published: Published) -> None:
    """Trace the largest programs of one engine, which is given the published parameters."""
    shapes = engine_shapes(config)
    table, kind = RecordingTable(), JaxEngine if model.vision is None else VisionEngine
    precision: dict[str, Any] = engine_precision(config)
    precision["dtype"] = jnp.dtype(precision["dtype"])
    engine = kind(model, shapes, **precision, mesh=mesh, table=table)
    weights, cache = engine.load_params(published.params), engine.init_cache()
    last = shapes.cache_length - shapes.decode_steps
    slots = make_decode_batch(shapes.max_concurrent_decodes, shapes.context_pages, last)
    engine.decode(weights, cache, _restricted(slots, config, model), shapes.decode_steps, 1)
    if shapes.num_speculative_tokens:
        engine.verify(weights, cache, slots, [()] * len(slots.tokens))
    size = shapes.chunk_buckets[-1]
    chunk = Extension(pages=(), start=max(0, shapes.cache_length - size), ids=np.zeros(size, np.int32))
    engine.extend(weights, cache, [chunk] * PREFILL_ROWS)
    engine.copy_page(cache, 0, 0)
    if shapes.kv_offloading_bytes:
        pages = [NULL_PAGE] * MOVED_TOGETHER[-1]
        engine.overwrite_pages(cache, engine.get_pages(cache, pages), np.asarray(pages, np.int32))
    absent: frozenset[Phase] = frozenset({"learner"}) if config.rollout.sleep_during_update else frozenset()
    made.keep(WEIGHTS, weights, absent=absent)
    made.keep(CACHE, cache, absent=absent)
    work = EngineWork(model, weights, cache)
    rare = config.rollout.temperature == 0  # otherwise no slot is greedy
    for key, program in table.recorded.items():
        needed = work.of(key)
        for one in _engine_programs(key, program, mesh, published, shapes.decode_steps):
            if needed is not None:
                flops, size = (each * one.loops for each in needed)
                one = replace(one, model_flops=flops, model_bytes=size, rare_branches=rare)
            made.programs.append(one)


def _restricted(slots: DecodeBatch, config: Config, model: DecoderConfig) -> DecodeBatch:
    """Add what restricts the draws of training: top-p and the like, and the grammars of tool calls."""
    count = len(slots.tokens)
    if restricts_sampling(config.rollout):
        slots = replace(slots, truncation=truncation_of([training_sampling(config)] * count))
    if config.agent.constrain_tool_calls:
        allowed = np.full((count, mask_words(model.vocab_size)), ALL_ALLOWED)
        slots = replace(slots, allowed=allowed)
    return slots


def _engine_programs(
    key: tuple, program: jax.stages.Traced, mesh: Mesh, published: Published, steps: int
) -> Iterator[Program]:
    """Yield the program of a key of the engine's table; nothing for what only allocates."""
    rollout = functools.partial(Program, phase="rollout", mesh=mesh, traced=program)
    match key:
        case (str(kind), _, width, span) if kind.startswith("decode"):
            steps = 1 if kind.endswith("constrained") else steps  # a grammar needs each id before the next
            name, tokens = f"{kind} {width} slots of {span}", width * steps
            yield rollout(name=name, holds=_BOTH, donates=_CACHE, loops=steps, tokens=tokens, of="sampled")
        case ("verify", *_):  # how often drafts are verified is found while a run samples
            yield rollout(name="verify drafts", holds=_BOTH, donates=_CACHE if len(key) == 3 else frozenset(), calls=0)
        case ("chunks", _, rows, size, span):
            yield rollout(name=f"prefill {rows} x {size} after {span}", holds=_BOTH, tokens=rows * size, of="prompts")
        case ("write", *_):  # this and the next three touch a few pages of the cache: they take memory, and hardly time
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
            yield rollout(name="arrange weights", phase="weights", mesh=stage, holds=published.holds)
