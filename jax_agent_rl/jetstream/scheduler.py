"""Continuous batching over the engine's pages and slots. Plain and single-threaded: ``backend`` gives it a thread.

::

    submit ──► waiting ──admit──► running ──decode──► finished
                 ▲   take pages, prefill  │            │  ids, log-probs, versions
                 │                        │            └─ KV kept for the next turn
                 └────── preempt ─────────┘
                    when no page is left

One :meth:`Scheduler.step` admits what fits, runs one decode dispatch for all running requests, and reports progress.
While requests wait, a dispatch ends as soon as one slot finishes, so that it is refilled at once. Contexts allocate
pages as they grow; when none is left, the last running request is preempted, and later prefilled with what it had
sampled. It continues with the same ids, since seed and position fix the draws.
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
from jax_agent_rl.jetstream.block_manager import Allocation, BlockManager
from jax_agent_rl.jetstream.decode_batch import MAX_STOP_IDS, DecodeBatch, Extension, make_decode_batch
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.models.vision.context import ImageKeys, MultimodalContext
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, Health, TokenChunk
from jax_agent_rl.types import StopReason

NO_CACHE = KVCache(layers=())
MAX_IMAGE_KEYS = 1 << 30  # keys are int32


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
    """The scheduler of the module docstring.

    Attributes:
        engine: runs the programs.
        params: weights in the engine's layout.
        version: policy version of ``params``.
        seed: for requests without a seed of their own.
        decode_text: ids to text, for stop strings.
        counters: running totals.
    """

    engine: JaxEngine
    params: EngineParams
    version: int = 0
    seed: int = 0
    decode_text: Callable[[Sequence[int]], str] | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.cache = self.engine.init_cache()
        self.block_manager = self._make_block_manager()
        self.running: dict[str, RunningRequest] = {}
        self._waiting: list[tuple[tuple[int, int], RunningRequest]] = []
        self._known: set[str] = set()
        self._arrivals = itertools.count()
        self._rng = np.random.default_rng(self.seed)
        self._image_keys = ImageKeys()
        self._eos = frozenset(self.engine.config.eos_token_ids)

    def _make_block_manager(self) -> BlockManager:
        shapes = self.engine.shapes
        return BlockManager(shapes.pages, shapes.page, shapes.context_pages)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def started(self) -> list[str]:
        """Ids of running and preempted requests."""
        return [*self.running, *(run.request.request_id for _, run in self._waiting if run.num_preempted)]

    def submit(self, request: GenerateRequest, multimodal: MultimodalContext | None = None) -> RunningRequest:
        """Queue a request; return its handle in the results of :meth:`step` and :meth:`abort`.

        Args:
            request: the request.
            multimodal: its prompt with its images, if any.

        Raises:
            PromptTooLongError: there is no room for one sampled id.
            BackendError: the id is taken, or the engine cannot serve the request.
        """
        limit, sampling = self.engine.shapes.max_model_len, request.sampling
        name = f"request {request.request_id!r}"
        if len(request.prompt_ids) >= limit:
            raise PromptTooLongError(
                f"{name}: a prompt of {len(request.prompt_ids)} ids leaves no room in rollout.max_model_len={limit}; "
                "shorten the prompt or raise rollout.max_model_len"
            )
        if request.request_id in self._known:
            raise BackendError(f"{name} is already running; request ids must be unique")
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
        """Admit requests if ``admit``, decode once, and return the new ids of every request that got some."""
        begin = time.perf_counter()
        if admit:
            self._admit()
        self.counters.prefill_seconds += time.perf_counter() - begin
        progress = self._decode() if self.running else []
        self.counters.busy_seconds += time.perf_counter() - begin
        return progress

    def abort(self, request_id: str) -> tuple[RunningRequest, TokenChunk] | None:
        """End a request with what it has; None if it is unknown."""
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
        """Serve new weights from the next dispatch on, and drop KV cached under the old ones."""
        self.params = params
        self.version = version
        self.block_manager.reset()

    def sleep(self) -> None:
        """Free device memory: drop the cache and move the weights to the host. No request may be running."""
        self._places = jax.tree.map(lambda x: x.sharding, self.params)
        self.params = jax.tree.map(np.array, self.params)
        self.cache = NO_CACHE
        self.block_manager.reset()

    def wake(self) -> None:
        """Undo :meth:`sleep`; shapes and shardings are unchanged, so nothing is recompiled."""
        self.params = jax.block_until_ready(jax.device_put(self.params, self._places))
        self.cache = self.engine.init_cache()

    def metrics(self) -> BackendMetrics:
        return BackendMetrics(**vars(self.counters), recompilations=self.engine.table.recompilations)

    def health(self) -> Health:
        return Health(
            ok=True,
            policy_version=self.version,
            running=len(self.running),
            waiting=self.waiting,
            kv_used_share=self.block_manager.used_share,
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
            allocation = self.block_manager.allocate(keys, run.request.session_id, run.request.lora)
            if allocation is None:
                break
            heapq.heappop(self._waiting)
            run.context = allocation.context
            self.running[run.request.request_id] = run
            new = context[allocation.reused : -1]
            plan.add(allocation, new, run.multimodal, self._adapter_number(run))
            self.block_manager.append(allocation.context, keys[allocation.reused : -1])
            self.counters.prefill_tokens += len(new)
            if not run.num_preempted:
                run.cached_tokens = allocation.reused
                self.counters.cached_tokens += allocation.reused
        for copies, extensions in plan.stages():
            for source, target in copies:
                self.cache = self.engine.copy_page(self.cache, source, target)
            self.cache = self.engine.extend(self.params, self.cache, extensions)

    def _adapter_number(self, run: RunningRequest) -> int:
        return 0 if run.request.lora is None else 1 + self.engine.adapters.index(run.request.lora)

    def _make_room(self, steps: int) -> None:
        """Allocate pages for a dispatch, first requests first; preempt the last ones if there are too few."""
        for run in sorted(self.running.values(), key=lambda run: run.order):
            while run.context is not None and not self.block_manager.grow(run.context, min(steps, run.remaining)):
                self._preempt(max(self.running.values(), key=lambda run: run.order))

    def _preempt(self, run: RunningRequest) -> None:
        """Put a request back in the queue; its KV stays cached until evicted."""
        assert run.context is not None  # running
        self.block_manager.free(run.context, session_ends=False)
        run.context = None
        run.num_preempted += 1
        del self.running[run.request.request_id]
        heapq.heappush(self._waiting, (run.order, run))

    def _keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """Return the keys of a prompt with images; a number is never reused while pages may hold it."""
        if self._image_keys.count > MAX_IMAGE_KEYS:
            self.block_manager.reset()
            self._image_keys = ImageKeys()
        return self._image_keys.keys(multimodal)

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
        """Return how many finished slots end a dispatch early.

        One if requests wait; otherwise a quarter, whose agents soon send their next turn, or as many as let the rest
        run in a program of fewer slots.
        """
        if self._waiting:
            return 1
        fewer = max((w for w in self.engine.shapes.slot_buckets if w < running), default=0)
        return max(1, min(running - fewer, running // 4))

    def _fill_slot(self, slots: DecodeBatch, slot: int, run: RunningRequest) -> None:
        assert run.context is not None  # it runs
        sampling, pages = run.request.sampling, self.block_manager.pages(run.context)
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
        """Append one slot's output to its request, which a stop string may end earlier."""
        ran = ids >= 0
        last = run.last_id
        taken = run.accept(ids[ran], log_probs[ran], self.version)
        if not taken:
            return None
        assert run.context is not None  # it ran
        # The dispatch fed the last id and all but the newest of the new ones: their KV is cached now.
        self.block_manager.append(run.context, [last, *run.token_ids[-taken:-1]])
        self.counters.generated_tokens += taken
        new_ids, new_log_probs = tuple(run.token_ids[-taken:]), tuple(run.log_probs[-taken:])
        if run.stop_reason is not None:
            return self._finish(run, new_ids, new_log_probs)
        return TokenChunk(token_ids=new_ids, log_probs=new_log_probs, policy_versions=(self.version,) * taken)

    def _finish(self, run: RunningRequest, new_ids: tuple[int, ...], new_log_probs: tuple[float, ...]) -> TokenChunk:
        request = run.request
        if run.context is not None:
            context = [*run.keys_to_ids(self.block_manager.ids(run.context)).tolist(), run.last_id]
            self.block_manager.free(run.context, session_ends=request.session_ends)
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


class AdmissionPlan:
    """Copies and prefills of one round of admissions, in stages whose prefills run together.

    Within a stage copies come first, in planned order. A page is reused or copied in a stage after the one that fills
    it, and not written before the stage that copies from it.

    Args:
        size: positions of a page.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stages: list[tuple[list[tuple[int, int]], list[Extension]]] = []
        self._filled: dict[int, int] = {}  # page -> stage that writes it
        self._read: dict[int, int] = {}  # page -> last stage that copies from it

    def add(
        self, allocation: Allocation, new: np.ndarray, multimodal: MultimodalContext | None = None, adapter: int = 0
    ) -> None:
        """Plan one admission: an optional copy, then a prefill.

        Args:
            allocation: the context's pages.
            new: int32, ids after those reused.
            multimodal: the whole context, if it has images.
            adapter: see :class:`Extension`.
        """
        pages, first = allocation.pages, allocation.reused // self._size
        source = None if allocation.copy is None else allocation.copy[0]
        reused = pages[:first] if source is None else (*pages[:first], source)
        stage = max((self._filled.get(page, -1) + 1 for page in reused), default=0)
        stage = max([stage, *(self._read.get(page, 0) for page in pages[first:])])
        if source is not None:
            self._read[source] = max(stage, self._read.get(source, 0))
        self._filled |= dict.fromkeys(pages[first:], stage)
        while len(self._stages) <= stage:
            self._stages.append(([], []))
        copies, extensions = self._stages[stage]
        if allocation.copy is not None:
            copies.append(allocation.copy)
        extensions.append(Extension(pages, allocation.reused, new, multimodal, adapter))

    def stages(self) -> list[tuple[list[tuple[int, int]], list[Extension]]]:
        """Return (source, target) copies and extensions, stage by stage."""
        return self._stages
