"""Continuous batching over user-supplied engines of JetStream's later API, such as MaxEngine.

That API (JetStream 0.3.0) differs from 0.2.2's in what is used here: ``prefill`` also returns the
first sampled id, and ``ResultTokens`` has ``log_prob``. The user describes the arguments an engine
takes beyond it in :class:`ExternalEngine`; see ``third_party/jetstream.md``.

::

    submit ──► waiting ──admit──► running ──generate──► finished
                 ▲   prefill (first id), insert in a slot   │  ids, log-probs, versions
                 └── until a slot is free and all running   └─ slot freed
                     requests sample the same way

The engine samples all slots in the same mode, so greedy and random requests take turns: a request
of the other mode waits until the running ones end, and none overtakes it. The engine knows neither
stop ids nor budgets: a dispatch runs as many steps as the smallest remaining budget, and ids after
a stop are dropped here.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.chat.grammar import GrammarState
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.scheduler import Progress, Scheduler
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    TokenChunk,
)
from jax_agent_rl.utils.plugins import load_user_module
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

KEY = "rollout.jetstream.engine_factory"


@dataclass(frozen=True, kw_only=True)
class ExternalEngine:
    """What the function named by ``rollout.jetstream.engine_factory`` returns.

    Attributes:
        engine: an ``Engine`` of JetStream's later API whose ``prefill`` and ``generate`` also take
            ``rng``, a jax key, and whose log-probs are of the raw logits.
        to_params: maps the learner's parameter tree to the engine's params.
        max_new_tokens: ids a slot can hold after its prompt (the engine may then overwrite the
            oldest).
        sampled: further arguments of ``prefill`` and ``generate`` to sample at temperature 1 from
            all ids.
        greedy: the same for greedy decoding; None if the engine cannot.
    """

    engine: Any
    to_params: Callable[[Params], Any]
    max_new_tokens: int
    sampled: Mapping[str, Any] = field(default_factory=dict)
    greedy: Mapping[str, Any] | None = None


MakeEngine = Callable[[DecoderConfig, EngineShapes], ExternalEngine]


def load_engine_function(where: str) -> MakeEngine:
    """Load the function named by ``package.module:function`` or ``file.py:function``.

    Raises:
        ConfigError: there is no such function.
    """
    module_name, colon, name = where.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{KEY}={where!r} names no function; write package.module:function or file.py:function"
        )
    function = getattr(load_user_module(module_name, key=KEY), name, None)
    if not callable(function):
        raise ConfigError(f"{KEY}={where!r}: {module_name} has no function {name!r}")
    return cast(MakeEngine, function)


class ExternalEngineAdapter:
    """An external engine as :class:`ExternalScheduler` drives it, by slots and host arrays.

    Every call takes its own random key. Not thread-safe.

    Args:
        shapes: what the rollout was configured for; the engine must be at least as large. Slots
            beyond ``max_concurrent_decodes`` stay empty.

    Raises:
        ConfigError: the engine is too small, or lacks something.
    """

    adapters: tuple[str, ...] = ()

    def __init__(
        self, external: ExternalEngine, config: DecoderConfig, shapes: EngineShapes
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.engine = external.engine
        self.external = external
        self._check()

    def load_params(self, params: Params, old: Any = None) -> Any:
        """Copy the learner's tree into the engine's params.

        Args:
            params: the learner's tree.
            old: ignored, so two sets of weights exist for a moment.
        """
        # The leaves may share the learner's memory, which its next step donates. One by one, so
        # that each is freed once it is copied.
        leaves, tree = jax.tree.flatten(self.external.to_params(params))
        for i, leaf in enumerate(leaves):
            leaves[i] = jnp.copy(leaf)
        return jax.tree.unflatten(tree, leaves)

    def offload_params(self, params: Any) -> Any:
        """Copy weights to the host."""
        return jax.tree.map(np.array, params)

    def init_cache(self) -> Any:
        """Return an empty decode state."""
        return self.engine.init_decode_state()

    def prefill(
        self, params: Any, ids: np.ndarray, key: jax.Array, *, greedy: bool
    ) -> tuple[Any, Any]:
        """Prefill a prompt, int32 [n]; return its prefix and a result with the first sampled id."""
        padded = np.zeros(bucket(self._buckets, len(ids)), np.int32)
        padded[: len(ids)] = ids
        return self.engine.prefill(
            params=params,
            padded_tokens=jnp.asarray(padded),
            true_length=len(ids),
            rng=key,
            **self._sampling(greedy),
        )

    def generate(self, params: Any, state: Any, key: jax.Array, *, greedy: bool) -> tuple[Any, Any]:
        """Step every slot, filled or not; return state and result."""
        return self.engine.generate(params, state, rng=key, **self._sampling(greedy))

    def warm_up(self, params: Any, state: Any, print_line: Callable[[str], None]) -> Any:
        """Run every program once and check its results.

        Args:
            params: the engine's weights.
            state: the decode state, donated.
            print_line: called with a line of progress before each program.

        Raises:
            ConfigError: results have no log-probs.
        """
        modes = [False] if self.external.greedy is None else [False, True]
        jobs = list(itertools.product(modes, self._buckets))
        log_probs: list[np.ndarray] = []
        for number, (greedy, size) in enumerate(jobs, 1):
            mode = ", greedy" if greedy else ""
            print_line(f"compiling prompts of {size}{mode} ({number} of {len(jobs)})")
            key = jax.random.key_data(jax.random.key(number))
            prompt = np.arange(size, dtype=np.int32) % 2
            prefix, prefill_result = self.prefill(params, prompt, key, greedy=greedy)
            state = self.engine.insert(prefix, state, 0)
            state, decode_result = self.generate(params, state, key, greedy=greedy)
            for _, result_log_probs in read_results([prefill_result, decode_result]):
                log_probs.append(result_log_probs)
        self.engine.free_resource(0)

        if not any(x.any() for x in log_probs):
            raise ConfigError(
                f"{KEY}: the engine returns log-probs of exactly 0 for every id; switch them on"
                " (MaxText: return_log_prob=true)"
            )
        return state

    @property
    def _buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths; the last holds any prompt."""
        longest = self.shapes.max_model_len - 1
        shorter = [size for size in self.shapes.prefill_buckets if size < longest]
        return (*shorter, self.engine.max_prefill_length)

    def _sampling(self, greedy: bool) -> Mapping[str, Any]:
        arguments = self.external.greedy if greedy else self.external.sampled
        assert arguments is not None  # such requests are refused at submission
        return arguments

    def _check(self) -> None:
        engine = self.engine
        shapes = self.shapes
        slots = engine.max_concurrent_decodes
        if slots < shapes.max_concurrent_decodes:
            raise ConfigError(
                f"{KEY}: the engine has {slots} slots, but"
                f" rollout.jetstream.max_concurrent_decodes={shapes.max_concurrent_decodes}; lower"
                " it, or build the engine with more (MaxText: per_device_batch_size times devices)"
            )

        longest = engine.max_prefill_length
        if longest < shapes.max_model_len - 1:
            raise ConfigError(
                f"{KEY}: the engine prefills at most {longest} ids, but a context of"
                f" rollout.max_model_len={shapes.max_model_len} is prefilled whole at every turn;"
                f" build it for {shapes.max_model_len - 1} (MaxText: max_prefill_predict_length)"
            )

        if engine.samples_per_slot != 1:
            raise ConfigError(
                f"{KEY}: the engine decodes {engine.samples_per_slot} samples per slot; it must"
                " be 1"
            )

        for name in ("prefill", "generate"):
            if "rng" not in inspect.signature(getattr(engine, name)).parameters:
                raise ConfigError(
                    f"{KEY}: {type(engine).__name__}.{name} takes no rng, so two servers would"
                    " sample the same ids; wrap the engine in one that does"
                )


def read_results(results: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copy JetStream's ``ResultTokens`` to the host: ids int32 and log-probs float32, both [slots].

    Raises:
        ConfigError: there are no log-probs.
    """
    if any(result.log_prob is None for result in results):
        raise ConfigError(
            f"{KEY}: ResultTokens.log_prob is None; switch log-probs on (MaxText:"
            " return_log_prob=true)"
        )
    # One transfer for all results.
    arrays = jax.device_get([(result.data, result.log_prob) for result in results])
    outputs = []
    for result, (data, log_prob) in zip(results, arrays, strict=True):
        ids = np.asarray(data)[:, result.tokens_idx[0]]
        log_probs = np.asarray(log_prob, np.float32).reshape(len(data))
        outputs.append((ids, log_probs))
    return outputs


class SlotTable:
    """The ids that each slot holds; a freed slot holds none.

    >>> table = SlotTable(2)
    >>> table.take(np.array([5, 6])), table.take(np.array([7])), table.take(np.array([8]))
    (0, 1, None)
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots))
        self._ids: dict[int, list[int]] = {}

    def take(self, ids: np.ndarray) -> int | None:
        """Take a free slot for a context that begins with these ids; None while there is none."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._ids[slot] = ids.tolist()
        return slot

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """Append ids to a slot's context."""
        self._ids[slot] += ids

    def ids(self, slot: int) -> np.ndarray:
        """Return the context without the id that is fed next, int32."""
        return np.asarray(self._ids[slot], np.int32)

    @property
    def used_share(self) -> float:
        """Share of slots taken, in [0, 1]."""
        return len(self._ids) / self._slots

    def free(self, slot: int, *, session_ends: bool, state_is_current: bool = True) -> None:
        """Free a slot whose request has ended; nothing of it is kept for another one."""
        del self._ids[slot]
        heapq.heappush(self._free, slot)

    def reset(self) -> None:
        """Do nothing: there is no cached KV."""


@dataclass
class ExternalScheduler(Scheduler):
    """A :class:`Scheduler` over an external engine; ``cache`` is its decode state."""

    engine: ExternalEngineAdapter

    def __post_init__(self) -> None:
        super().__post_init__()
        self._key = jax.random.key(self.seed)

    def _make_block_manager(self) -> SlotTable:
        return SlotTable(self.engine.shapes.max_concurrent_decodes)

    def submit(
        self,
        request: GenerateRequest,
        multimodal: MultimodalContext | None = None,
        grammar: GrammarState | None = None,
    ) -> RunningRequest:
        """Queue a request as :meth:`Scheduler.submit` does.

        Raises:
            BackendError: also if the engine cannot report log-probs of such sampling.
        """
        sampling = request.sampling
        name = f"request {request.request_id!r}"
        if sampling.temperature not in (0, 1) or (sampling.temperature and sampling.truncated):
            raise BackendError(
                f"{name}: temperature={sampling.temperature}, top_p={sampling.top_p},"
                f" top_k={sampling.top_k}, min_p={sampling.min_p}, but this engine's log-probs are"
                " of the raw logits: set temperature to 1 (or 0), top_p to 1, top_k and min_p to 0"
            )
        if sampling.temperature == 0 and self.engine.external.greedy is None:
            raise BackendError(
                f"{name}: temperature=0, but this external engine has no greedy mode"
            )

        room = self.engine.shapes.max_model_len - len(request.prompt_ids)
        max_tokens = min(sampling.max_tokens, room)
        slot_room = self.engine.external.max_new_tokens
        if max_tokens > slot_room:
            raise BackendError(
                f"{name} may sample {max_tokens} ids, but a slot holds {slot_room} after its"
                " prompt; lower agent.max_response_length, or build the engine for more (MaxText:"
                " max_target_length - max_prefill_predict_length)"
            )
        return super().submit(request, multimodal, grammar)

    def step(self, *, admit: bool = True) -> Progress:
        """Admit requests, decode up to ``decode_steps`` ids, and return every request's new ids.

        Args:
            admit: False admits none.
        """
        begin = time.perf_counter()
        progress = self._admit_slots() if admit else []
        self.counters.prefill_seconds += time.perf_counter() - begin
        if self.running:
            progress += self._decode()
        self.counters.busy_seconds += time.perf_counter() - begin
        return progress

    def metrics(self) -> BackendMetrics:
        """Return metrics without recompilations, which external engines do not count."""
        return BackendMetrics(**vars(self.counters))

    # --- admission --------------------------------------------------------------------------------

    def _admit_slots(self) -> Progress:
        """Prefill the requests that fit; all are dispatched before the first result is read."""
        runs: list[RunningRequest] = []
        results = []
        while self.queue and len(self.running) < self.engine.shapes.max_concurrent_decodes:
            run = self.queue[0][1]
            # The engine samples all slots in one mode.
            if any(_is_greedy(other) != _is_greedy(run) for other in self.running.values()):
                break
            heapq.heappop(self.queue)
            results.append(self._prefill(run))
            runs.append(run)
        if not runs:
            return []

        progress: Progress = []
        for run, (ids, log_probs) in zip(runs, read_results(results), strict=True):
            event = self._accept(run, ids[:1], log_probs[:1])
            if event is not None:
                progress.append((run, event))
        return progress

    def _prefill(self, run: RunningRequest) -> object:
        prompt = np.asarray(run.request.prompt_ids, np.int32)
        slot = cast(SlotTable, self.block_manager).take(prompt[:-1])
        assert slot is not None  # fewer requests run than there are slots
        run.context = slot
        self.running[run.request.request_id] = run
        prefix, result = self.engine.prefill(
            self.params, prompt, self._next_key(), greedy=_is_greedy(run)
        )
        self.cache = self.engine.engine.insert(prefix, self.cache, slot)
        self.counters.prefill_tokens += len(prompt)
        return result

    # --- decoding ---------------------------------------------------------------------------------

    def _decode(self) -> Progress:
        runs = list(self.running.values())
        steps = 1 if self.queue else self.engine.shapes.decode_steps
        steps = min(steps, *(run.remaining for run in runs))
        results = []
        for _ in range(steps):
            self.cache, result = self.engine.generate(
                self.params, self.cache, self._next_key(), greedy=_is_greedy(runs[0])
            )
            results.append(result)
        self.counters.slot_steps += len(results) * self.engine.shapes.max_concurrent_decodes

        outputs = read_results(results)
        ids = np.stack([step_ids for step_ids, _ in outputs])  # [steps, slots]
        log_probs = np.stack([step_log_probs for _, step_log_probs in outputs])
        progress: Progress = []
        for run in runs:
            event = self._accept(run, ids[:, run.context], log_probs[:, run.context])
            if event is not None:
                progress.append((run, event))
        return progress

    def _finish(
        self, run: RunningRequest, new: int, *, state_is_current: bool = True
    ) -> TokenChunk:
        slot = run.context
        chunk = super()._finish(run, new, state_is_current=state_is_current)
        if slot is not None:
            self.engine.engine.free_resource(slot)
        return chunk

    def _read_routed(self, run: RunningRequest, context: int) -> None:
        """Return None: external engines do not report experts."""

    def _next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return jax.random.key_data(key)


def _is_greedy(run: RunningRequest) -> bool:
    return run.request.sampling.temperature == 0


class ExternalBackend(JetStreamBackend):
    """The backend of an external engine.

    Args:
        make_external: makes the engine.
        **options: further arguments of :class:`JetStreamBackend`; none of what only the built-in
            engine has: adapters, images, grammars, 8 bits, one program.
    """

    scheduler_type = ExternalScheduler

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        shapes: EngineShapes,
        *,
        make_external: MakeEngine,
        **options: Any,
    ) -> None:
        super().__init__(config, params, shapes, **options)
        self._make_external = make_external

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities,
            any_sampling=False,
            sampling_replay=False,
            seeds=False,
            prefix_reuse=False,
            scoring=False,
            routed_experts=False,
            weight_dtype=AS_THEY_ARE,  # it converts weights itself
        )

    def _make_engine(self) -> ExternalEngineAdapter:
        external = self._make_external(self._config, self._shapes)
        return ExternalEngineAdapter(external, self._config, self._shapes)
