"""Continuous batching over the engine's pages and slots.

It is plain and single-threaded; ``backend`` gives it a thread.

::

    submit ──► waiting ──admit──► running ──decode──► finished
                 ▲   take pages, prefill  │            │  ids, log-probs, versions
                 │                        │            └─ KV kept for the next turn
                 └────── preempt ─────────┘
                    when no page is left

One :meth:`Scheduler.step` admits what fits, runs one decode dispatch for all running requests, and
reports progress. While requests wait, a dispatch ends as soon as one slot finishes, so that it is
refilled at once. Contexts allocate pages as they grow; when none is left, the last running request
is preempted, and later prefilled with what it had sampled. It continues with the same ids, since
seed and position fix the draws.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jax_agent_rl.chat.grammar import GrammarState
from jax_agent_rl.errors import BackendError, ModelError
from jax_agent_rl.jetstream.admission import AdmissionPlan, Patience, ReturnTimes
from jax_agent_rl.jetstream.block_manager import Allocation, BlockManager
from jax_agent_rl.jetstream.decode_batch import MAX_STOP_IDS, DecodeBatch, slots_of
from jax_agent_rl.jetstream.drafting import LookupDrafter
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.host_cache import HostCache
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.mixers.table import has_states
from jax_agent_rl.jetstream.request import Counters, RunningRequest, check_request
from jax_agent_rl.jetstream.speculation import Speculation
from jax_agent_rl.jetstream.state_slots import StateSlots
from jax_agent_rl.models.vision_context import ImageKeys, MultimodalContext
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, Health, TokenChunk
from jax_agent_rl.types import RoutedExperts, StopReason, TokenOutput, join_routed

NO_CACHE = KVCache(layers=())
MAX_IMAGE_KEYS = 1 << 30  # keys are int32
Progress = list[tuple[RunningRequest, TokenChunk | BackendError]]
"""New ids of requests, and why some failed."""


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
        clock: seconds, for waits of sessions and requests.

    Attributes:
        queue: waiting requests, a heap by their order.
        patience: what a waiting request costs.
        host_cache: pages on the host.
    """

    engine: JaxEngine
    params: EngineParams
    version: int = 0
    seed: int = 0
    decode_text: Callable[[Sequence[int]], str] | None = None
    counters: Counters = field(default_factory=Counters)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.cache = self.engine.init_cache()
        self.return_times = ReturnTimes(self.clock)
        self.block_manager = self._make_block_manager()
        self.running: dict[str, RunningRequest] = {}

        self.queue: list[tuple[tuple[int, int], RunningRequest]] = []  # a heap, by order
        self._known: set[str] = set()
        self._arrivals = itertools.count()
        self._rng = np.random.default_rng(self.seed)
        self._image_keys = ImageKeys()
        self._eos = frozenset(self.engine.config.eos_token_ids)
        if len(self._eos) > MAX_STOP_IDS:
            raise ModelError(
                f"config.json: eos_token_id has {len(self._eos)} ids, and the engine stops at up to"
                f" {MAX_STOP_IDS}; leave out those that end no turn"
            )
        self.patience = Patience(self.clock)

        self.speculation: Speculation | None = None
        if self.engine.shapes.num_speculative_tokens > 0:
            self.speculation = Speculation(self.engine, LookupDrafter(), self.counters)

    def _make_block_manager(self) -> BlockManager:
        shapes = self.engine.shapes
        self.host_cache = HostCache(self.engine, self.cache)
        states = None
        if has_states(self.engine.config):
            states = StateSlots(
                shapes.max_concurrent_decodes,
                shapes.num_state_checkpoints,
                self.host_cache.num_states,
            )
        return BlockManager(
            shapes.pages,
            shapes.page,
            shapes.context_pages,
            host_pages=self.host_cache.count,
            return_rate=self.return_times.rate,
            states=states,
            checkpoint_interval=shapes.chunk_buckets[-1],
        )

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def started(self) -> list[str]:
        """Ids of running and preempted requests."""
        ids = list(self.running)
        for _, run in self.queue:
            if run.num_preempted:
                ids.append(run.request.request_id)
        return ids

    def submit(
        self,
        request: GenerateRequest,
        multimodal: MultimodalContext | None = None,
        grammar: GrammarState | None = None,
    ) -> RunningRequest:
        """Queue a request; return its handle in the results of :meth:`step` and :meth:`abort`.

        Args:
            multimodal: its prompt with its images, if any.
            grammar: where its output begins in its grammar, if it has one.

        Raises:
            PromptTooLongError: there is no room for one sampled id.
            BackendError: the id is taken, or the engine cannot serve the request.
        """
        sampling = request.sampling
        if request.request_id in self._known:
            raise BackendError(
                f"request {request.request_id!r} is already running; request ids must be unique"
            )
        check_request(request, self.engine, stop_strings=self.decode_text is not None)

        seed = sampling.seed
        if seed is None:
            seed = int(self._rng.integers(2**32))
        room = self.engine.shapes.max_model_len - len(request.prompt_ids)
        run = RunningRequest(
            request,
            max_tokens=min(sampling.max_tokens, room),
            eos_ids=self._eos,
            seed=seed % 2**32,
            decode_text=self.decode_text,
            multimodal=multimodal,
            grammar=grammar,
            order=(request.priority, next(self._arrivals)),
        )
        if len(run.stop_ids) > MAX_STOP_IDS:
            raise BackendError(
                f"request {request.request_id!r}: at most {MAX_STOP_IDS} stop ids (EOS included),"
                f" got {len(run.stop_ids)}"
            )

        self._known.add(request.request_id)
        heapq.heappush(self.queue, (run.order, run))
        if request.session_id is not None:
            self.return_times.come_back(request.session_id)
        return run

    def step(self, *, admit: bool = True) -> Progress:
        """Admit requests, decode once, and return the new ids of each request.

        Args:
            admit: also admit new requests; False admits only preempted ones.
        """
        begin = time.perf_counter()
        self._admit(new=admit)
        self.counters.prefill_seconds += time.perf_counter() - begin

        progress = self._decode() if self.running else []
        self.host_cache.settle()
        self.counters.busy_seconds += time.perf_counter() - begin
        return progress

    def abort(self, request_id: str) -> tuple[RunningRequest, TokenChunk] | None:
        """End a request with what it has; None if it is unknown."""
        run = self.running.get(request_id) or self._find_waiting(request_id)
        if run is None:
            return None
        if run.request.request_id not in self.running:
            self.queue = [entry for entry in self.queue if entry[1] is not run]
            heapq.heapify(self.queue)
        run.stop_reason = StopReason.ABORTED
        return run, self._finish(run, 0)

    def _find_waiting(self, request_id: str) -> RunningRequest | None:
        for _, run in self.queue:
            if run.request.request_id == request_id:
                return run
        return None

    def set_weights(self, params: EngineParams, version: int) -> None:
        """Serve new weights from the next dispatch on, and drop KV cached under the old ones."""
        self.params = params
        self.version = version
        self.block_manager.reset()

    def sleep(self) -> None:
        """Free device memory: drop the cache and move the weights to the host.

        No request may be running.
        """
        self._param_shardings = jax.tree.map(lambda x: x.sharding, self.params)
        self.params = self.engine.offload_params(self.params)
        self.cache = NO_CACHE
        self.block_manager.reset()

    def wake(self) -> None:
        """Undo :meth:`sleep`; shapes and shardings are unchanged, so nothing is recompiled."""
        self.params = jax.block_until_ready(jax.device_put(self.params, self._param_shardings))
        self.cache = self.engine.init_cache()

    def metrics(self) -> BackendMetrics:
        return BackendMetrics(
            **vars(self.counters),
            offloaded_pages=self.host_cache.saved,
            restored_pages=self.host_cache.restored,
            recompilations=self.engine.program_table.recompilations,
        )

    def health(self) -> Health:
        return Health(
            ok=True,
            policy_version=self.version,
            running=len(self.running),
            waiting=self.waiting,
            kv_used_share=self.block_manager.used_share,
        )

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, *, new: bool) -> None:
        begin = time.perf_counter()
        compiled_before = self.engine.program_table.compile_seconds
        prefilled_before = self.counters.prefill_tokens

        plan = AdmissionPlan(self.engine.shapes.page)
        while self.queue and len(self.running) < self.engine.shapes.max_concurrent_decodes:
            admission = self._next_admission() if new else self._next_preempted()
            if admission is None:
                break
            run, allocation = admission
            self._start(plan, run, allocation)
        self.cache = plan.run(self.engine, self.params, self.cache)
        if self.block_manager.states is not None:
            self.block_manager.states.settle()

        prefilled = self.counters.prefill_tokens - prefilled_before
        if prefilled:
            # Wait for the prefill: its seconds are what patience is measured in.
            jax.block_until_ready(self.cache)
            compiling = self.engine.program_table.compile_seconds - compiled_before
            self.patience.add_prefill(prefilled, time.perf_counter() - begin - compiling)

    def _next_admission(self) -> tuple[RunningRequest, Allocation] | None:
        """Take the first request that can run from the queue.

        The first in the queue may be refused because the pages it needs are worth more to sessions
        that return soon. Those whose KV is in the cache then overtake it, see :class:`Patience`.
        """
        first = self.queue[0][1]
        cost = self.patience.cost(first.order, len(first.context_ids), len(self.running))
        allocation = self._allocate(first, cost)
        if allocation is not None:
            heapq.heappop(self.queue)
            return first, allocation
        if not cost:
            return None

        first_priority, _ = first.order
        for order, run in sorted(self.queue)[1:]:
            priority, _ = order
            holds_most = self.block_manager.holds_most(run.request.session_id, len(run.context_ids))
            if priority != first_priority or not holds_most:
                continue
            allocation = self._allocate(run, cost)
            if allocation is not None:
                self.queue.remove((order, run))
                heapq.heapify(self.queue)
                return run, allocation
        return None

    def _next_preempted(self) -> tuple[RunningRequest, Allocation] | None:
        """Take the first preempted request from the queue, if there is one and it can run."""
        preempted = [entry for entry in self.queue if entry[1].num_preempted]
        if not preempted:
            return None
        first = min(preempted)
        run = first[1]
        allocation = self._allocate(run, 0.0)
        if allocation is None:
            return None
        self.queue.remove(first)
        heapq.heapify(self.queue)
        return run, allocation

    def _allocate(self, run: RunningRequest, recompute_cost: float) -> Allocation | None:
        if run.multimodal is not None:
            run.keys = self._keys(run.multimodal)
        allocation = self.block_manager.allocate(
            run.context_keys,
            run.request.session_id,
            run.request.lora,
            recompute_cost=recompute_cost,
        )
        self._offload()
        return allocation

    def _offload(self) -> None:
        """Copy what gave way to the host, before anything overwrites it."""
        self.host_cache.save(self.cache, self.block_manager.saved)
        if self.block_manager.states is not None:
            self.host_cache.save_states(self.cache, self.block_manager.states.saved)

    def _start(self, plan: AdmissionPlan, run: RunningRequest, allocation: Allocation) -> None:
        """Plan the prefill of a request that got its pages."""
        run.context = allocation.context
        self.running[run.request.request_id] = run

        # The first decode step feeds the last id.
        new_ids = np.asarray(run.context_ids[allocation.reused : -1], np.int32)
        restored = None
        if allocation.restored:
            restored = self.host_cache.read([host_page for host_page, _ in allocation.restored])
        restored_state = None
        if allocation.state is not None and allocation.state.host_source is not None:
            restored_state = self.host_cache.read_state(allocation.state.host_source)
        plan.add(
            allocation,
            new_ids,
            run.multimodal,
            self._adapter_number(run),
            restored,
            restored_state,
        )
        self.block_manager.append(allocation.context, run.context_keys[allocation.reused : -1])

        self.counters.prefill_tokens += len(new_ids)
        self.counters.recomputed_tokens += allocation.recomputed
        if not run.num_preempted:
            run.cached_tokens = allocation.reused
            self.counters.cached_tokens += allocation.reused

    def _adapter_number(self, run: RunningRequest) -> int:
        """Return the number of a request's LoRA adapter from 1 on, or 0 for the base model."""
        if run.request.lora is None:
            return 0
        return 1 + self.engine.adapters.index(run.request.lora)

    def _make_room(self, steps: Callable[[RunningRequest], int]) -> None:
        """Allocate pages for a dispatch, first requests first; preempt the last ones if needed.

        Args:
            steps: how many ids each request may gain.
        """
        for run in sorted(self.running.values(), key=lambda run: run.order):
            while run.context is not None:  # it may itself be the one that is preempted
                if self.block_manager.grow(run.context, min(steps(run), run.remaining)):
                    break
                self._preempt(max(self.running.values(), key=lambda run: run.order))
        self._offload()

    def _preempt(self, run: RunningRequest) -> None:
        """Put a request back in the queue; its KV stays cached until evicted."""
        assert run.context is not None  # running
        run.routed = self._read_routed(run, run.context)
        self.block_manager.free(run.context, session_ends=False)
        run.context = None
        run.num_preempted += 1
        del self.running[run.request.request_id]
        heapq.heappush(self.queue, (run.order, run))

    def _keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """Return the keys of a prompt with images.

        A key is never reused while pages may hold it.
        """
        if self._image_keys.count > MAX_IMAGE_KEYS:
            self.block_manager.reset()
            self._image_keys = ImageKeys()
        return self._image_keys.keys(multimodal)

    # --- decoding ---------------------------------------------------------------------------------

    def _decode(self) -> Progress:
        # A grammar's mask is valid for one id.
        constrained = any(run.grammar for run in self.running.values())
        steps = 1 if constrained else self.engine.shapes.decode_steps
        if self.speculation is None:
            return self._dispatch(steps, None)

        drafts = self.speculation.choose(list(self.running.values()))
        progress = self._dispatch(min(steps, self.speculation.steps), drafts)
        counts = []
        for _, event in progress:
            if isinstance(event, TokenChunk):
                counts.append(len(event.token_ids))
        self.speculation.measure(counts)
        return progress

    def _dispatch(self, steps: int, drafts: Mapping[RunningRequest, list[int]] | None) -> Progress:
        """Verify drafts or, without them, run decode steps; return what was sampled."""
        if drafts is None:
            self._make_room(lambda run: steps)
        else:
            self._make_room(lambda run: 1 + len(drafts[run]))

        runs = list(self.running.values())
        slots = self._slots(runs)
        if drafts is None:
            self.cache, sampled = self.engine.decode(
                self.params, self.cache, slots, steps, self._exit_after(len(runs))
            )
            steps = int((sampled.ids >= 0).any(axis=1).sum())
        else:
            slot_drafts = [drafts[run] for run in runs]
            self.cache, sampled = self.engine.verify(self.params, self.cache, slots, slot_drafts)
            steps = 1
        self.counters.slot_steps += self.engine.width(len(runs)) * steps

        progress: Progress = []
        for slot, run in enumerate(runs):
            event = self._accept(run, *sampled.of_slot(slot))
            if event is not None:
                progress.append((run, event))
        return progress

    def _slots(self, runs: Sequence[RunningRequest]) -> DecodeBatch:
        """Return a slot for each of the running requests."""
        shapes = self.engine.shapes
        pages = [self.block_manager.pages(run.context) for run in runs if run.context is not None]
        slots = slots_of(runs, pages, shapes.context_pages, self.engine.config.vocab_size)
        if self.block_manager.states is not None:
            states = [
                self.block_manager.state(run.context) for run in runs if run.context is not None
            ]
            slots = replace(slots, states=np.array(states, np.int32))
        if self.engine.adapters:
            numbers = [self._adapter_number(run) for run in runs]
            slots = replace(slots, adapter=np.array(numbers, np.int32))
        return slots

    def _exit_after(self, running: int) -> int:
        """Return how many finished slots end a dispatch early.

        One if requests wait. Otherwise a quarter, whose agents soon send their next turn, or as
        many as let the others run in a program of fewer slots.
        """
        if self.queue:
            return 1
        narrower = max((w for w in self.engine.shapes.slot_buckets if w < running), default=0)
        return max(1, min(running - narrower, running // 4))

    def _accept(
        self,
        run: RunningRequest,
        ids: np.ndarray,
        log_probs: np.ndarray,
        support_bits: np.ndarray | None = None,
    ) -> TokenChunk | BackendError | None:
        """Append one slot's output to its request, which a stop string may end earlier.

        Args:
            ids: int32 [S], -1 where the slot did not run.
            log_probs: float32 [S].
            support_bits: see :meth:`Sampled.of_slot`.
        """
        was_sampled = ids >= 0
        if support_bits is not None:
            support_bits = support_bits[was_sampled]
        last_id = run.last_id
        accepted = run.accept(ids[was_sampled], log_probs[was_sampled], self.version, support_bits)
        if not accepted:
            return None

        assert run.context is not None  # it ran
        # The dispatch fed the last id and all but the newest of the new ones: they are cached now.
        self.block_manager.append(run.context, [last_id, *run.token_ids[-accepted:-1]])
        self.counters.generated_tokens += accepted
        if self.speculation is not None:
            self.speculation.observe(run, accepted)

        if run.stop_reason is None:
            return self._chunk(run, accepted)
        # A stop string is found once the ids after it were fed.
        fed_further = accepted < np.count_nonzero(was_sampled)
        chunk = self._finish(run, accepted, state_is_current=not fed_further)
        # A grammar that failed allows nothing but the ids that end the output.
        if run.grammar is not None and run.grammar.error:
            return BackendError(
                f"request {run.request.request_id!r}: its grammar failed: {run.grammar.error}"
            )
        return chunk

    def _chunk(self, run: RunningRequest, new: int, final: TokenOutput | None = None) -> TokenChunk:
        """Return the last ``new`` ids of a request."""
        begin = len(run.token_ids) - new
        return TokenChunk(
            token_ids=tuple(run.token_ids[begin:]),
            log_probs=tuple(run.log_probs[begin:]),
            policy_versions=(self.version,) * new,
            supports=tuple(run.supports[begin:]),
            final=final,
        )

    def _finish(
        self, run: RunningRequest, new: int, *, state_is_current: bool = True
    ) -> TokenChunk:
        """Free what the request holds, and return its last chunk, of ``new`` ids.

        Args:
            state_is_current: whether no id after those was fed to its recurrent state.
        """
        request = run.request
        if run.context is not None:
            run.routed = self._read_routed(run, run.context)
            cached_keys = self.block_manager.ids(run.context)
            context_ids = [*run.keys_to_ids(cached_keys).tolist(), run.last_id]
            self.block_manager.free(
                run.context, session_ends=request.session_ends, state_is_current=state_is_current
            )
        else:
            context_ids = run.context_ids

        if request.session_id is not None:
            if request.session_ends or run.stop_reason is StopReason.ABORTED:
                self.return_times.forget(request.session_id)
            else:
                self.return_times.leave(request.session_id)

        self.running.pop(request.request_id, None)
        self._known.discard(request.request_id)
        self.counters.requests_finished += 1
        return self._chunk(run, new, run.output(context_ids))

    def _read_routed(self, run: RunningRequest, context: int) -> RoutedExperts | None:
        """Return the experts of the positions that were asked for and fed.

        None without experts, or without such positions.
        """
        start = run.routed.end if run.routed else run.request.routed_experts_prompt_start
        end = self.block_manager.count(context)
        if self.engine.config.experts is None or start >= end:
            return run.routed

        size = self.block_manager.size
        first_page = start // size
        end_page = -(-end // size)
        pages = self.block_manager.pages(context)[first_page:end_page]
        experts = self.engine.read_routed(self.cache, pages)
        begin = first_page * size  # position of the first row
        new = RoutedExperts.of(start, experts[start - begin : end - begin])
        return join_routed(run.routed, new)
