"""``generate`` over any number of servers: the only way from agents to engines.

::

    agent ──generate(ids)──► RequestQueue: sticky per session, else least in flight; waits where there is no room
                                │
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
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

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
    """A running request: where it is, whether its caller aborted it, and what has been sampled so far.

    Attributes:
        request: what its current part asks for.
        so_far: the parts before.
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


class LLMServerClient(ServerPool):
    """Routes, resumes and retries over a pool of servers. Use it from one event loop.

    Args:
        servers: see :class:`~jax_agent_rl.rollout.pool.ServerPool`; or call :meth:`start`.
        decode_text: ids to text, special tokens included; finds stop strings that an interruption
            cut in two. Without it, an interrupted request that has stop strings fails.
        pool: further arguments of :class:`~jax_agent_rl.rollout.pool.ServerPool`.

    Attributes:
        keeps_chunks: let servers that stream do so for every request, so that :meth:`partial` knows
            all ids.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServer] = (),
        *,
        decode_text: DecodeText | None = None,
        **pool: Any,
    ):
        super().__init__(servers, **pool)
        self._decode_text = decode_text
        self.keeps_chunks = False
        self._in_flight: dict[str, _InFlight] = {}
        self._stale = 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a server."""
        return self.queue.waiting

    def stats(self) -> ServingStats:
        """Return the counts so far."""
        return ServingStats(
            servers_up=len(self.servers),
            servers_lost=self._lost,
            servers_joined=self._joined,
            stale_served=self._stale,
        )

    def weight_dtype(self) -> str:
        """Return ``Capabilities.weight_dtype`` of all started servers; float32 where they differ."""
        dtype, *others = {backend.capabilities.weight_dtype for backend in self.backends} or {
            AS_THEY_ARE
        }
        return AS_THEY_ARE if others else dtype

    def weight_payloads(self) -> frozenset[str]:
        """Return the kinds of payload that all started servers take."""
        kinds = [backend.capabilities.weight_payloads for backend in self.backends]
        return frozenset.intersection(*kinds) if kinds else frozenset()

    def require_server(self) -> None:
        """Check that there is a server, or that one is worth waiting for.

        Raises:
            EngineDiedError: every server is lost; names the reason of the last loss.
        """
        if not self.queue.is_open:
            raise EngineDiedError(f"no rollout engine is left: {self.queue.why_closed}")

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
            session_id: shared by the requests of a trajectory; keeps them on one server, and before
                those of sessions that began later.
            session_ends: this is the session's last request.
            image_data: images, for a multi-modal engine, in order of their placeholders in
                ``prompt_ids``, where each placeholder stands as often as the model reads it
                (``ChatCodec.expand_media``).
            video_data: videos, likewise.
            lora: name of the adapter to sample with, of an engine that serves it; None is the plain
                model.
            resumed: see :class:`GenerateRequest`.
            on_ids: called with new ids as they are sampled. They are provisional: a stop string
                across an interruption takes ids back.
            routed_experts_prompt_start: see
                :class:`~jax_agent_rl.rollout.protocol.GenerateRequest`.

        Returns:
            The output; ``StopReason.ABORTED`` only if :meth:`abort` was called for it.

        Raises:
            PromptTooLongError: the prompt leaves no room for a sampled id.
            TokenDriftError: a part of an interrupted request was conditioned on other ids than
                these (the caller checks a whole output itself).
            BackendError: the request failed, or every server is lost.
        """
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling_params,
            session_id=session_id,
            session_ends=session_ends,
            priority=self.queue.balancer.priority(session_id),
            multi_modal={
                kind: tuple(items)
                for kind, items in (("image", image_data), ("video", video_data))
                if items
            },
            lora=lora,
            routed_experts_prompt_start=routed_experts_prompt_start,
            resumed=resumed,
        )
        if request_id in self._in_flight:
            raise BackendError(f"a request called {request_id!r} is running already")
        state = self._in_flight[request_id] = _InFlight(on_ids=on_ids, request=request)
        self._has_requests = True
        try:
            with span("generate") as traced:
                output = await self._run(request, state)
                if traced:
                    text = (
                        {"text": self._decode_text(output.token_ids)} if self._decode_text else {}
                    )
                    traced.set(
                        **text,
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
        self.queue.cancel(request_id)
        if state.server is not None:
            await state.server.backend.abort(request_id)
        return True

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return, as if it had been aborted, what a running request has sampled as far as is known; None if nothing."""
        state = self._in_flight.get(request_id)
        if state is None or not (state.chunks or state.so_far):
            return None
        part = from_chunks(state.request, state.chunks)
        return part if state.so_far is None else state.so_far.then(part)

    def fork_session(self, parent_id: str, session_id: str) -> None:
        """Begin a session on the server of another, where the KV of their common context is, and with its priority."""
        self.queue.balancer.fork_session(parent_id, session_id)

    def end_session(self, session_id: str) -> None:
        """Forget where a session lives; call it when its trajectory is over."""
        self.queue.balancer.end_session(session_id)

    async def _run(self, request: GenerateRequest, state: _InFlight) -> TokenOutput:
        """Send what is missing of the request to some server until it is whole."""
        so_far: TokenOutput | None = None
        rest, fruitless = request, 0
        while not state.aborted:
            part = await self._send(rest, state)
            if part is None:
                continue
            fruitless = 0 if part.token_ids else fruitless + 1
            so_far = (
                part if so_far is None else merge_outputs(request, so_far, part, self._decode_text)
            )
            state.so_far, state.chunks = so_far, []
            if so_far.stop_reason is not StopReason.ABORTED:
                return so_far
            if len(so_far.token_ids) >= request.sampling.max_tokens:
                return replace(so_far, stop_reason=StopReason.LENGTH)
            check_context(rest, part)
            if fruitless >= _MAX_INTERRUPTIONS:
                raise BackendError(
                    f"request {request.request_id!r} was aborted {fruitless} times without a new id"
                )
            rest = state.request = remaining_request(request, so_far)
        return so_far or from_chunks(request, ())

    async def _send(self, request: GenerateRequest, state: _InFlight) -> TokenOutput | None:
        """Make one attempt on one server; None if nothing came of it."""
        with span("wait", "engine"):
            server = await self.queue.acquire(request)
        if server is None:  # it was aborted while it waited
            return None
        try:
            if state.aborted or not self.queue.has(server):  # since its turn came
                return None
            state.server, state.chunks, served = server, [], self._version
            clock = asyncio.get_running_loop().time
            begin = clock()
            try:
                part = await server.generate(
                    request, on_chunk=state.add if state.on_ids or self.keeps_chunks else None
                )
            finally:
                state.server = None
            computed = len(request.prompt_ids) - part.cached_tokens
            self.queue.costs.add(clock() - begin, computed=computed, sampled=len(part.token_ids))
        except (EngineDiedError, BackendClosedError) as error:
            self.mark_lost(server, str(error))
            if not self.queue.is_open:
                raise
            return self._salvage(request, state, error)
        finally:
            self.queue.release(server)
        state.losses = 0
        if served is not None and min(part.policy_versions, default=served) < served:
            self._stale += (stale := sum(version < served for version in part.policy_versions))
            logger.error(
                "%s sampled %d tokens with weights older than %d", server.name, stale, served
            )
        return part

    def _salvage(
        self, request: GenerateRequest, state: _InFlight, error: BackendError
    ) -> TokenOutput | None:
        """Return what a lost server had streamed; None where there is nothing to resume from."""
        if state.chunks and (self._decode_text is not None or not request.sampling.stop):
            state.losses = 0
            return from_chunks(request, state.chunks)
        state.losses += 1
        if state.losses >= _MAX_LOSSES:
            raise BackendError(
                f"request {request.request_id!r}: {state.losses} servers were lost under it, the"
                f" last one because: {error}"
            )
        return None
