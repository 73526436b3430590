"""``generate`` over any number of servers: the only door from agents to engines.

::

    agent ──generate(ids)──► Balancer: sticky per session, else least in flight
                                │
                ┌───────────────┼───────────────┐
                ▼               ▼               ▼
           AsyncServer     AsyncServer     AsyncServer
                │ done            │ ABORTED          │ EngineDied, Closed
                ▼                 ▼                  ▼
             return     go on with prompt + ids   server is dropped,
                        so far, budget exact      same request elsewhere

A caller sees one whole output whatever happened to the engines below; only its own ``abort`` gives it a partial one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError, TokenDriftError
from jax_agent_rl.rollout.balancer import Balancer
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer, OnIds
from jax_agent_rl.rollout.stops import DecodeText, straddling_stop
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput, digest_ids

logger = logging.getLogger(__name__)

_MAX_FRUITLESS_RESUMES = 100
"""Resumptions in a row without a new id after which a request fails: an engine that aborts for ever is broken."""


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A request on its way: where it is, whether its caller wants it ended, and who is told its ids."""

    server: AsyncServer | None = None
    unwanted: bool = False
    on_ids: OnIds | None = None


class LLMServerClient:
    """Routes, resumes and retries. Use it from one event loop.

    Args:
        servers: started servers with different names, all at the same policy version.
        decode_text: ids to text, special tokens included; finds stop strings that an interruption cut in two.
            Without it, an interrupted request that has stop strings fails.
    """

    def __init__(self, servers: Iterable[AsyncServer] = (), *, decode_text: DecodeText | None = None):
        self._decode_text = decode_text
        self._updating = False
        self._balancer = Balancer()
        self._servers: dict[str, AsyncServer] = {}
        self._flights: dict[str, _Flight] = {}
        self._last_loss = ""
        for server in servers:
            self.add_server(server)

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        return tuple(self._servers.values())

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that every server takes."""
        taken = [server.backend.capabilities.multi_modal for server in self.servers]
        return frozenset.intersection(*taken) if taken else frozenset()

    def require_server(self) -> None:
        """Whether there is anyone left to ask.

        Raises:
            EngineDiedError: every server is gone; says why the last one went.
        """
        if not self._servers:
            raise EngineDiedError(f"no rollout engine is left: {self._last_loss or 'none was added'}")

    def add_server(self, server: AsyncServer) -> None:
        """Takes a started server into the rotation, also while others are running.

        Raises:
            ValueError: its name is in use, or its weights are not those of the others.
        """
        self._check_version(server)
        self._balancer.add(server.name)
        self._servers[server.name] = server

    async def remove_server(self, name: str) -> AsyncServer:
        """Takes a server out of the rotation; what it was running goes on elsewhere. The caller closes it.

        A backend that cannot abort finishes its requests first.

        Raises:
            KeyError: there is no such server.
        """
        server = self._servers.pop(name)
        self._balancer.remove(name)
        await server.evacuate()
        return server

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
        on_ids: OnIds | None = None,
    ) -> TokenOutput:
        """Samples one continuation.

        Args:
            request_id: unique among the running requests.
            prompt_ids: the whole context.
            sampling_params: how to sample. A resumed request keeps its seed, so an engine that keys its draws by
                seed and position goes on as if nothing had happened.
            session_id: shared by the requests of a trajectory; keeps them on one server, and before those of
                sessions that began later.
            session_ends: this is the session's last request.
            image_data: images, for a multi-modal engine, in order of their placeholders in ``prompt_ids``, where each
                placeholder stands as often as the model reads it (``ChatCodec.expand_media``).
            video_data: videos, likewise.
            lora: name of the adapter to sample with, of an engine that serves it; None is the plain model.
            on_ids: called with new ids as they are sampled. They are provisional: only the output says whether
                the last ones stand (a stop string across an interruption takes ids back).

        Returns:
            The output; ``StopReason.ABORTED`` only if :meth:`abort` was called for it.

        Raises:
            PromptTooLongError: the prompt leaves no room for a sampled id.
            TokenDriftError: a part of an interrupted request was conditioned on other ids than these (that of a
                whole output is the caller's to check).
            BackendError: the request failed, or every server is gone.
        """
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling_params,
            session_id=session_id,
            session_ends=session_ends,
            priority=self._balancer.priority(session_id),
            multi_modal={kind: tuple(items) for kind, items in (("image", image_data), ("video", video_data)) if items},
            lora=lora,
        )
        if request_id in self._flights:
            raise BackendError(f"a request called {request_id!r} is running already")
        flight = self._flights[request_id] = _Flight(on_ids=on_ids)
        try:
            return await self._run(request, flight)
        finally:
            del self._flights[request_id]
            if session_ends and session_id is not None:
                self.end_session(session_id)

    async def abort(self, request_id: str) -> bool:
        """Ends a request: its ``generate`` returns the ids so far. False if it is not running."""
        flight = self._flights.get(request_id)
        if flight is None:
            return False
        flight.unwanted = True
        if flight.server is not None:
            await flight.server.abort(request_id)
        return True

    def fork_session(self, parent_id: str, session_id: str) -> None:
        """Begins a session on the server of another, where the KV of their common context is, and with its priority."""
        self._balancer.fork_session(parent_id, session_id)

    def end_session(self, session_id: str) -> None:
        """Forgets where a session lives; call it when its trajectory is over."""
        self._balancer.end_session(session_id)

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Updates all servers at once; see :meth:`AsyncServer.update_weights`.

        A server that dies of it leaves the rotation.

        Raises:
            WeightUpdateError: a server refused; it still serves its old weights.
            BackendError: no server is left.
        """
        servers = self.servers
        self._updating = True
        try:
            updates = (s.update_weights(update, mode=mode) for s in servers)
            results = await asyncio.gather(*updates, return_exceptions=True)
        finally:
            self._updating = False
        failures = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, EngineDiedError | BackendClosedError):
                self._lose(server, result)
            elif isinstance(result, BaseException):
                failures.append(result)
        if failures:
            raise failures[0]
        if not self._servers:
            raise BackendError(f"no server is left to take weights of version {update.version}")

    async def _run(self, request: GenerateRequest, flight: _Flight) -> TokenOutput:
        """Sends the request until it is whole: each pass sends what is missing to some server."""
        so_far: TokenOutput | None = None
        rest, fruitless = request, 0
        while not flight.unwanted:
            output = await self._send(rest, flight)
            if output is None:
                continue
            fruitless = 0 if output.token_ids else fruitless + 1
            so_far = output if so_far is None else self._join(request, so_far, output)
            if so_far.stop_reason is not StopReason.ABORTED:
                return so_far
            left = request.sampling.max_tokens - len(so_far.token_ids)
            if left <= 0:
                return replace(so_far, stop_reason=StopReason.LENGTH)
            _check_context(rest, output)
            if fruitless >= _MAX_FRUITLESS_RESUMES:
                raise BackendError(f"request {request.request_id!r} was aborted {fruitless} times without a new id")
            rest = replace(
                request,
                prompt_ids=request.prompt_ids + so_far.token_ids,
                sampling=replace(request.sampling, max_tokens=left),
            )
        return so_far or _nothing(request)

    def _join(self, request: GenerateRequest, before: TokenOutput, rest: TokenOutput) -> TokenOutput:
        """Both parts as one, cut where a stop string is complete that began before the interruption.

        Raises:
            TokenDriftError: the later part was conditioned on other ids.
            BackendError: the request has stop strings and this client cannot read text.
        """
        whole, stop = before.then(rest), request.sampling.stop
        if not stop or not before.token_ids:
            return whole
        if self._decode_text is None:
            raise BackendError(
                f"request {request.request_id!r} was interrupted, and its stop strings {list(stop)} may stand across "
                "the seam; give LLMServerClient decode_text"
            )
        found = straddling_stop(before.token_ids, rest.token_ids, stop, self._decode_text)
        if found is None:
            return whole
        end, match = len(before.token_ids) + found[0], found[1]
        if end == len(whole.token_ids) and whole.stop_reason in (StopReason.EOS, StopReason.STOP):
            return whole  # the engine's own reason for ending at this id comes first
        _check_context(replace(request, prompt_ids=request.prompt_ids + before.token_ids), rest)
        return replace(
            whole,
            token_ids=whole.token_ids[:end],
            log_probs=whole.log_probs[:end],
            policy_versions=whole.policy_versions[:end],
            stop_reason=StopReason.STOP,
            stop_match=match,
            context_digest=digest_ids(request.prompt_ids + whole.token_ids[:end]),
        )

    def _check_version(self, server: AsyncServer) -> None:
        """A server of other weights would sample from a policy that nobody asked for."""
        if self._updating:
            raise ValueError(f"server {server.name!r} cannot be added while weights are being updated; add it after")
        served = sorted({s.backend.policy_version for s in self.servers})
        if served and served != [server.backend.policy_version]:
            raise ValueError(
                f"server {server.name!r} has policy version {server.backend.policy_version}, the others have {served}; "
                "bring it up to date first with server.update_weights(...)"
            )

    async def _send(self, request: GenerateRequest, flight: _Flight) -> TokenOutput | None:
        """One attempt on one server; None if that server turned out to be gone and there are others."""
        name = self._balancer.acquire(request.session_id)
        if name is None:
            raise BackendError(f"request {request.request_id!r}: there is no server (left)")
        server = flight.server = self._servers[name]
        try:
            return await server.generate(request, on_ids=flight.on_ids)
        except (EngineDiedError, BackendClosedError) as error:
            self._lose(server, error)
            if not self._servers:
                raise
            return None
        finally:
            flight.server = None
            if self._servers.get(name) is server:  # not when it was removed, nor when another took its name
                self._balancer.release(name)

    def _lose(self, server: AsyncServer, error: BaseException) -> None:
        """A server is gone; its sessions move on with their next request."""
        if self._servers.get(server.name) is server:
            del self._servers[server.name]
            self._balancer.remove(server.name)
            self._last_loss = f"{server.name}: {error}"
            logger.warning("server %s is gone (%s); %d left", server.name, error, len(self._servers))


def _check_context(request: GenerateRequest, part: TokenOutput) -> None:
    """The digest of a part is lost when another is joined to it or it is cut, so it is checked before."""
    if part.context_digest != digest_ids(request.prompt_ids + part.token_ids):
        raise TokenDriftError(
            f"request {request.request_id!r}: a part of it was not sampled from the {len(request.prompt_ids)} "
            "ids that were sent"
        )


def _nothing(request: GenerateRequest) -> TokenOutput:
    """The output of a request that was aborted before it sampled anything."""
    return TokenOutput(
        token_ids=(),
        log_probs=(),
        policy_versions=(),
        stop_reason=StopReason.ABORTED,
        context_digest=digest_ids(request.prompt_ids),
    )
