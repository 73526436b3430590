"""KV caches of simulated engines: one without limit, and the JAX engine's own block manager without a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_agent_rl.jetstream.admission import Patience, ReturnTimes
from jax_agent_rl.jetstream.block_manager import BlockManager
from jax_agent_rl.jetstream.shapes import page_size
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.routing import PrefixIndex

KVPolicy = Literal["lru", "expected_return"]


@dataclass(frozen=True, kw_only=True)
class KVCacheSize:
    """A KV cache of limited size.

    Attributes:
        tokens: positions on the device.
        offloading_tokens: positions on the host.
        policy: order of eviction. ``expected_return`` is the JAX engine's; it also makes requests wait for space.
        prefill_seconds: duration of computing an id of a prompt, during which no slot decodes.
        restore_seconds: the same of copying an id's KV back from the host.
    """

    tokens: int
    offloading_tokens: int = 0
    policy: KVPolicy = "expected_return"
    prefill_seconds: float = 0.0
    restore_seconds: float = 0.0


class Admission(NamedTuple):
    """What an admitted request finds in the cache.

    Attributes:
        context: its number.
        cached: ids of its prompt.
        stall_seconds: time in which no slot decodes.
    """

    context: int
    cached: int
    stall_seconds: float = 0.0


class UnlimitedKVCache:
    """Keeps every context, and recognizes prompts by their blocks."""

    def __init__(self) -> None:
        self._contexts: dict[str, int] = {}  # cached ids by session
        self._prompts = PrefixIndex()

    def admit(self, queue: Sequence[GenerateRequest], running: int) -> tuple[GenerateRequest, Admission] | None:
        """Return the request of the queue to run next, and what it finds; None if none can run."""
        request = queue[0]
        chain = PrefixIndex.chain(request.prompt_ids)
        shared = max(self._contexts.get(request.session_id or "", 0), self._prompts.find(chain)[1])
        self._prompts.add(chain, "here")
        return request, Admission(0, min(shared, len(request.prompt_ids) - 1))

    def release(self, context: int, request: GenerateRequest, sampled: Sequence[int], *, session_ends: bool) -> None:
        """End a request that has sampled these ids."""
        if request.session_id is not None:
            self._contexts[request.session_id] = len(request.prompt_ids) + len(sampled)
            if session_ends:
                del self._contexts[request.session_id]

    def come_back(self, session: str) -> None:
        """Do nothing: no session needs more care than another."""

    def reset(self) -> None:
        self._contexts.clear()
        self._prompts.clear()


class PagedKVCache:
    """The block manager of the JAX engine, as its scheduler uses it.

    Args:
        size: its size and costs.
        max_model_len: longest context.
        clock: seconds.
    """

    def __init__(self, size: KVCacheSize, *, max_model_len: int, clock: Callable[[], float]) -> None:
        page = page_size(max_model_len)
        self._size, self._page = size, page
        self._returns = ReturnTimes(clock)
        self._patience = Patience(clock)
        if size.policy == "expected_return":
            self._patience.add_prefill(1, size.prefill_seconds)
        self._blocks = BlockManager(
            size.tokens // page,
            page,
            -(-max_model_len // page),
            host_pages=size.offloading_tokens // page,
            return_rate=self._returns.rate if size.policy == "expected_return" else lambda session: 0.0,
        )

    def admit(self, queue: Sequence[GenerateRequest], running: int) -> tuple[GenerateRequest, Admission] | None:
        """Return what :meth:`UnlimitedKVCache.admit` does: the first request, or one with KV that overtakes it."""
        first = queue[0]
        cost = self._patience.cost(first.request_id, len(first.prompt_ids), running)
        if (admission := self._allocate(first, cost)) is not None:
            return first, admission
        for request in queue[1:] if cost else ():
            holds_most = self._blocks.holds_most(request.session_id, len(request.prompt_ids))
            if request.priority == first.priority and holds_most:
                if (admission := self._allocate(request, cost)) is not None:
                    return request, admission
        return None

    def _allocate(self, request: GenerateRequest, cost: float) -> Admission | None:
        prompt = request.prompt_ids
        allocation = self._blocks.allocate(prompt, request.session_id, recompute_cost=cost)
        if allocation is None:
            return None
        self._blocks.append(allocation.context, prompt[allocation.reused : -1])
        if not self._blocks.grow(allocation.context, request.sampling.max_tokens):
            self._blocks.free(allocation.context, session_ends=False)
            return None
        self._blocks.saved.clear()  # there is nothing to copy
        computed = (len(prompt) - allocation.reused) * self._size.prefill_seconds
        restored = len(allocation.restored) * self._page * self._size.restore_seconds
        return Admission(allocation.context, allocation.reused, computed + restored)

    def release(self, context: int, request: GenerateRequest, sampled: Sequence[int], *, session_ends: bool) -> None:
        """End a request that has sampled these ids."""
        if sampled:
            self._blocks.append(context, [request.prompt_ids[-1], *sampled[:-1]])
        self._blocks.free(context, session_ends=session_ends)
        if request.session_id is not None:
            (self._returns.forget if session_ends else self._returns.leave)(request.session_id)

    def come_back(self, session: str) -> None:
        """Note that a session's next request is queued."""
        self._returns.come_back(session)

    def reset(self) -> None:
        self._blocks.reset()
