"""``generate`` over any number of servers: the only way from agents to engines.

::

    agent ──generate(ids)──► RequestQueue: sticky per session, else least in flight;
                                │          waits where there is no room
                ┌───────────────┼───────────────┐
                ▼               ▼               ▼
           AsyncServer     AsyncServer     AsyncServer
                │ done            │ ABORTED          │ EngineDied, Closed
                ▼                 ▼                  ▼
             return     resume with prompt + ids   server is lost; resume elsewhere
                        so far, exact budget       with what it had streamed

A caller sees one whole output whatever happened to the engines below; only its own ``abort`` gives
it a partial one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError
from jax_agent_rl.rollout.merge_outputs import (
    DecodeText,
    check_context,
    from_chunks,
    merge_outputs,
    remaining_request,
)
from jax_agent_rl.rollout.pool import ServerPool
from jax_agent_rl.rollout.protocol import GenerateRequest, TokenChunk
from jax_agent_rl.rollout.server import AsyncServer, OnIds
from jax_agent_rl.tracing import span
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput

logger = logging.getLogger(__name__)

_MAX_INTERRUPTIONS = 100
"""Interruptions in a row without a new id after which a request fails: an engine that always aborts
is broken."""

_MAX_LOSSES = 20
"""Servers lost in a row under a request without a new id, after which the request is held
responsible."""


@dataclass(frozen=True, kw_only=True)
class ServingStats:
    """Counts of a client's servers since it was made.

    Attributes:
        servers_up: in rotation now.
        servers_lost: died, cut off, stalled or without current weights.
        servers_joined: entered the rotation after the first request.
        stale_served: tokens older than the weights that were served when their part of a request
            began; 0, or an engine served what it should have replaced.
    """

    servers_up: int
    servers_lost: int
    servers_joined: int
    stale_served: int


@dataclass(kw_only=True, slots=True)
class _InFlight:
    """A running request: where it is, whether its caller aborted it, what it has sampled so far.

    Attributes:
        request: what its current part asks for.
        so_far: the earlier parts, merged.
        losses: servers that were lost under it in a row, without a new id.
        chunks: what the current part has streamed.
    """

    on_ids: OnIds | None
    request: GenerateRequest
    so_far: TokenOutput | None = None
    server: AsyncServer | None = None
    aborted: bool = False
    losses: int = 0
    chunks: list[TokenChunk] = field(default_factory=list)

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        if self.on_ids is not None:
            self.on_ids(chunk.token_ids)


class LLMServerClient:
    """Routes, resumes and retries over a pool of servers. Use it from one event loop.

    Args:
        servers: started servers; without them, call :meth:`ServerPool.start` of :attr:`pool`.
        decode_text: ids to text, special tokens included; finds stop strings that an interruption
            cut in two. Without it, an interrupted request that has stop strings fails.
        **pool_options: further arguments of :class:`~jax_agent_rl.rollout.pool.ServerPool`.

    Attributes:
        pool: starts, joins, updates and closes the servers.
        keeps_chunks: let servers that stream do so for every request, so that :meth:`partial` knows
            all ids.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServer] = (),
        *,
        decode_text: DecodeText | None = None,
        **pool_options: Any,
    ):
        self.pool = ServerPool(servers, **pool_options)
        self._decode_text = decode_text
        self.keeps_chunks = False
        self._in_flight: dict[str, _InFlight] = {}
        self._stale = 0
        self._first_servers: int | None = None  # servers added before the first request

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a server."""
        return self.pool.queue.waiting

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that every server takes."""
        return self.pool.modalities

    def stats(self) -> ServingStats:
        """Return the counts so far."""
        joined = 0
        if self._first_servers is not None:
            joined = self.pool.servers_added - self._first_servers
        return ServingStats(
            servers_up=len(self.pool.servers),
            servers_lost=self.pool.servers_lost,
            servers_joined=joined,
            stale_served=self._stale,
        )

    def require_server(self) -> None:
        """Check that there is a server, or that one is worth waiting for.

        Raises:
            EngineDiedError: every server is lost; names the reason of the last loss.
        """
        if not self.pool.queue.is_open:
            raise EngineDiedError(f"no rollout engine is left: {self.pool.queue.why_closed}")

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        session_id: str | None = None,
        session_ends: bool = False,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        lora: str | None = None,
        resumed: int = 0,
        on_ids: OnIds | None = None,
        routed_experts_prompt_start: int = 0,
    ) -> TokenOutput:
        """Sample one continuation.

        Args:
            request_id: unique among the running requests.
            prompt_ids: the whole context.
            sampling_params: how to sample. A resumed request keeps its seed, so an engine that keys
                its draws by seed and position continues as if nothing had happened.
            session_id: shared by the requests of a trajectory. It keeps them on one server, and
                ahead of the requests of sessions that began later.
            session_ends: this is the session's last request.
            image_data: images, for a multi-modal engine, in order of their placeholders in
                ``prompt_ids``, where each placeholder stands as often as the model reads it
                (``ChatCodec.expand_media``).
            video_data: videos, in order of their placeholders as well.
            lora: name of the adapter to sample with; None is the plain model.
            resumed: how many of the last prompt ids this generation has sampled already.
            on_ids: called with new ids as they are sampled. They are provisional: a stop string
                across an interruption takes ids back.
            routed_experts_prompt_start: how many of the first ids need no report of their experts.

        Returns:
            The output; ``StopReason.ABORTED`` only if :meth:`abort` was called for it.

        Raises:
            PromptTooLongError: the prompt leaves no room for a sampled id.
            TokenDriftError: a part of an interrupted request was conditioned on other ids than
                these (the caller checks a whole output itself).
            BackendError: the request failed, or every server is lost.
        """
        multi_modal: dict[str, tuple[Any, ...]] = {}
        if image_data:
            multi_modal["image"] = tuple(image_data)
        if video_data:
            multi_modal["video"] = tuple(video_data)
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling_params,
            session_id=session_id,
            session_ends=session_ends,
            priority=self.pool.queue.balancer.priority(session_id),
            multi_modal=multi_modal,
            lora=lora,
            routed_experts_prompt_start=routed_experts_prompt_start,
            resumed=resumed,
        )

        if request_id in self._in_flight:
            raise BackendError(f"a request called {request_id!r} is running already")
        state = _InFlight(on_ids=on_ids, request=request)
        self._in_flight[request_id] = state
        if self._first_servers is None:
            self._first_servers = self.pool.servers_added
        try:
            with span("generate") as traced:
                output = await self._run(request, state)
                if traced:
                    if self._decode_text is not None:
                        traced.set(text=self._decode_text(output.token_ids))
                    traced.set(
                        request_id=request_id,
                        context_tokens=len(prompt_ids),
                        sampled_tokens=len(output.token_ids),
                        cached_tokens=output.cached_tokens,
                        stop_reason=str(output.stop_reason),
                        policy_versions=sorted(set(output.policy_versions)),
                    )
            return output
        finally:
            del self._in_flight[request_id]
            if session_ends and session_id is not None:
                self.end_session(session_id)

    async def abort(self, request_id: str) -> bool:
        """End a request: its ``generate`` returns the ids so far. False if it is not running."""
        state = self._in_flight.get(request_id)
        if state is None:
            return False
        state.aborted = True
        self.pool.queue.cancel(request_id)
        if state.server is not None:
            await state.server.backend.abort(request_id)
        return True

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a running request is known to have sampled, as if it had been aborted.

        None if nothing is known; see ``keeps_chunks``.
        """
        state = self._in_flight.get(request_id)
        if state is None:
            return None
        if not state.chunks and not state.so_far:
            return None
        part = from_chunks(state.request, state.chunks)
        if state.so_far is None:
            return part
        return state.so_far.then(part)

    def fork_session(self, parent_id: str, session_id: str) -> None:
        """Begin a session on another session's server and with its priority.

        That server has the KV of their common context.
        """
        self.pool.queue.balancer.fork_session(parent_id, session_id)

    def end_session(self, session_id: str) -> None:
        """Forget where a session lives; call it when its trajectory is over."""
        self.pool.queue.balancer.end_session(session_id)

    async def _run(self, request: GenerateRequest, state: _InFlight) -> TokenOutput:
        """Send what remains of the request to some server until the request is complete."""
        so_far: TokenOutput | None = None
        remaining = request
        interruptions = 0  # in a row, without a new id
        while not state.aborted:
            part = await self._send(remaining, state)
            if part is None:
                continue

            if part.token_ids:
                interruptions = 0
            else:
                interruptions += 1
            if so_far is None:
                so_far = part
            else:
                so_far = merge_outputs(request, so_far, part, self._decode_text)
            state.so_far = so_far
            state.chunks = []

            if so_far.stop_reason is not StopReason.ABORTED:
                return so_far
            if len(so_far.token_ids) >= request.sampling.max_tokens:
                return replace(so_far, stop_reason=StopReason.LENGTH)

            # Merging the next part drops the digest of this one.
            check_context(remaining, part)
            if interruptions >= _MAX_INTERRUPTIONS:
                raise BackendError(
                    f"request {request.request_id!r} was aborted {interruptions} times without a"
                    " new id"
                )
            remaining = remaining_request(request, so_far)
            state.request = remaining

        if so_far is None:
            return from_chunks(request, ())
        return so_far

    async def _send(self, request: GenerateRequest, state: _InFlight) -> TokenOutput | None:
        """Make one attempt on one server; None if nothing came of it."""
        with span("wait", "engine"):
            server = await self.pool.queue.acquire(request)
        if server is None:  # it was aborted while it waited
            return None

        try:
            # Both may have changed between the queue's choice and this task's turn.
            if state.aborted or not self.pool.queue.has(server):
                return None
            state.server = server
            state.chunks = []
            served_version = self.pool.policy_version
            on_chunk = None
            if state.on_ids or self.keeps_chunks:
                on_chunk = state.add

            clock = asyncio.get_running_loop().time
            start_time = clock()
            try:
                part = await server.generate(request, on_chunk=on_chunk)
            finally:
                state.server = None
            seconds = clock() - start_time
            num_computed = len(request.prompt_ids) - part.cached_tokens
            self.pool.queue.costs.add(seconds, computed=num_computed, sampled=len(part.token_ids))
        except (EngineDiedError, BackendClosedError) as error:
            self.pool.mark_lost(server, str(error))
            if not self.pool.queue.is_open:
                raise
            return self._salvage(request, state, error)
        finally:
            self.pool.queue.release(server)

        state.losses = 0
        if served_version is not None:
            self._count_stale(server, part, served_version)
        return part

    def _count_stale(self, server: AsyncServer, part: TokenOutput, served_version: int) -> None:
        """Count and report ids sampled with older weights than were served when the part began."""
        if min(part.policy_versions, default=served_version) >= served_version:
            return
        num_stale = sum(version < served_version for version in part.policy_versions)
        self._stale += num_stale
        logger.error(
            "%s sampled %d tokens with weights older than %d",
            server.name,
            num_stale,
            served_version,
        )

    def _salvage(
        self, request: GenerateRequest, state: _InFlight, error: BackendError
    ) -> TokenOutput | None:
        """Return what a lost server had streamed; None where there is nothing to resume from."""
        # Without decode_text, a stop string across the seam would go unnoticed: start again.
        can_merge = self._decode_text is not None or not request.sampling.stop
        if state.chunks and can_merge:
            state.losses = 0
            return from_chunks(request, state.chunks)

        state.losses += 1
        if state.losses >= _MAX_LOSSES:
            raise BackendError(
                f"request {request.request_id!r}: {state.losses} servers were lost under it, the"
                f" last one because: {error}"
            )
        return None
