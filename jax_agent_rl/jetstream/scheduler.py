"""Continuous batching over the engine's pages and slots. Plain and single-threaded: ``backend`` gives it a thread.

::

    submit ──► waiting ──admit──► running ──decode──► finished
                 ▲   take pages, prefill  │            │  ids, log-probs, versions
                 │                        │            └─ KV kept for the next turn
                 └────── preempt ─────────┘
                    when no page is left

One :meth:`Scheduler.step` admits what fits, runs one decode dispatch for everything that runs, and reports progress.
While requests wait, a dispatch ends as soon as one slot finishes, so its place is filled at once. Contexts take pages
as they grow; when none is left, the last of those that run waits again, and is prefilled with what it had sampled.
What it samples then is what it would have: draws are fixed by seed and position.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.jetstream.admission import AdmissionPlan
from jax_agent_rl.jetstream.block_manager import BlockManager
from jax_agent_rl.jetstream.decode_batch import MAX_STOP_IDS, DecodeBatch, make_decode_batch
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv import KVCache
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.models.vision.context import ImageKeys, MultimodalContext
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, Health, TokenChunk
from jax_agent_rl.types import StopReason

NO_CACHE = KVCache(layers=())
MOST_NAMES = 1 << 30  # of pictures' features: keys are int32


@dataclass
class Counters:
    """Running totals behind :class:`BackendMetrics`."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    requests_finished: int = 0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    weight_update_seconds: float = 0.0
    slot_steps: int = 0


@dataclass
class Scheduler:
    """See the module docstring.

    Attributes:
        engine: runs the programs.
        params: weights in the engine's layout.
        version: policy version of ``params``.
        seed: draws the seeds of requests that bring none.
        decode_text: ids to text, for stop strings.
    """

    engine: JaxEngine
    params: EngineParams
    version: int = 0
    seed: int = 0
    decode_text: Callable[[Sequence[int]], str] | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.cache = self.engine.init_cache()
        self.table = self._make_table()
        self.running: dict[str, RunningRequest] = {}
        self._waiting: list[tuple[tuple[int, int], RunningRequest]] = []
        self._known: set[str] = set()
        self._arrivals = itertools.count()
        self._rng = np.random.default_rng(self.seed)
        self._names = ImageKeys()
        self._eos = frozenset(self.engine.config.eos_token_ids)

    def _make_table(self) -> BlockManager:
        shapes = self.engine.shapes
        return BlockManager(shapes.pages, shapes.page, shapes.context_pages)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def begun(self) -> list[str]:
        """Ids of the requests that run, and of those that ran and wait again."""
        return [*self.running, *(run.request.request_id for _, run in self._waiting if run.num_preempted)]

    def submit(self, request: GenerateRequest, multimodal: MultimodalContext | None = None) -> RunningRequest:
        """Queues a request; what is returned names it in what :meth:`step` and :meth:`abort` return.

        Args:
            multimodal: its prompt with its pictures, if it has any.

        Raises:
            PromptTooLongError: no room for one sampled id.
            BackendError: a duplicate id, or something this engine cannot do.
        """
        limit, sampling = self.engine.shapes.max_model_len, request.sampling
        name = f"request {request.request_id!r}"
        if len(request.prompt_ids) >= limit:
            raise PromptTooLongError(
                f"{name}: a prompt of {len(request.prompt_ids)} ids leaves no room in rollout.max_model_len={limit}; "
                "shorten the prompt or raise rollout.max_model_len"
            )
        if request.request_id in self._known:
            raise BackendError(f"{name} is already running; request ids must be unique while they live")
        if request.lora is not None and request.lora not in self.engine.adapters:
            raise BackendError(
                f"{name}: no LoRA adapter {request.lora!r}; there are {sorted(self.engine.adapters)} (rollout.adapters)"
            )
        if sampling.stop and self.decode_text is None:
            raise BackendError(f"{name} has stop strings, but this engine was given no tokenizer")
        vocabulary = self.engine.config.vocab_size
        if not all(0 <= i < vocabulary for i in request.prompt_ids):
            raise BackendError(f"{name}: prompt ids must be in [0, {vocabulary})")
        run = RunningRequest(
            request,
            max_tokens=min(sampling.max_tokens, limit - len(request.prompt_ids)),
            eos_ids=self._eos,
            seed=(sampling.seed if sampling.seed is not None else int(self._rng.integers(2**32))) % 2**32,
            decode_text=self.decode_text,
            multimodal=multimodal,
            order=(request.priority, next(self._arrivals)),
        )
        if len(run.stop_ids) > MAX_STOP_IDS:
            raise BackendError(f"{name}: at most {MAX_STOP_IDS} stop ids (EOS included), got {len(run.stop_ids)}")
        self._known.add(request.request_id)
        heapq.heappush(self._waiting, (run.order, run))
        return run

    def step(self, *, admit: bool = True) -> list[tuple[RunningRequest, TokenChunk]]:
        """Admits (unless told not to), decodes once, and returns the new ids of every request that got some."""
        begin = time.perf_counter()
        if admit:
            self._admit()
        self.counters.prefill_seconds += time.perf_counter() - begin
        progress = self._decode() if self.running else []
        self.counters.busy_seconds += time.perf_counter() - begin
        return progress

    def abort(self, request_id: str) -> tuple[RunningRequest, TokenChunk] | None:
        """Ends a request now with what it has; None if it is not known."""
        run = self.running.get(request_id)
        if run is None:
            run = next((r for _, r in self._waiting if r.request.request_id == request_id), None)
            if run is None:
                return None
            self._waiting = [item for item in self._waiting if item[1] is not run]
            heapq.heapify(self._waiting)
        run.stop_reason = StopReason.ABORTED
        return run, self._finish(run, (), ())

    def set_weights(self, params: EngineParams, version: int) -> None:
        """Serves new weights from the next dispatch on; what was cached under the old ones is forgotten."""
        self.params = params
        self.version = version
        self.table.reset()

    def sleep(self) -> None:
        """Releases the device's memory: the cache is dropped, the weights wait on the host. Nothing may be running."""
        self._places = jax.tree.map(lambda x: x.sharding, self.params)
        self.params = jax.tree.map(np.array, self.params)
        self.cache = NO_CACHE
        self.table.reset()

    def wake(self) -> None:
        """Undoes :meth:`sleep`; shapes and places are those of before, so nothing is compiled again."""
        self.params = jax.block_until_ready(jax.device_put(self.params, self._places))
        self.cache = self.engine.init_cache()

    def metrics(self) -> BackendMetrics:
        return BackendMetrics(**vars(self.counters), recompilations=self.engine.table.recompilations)

    def health(self, version: int) -> Health:
        """How it stands while it serves weights of this version."""
        return Health(
            ok=True,
            policy_version=version,
            running=len(self.running),
            waiting=self.waiting,
            kv_used_share=self.table.used_share,
        )

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        plan = AdmissionPlan(self.engine.shapes.page)
        while self._waiting and len(self.running) < self.engine.max_concurrent_decodes:
            run = self._waiting[0][1]
            context = keys = np.asarray(run.context_ids, np.int32)
            if run.multimodal is not None:
                run.keys = self._keys(run.multimodal)
                keys = np.concatenate([run.keys, context[len(run.keys) :]])
            placement = self.table.place(keys, run.request.session_id, run.request.lora)
            if placement is None:
                break
            heapq.heappop(self._waiting)
            run.context = placement.context
            self.running[run.request.request_id] = run
            new = context[placement.reused : -1]
            plan.add(placement, new, run.multimodal, self._adapter_number(run))
            self.table.append(placement.context, keys[placement.reused : -1])
            self.counters.prefill_tokens += len(new)
            if not run.num_preempted:
                run.cached_tokens = placement.reused
                self.counters.cached_tokens += placement.reused
        for copies, extensions in plan.stages():
            for source, target in copies:
                self.cache = self.engine.copy_page(self.cache, source, target)
            self.cache = self.engine.extend(self.params, self.cache, extensions)

    def _adapter_number(self, run: RunningRequest) -> int:
        return 0 if run.request.lora is None else 1 + self.engine.adapters.index(run.request.lora)

    def _make_room(self, steps: int) -> None:
        """Takes pages for what a dispatch may sample, of the first requests first; the last ones may have to wait."""
        for run in sorted(self.running.values(), key=_order):
            while run.context is not None and not self.table.grow(run.context, min(steps, run.remaining)):
                self._preempt(max(self.running.values(), key=_order))

    def _preempt(self, run: RunningRequest) -> None:
        """Back to those that wait, with what it has; its KV is kept while nobody needs its pages."""
        assert run.context is not None  # it runs
        self.table.release(run.context, session_ends=False)
        run.context = None
        run.num_preempted += 1
        del self.running[run.request.request_id]
        heapq.heappush(self._waiting, (run.order, run))

    def _keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """Names are given to pictures that are admitted, and never twice while pages may hold one."""
        if self._names.count > MOST_NAMES:
            self.table.reset()
            self._names = ImageKeys()
        return self._names.keys(multimodal)

    # --- decoding ---------------------------------------------------------------------------------------------

    def _decode(self) -> list[tuple[RunningRequest, TokenChunk]]:
        steps = self.engine.shapes.decode_steps
        self._make_room(steps)
        runs = list(self.running.values())
        slots = make_decode_batch(len(runs), self.engine.shapes.context_pages)
        for slot, run in enumerate(runs):
            self._fill_slot(slots, slot, run)
        if any(run.offset for run in runs):
            slots = replace(slots, offsets=np.array([run.offset for run in runs], np.int32))
        if self.engine.adapters:
            slots = replace(slots, adapter=np.array([self._adapter_number(run) for run in runs], np.int32))
        self.cache, ids, log_probs = self.engine.decode(
            self.params, self.cache, slots, steps, self._exit_after(len(runs))
        )
        self.counters.slot_steps += self.engine.width(len(runs)) * int((ids >= 0).any(axis=1).sum())
        return [
            (run, chunk)
            for slot, run in enumerate(runs)
            if (chunk := self._take(run, ids[:, slot], log_probs[:, slot])) is not None
        ]

    def _exit_after(self, running: int) -> int:
        """Return how many slots finish before a dispatch ends early: one where a request waits for a slot, otherwise a
        quarter, whose agents soon bring their next turn, or as many as leave enough for a program of fewer slots.
        """
        if self._waiting:
            return 1
        fewer = max((w for w in self.engine.shapes.slot_buckets if w < running), default=0)
        return max(1, min(running - fewer, running // 4))

    def _fill_slot(self, slots: DecodeBatch, slot: int, run: RunningRequest) -> None:
        assert run.context is not None  # it runs
        sampling, pages = run.request.sampling, self.table.pages(run.context)
        slots.pages[slot, : len(pages)] = pages
        slots.tokens[slot] = run.last_id
        slots.positions[slot] = len(run.request.prompt_ids) + len(run.token_ids) - 1
        slots.remaining[slot] = run.remaining
        slots.temperature[slot] = sampling.temperature
        slots.top_p[slot] = sampling.top_p
        slots.top_k[slot] = sampling.top_k
        slots.seed[slot] = run.seed
        slots.stop_ids[slot, : len(run.stop_ids)] = run.stop_ids

    def _take(self, run: RunningRequest, ids: np.ndarray, log_probs: np.ndarray) -> TokenChunk | None:
        """Hands one slot's output to its request; a stop string may end it before the slot did."""
        ran = ids >= 0
        last = run.last_id
        taken = run.accept(ids[ran], log_probs[ran], self.version)
        if not taken:
            return None
        assert run.context is not None  # it ran
        # The dispatch fed the last known id and all but the newest of the new ones: those have their KV now.
        self.table.append(run.context, [last, *run.token_ids[-taken:-1]])
        self.counters.generated_tokens += taken
        new_ids, new_log_probs = tuple(run.token_ids[-taken:]), tuple(run.log_probs[-taken:])
        if run.stop_reason is not None:
            return self._finish(run, new_ids, new_log_probs)
        return TokenChunk(token_ids=new_ids, log_probs=new_log_probs, policy_versions=(self.version,) * taken)

    def _finish(self, run: RunningRequest, new_ids: tuple[int, ...], new_log_probs: tuple[float, ...]) -> TokenChunk:
        request = run.request
        if run.context is not None:
            context = [*run.ids_of(self.table.ids(run.context)).tolist(), run.last_id]
            self.table.release(run.context, session_ends=request.session_ends)
        else:
            context = run.context_ids
        self.running.pop(request.request_id, None)
        self._known.discard(request.request_id)
        self.counters.requests_finished += 1
        return TokenChunk(
            token_ids=new_ids,
            log_probs=new_log_probs,
            policy_versions=(self.version,) * len(new_ids),
            final=run.output(context),
        )


def _order(run: RunningRequest) -> tuple[int, int]:
    return run.order
