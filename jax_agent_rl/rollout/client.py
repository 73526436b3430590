"""``generate`` over any number of servers: the only door from agents to engines.

::

    agent ──generate(ids)──► Admission: sticky per session, else least in flight; waits where there is no room
                                │
                ┌───────────────┼───────────────┐
                ▼               ▼               ▼
           AsyncServer     AsyncServer     AsyncServer
                │ done            │ ABORTED          │ EngineDied, Closed
                ▼                 ▼                  ▼
             return     go on with prompt + ids   server is dropped, go on elsewhere
                        so far, budget exact      with what it had streamed

A caller sees one whole output whatever happened to the engines below; only its own ``abort`` gives it a partial one.
Servers come and go: :class:`~jax_agent_rl.rollout.lifecycle.LLMServerManager` sees to that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError
from jax_agent_rl.rollout.admission import RequestQueue
from jax_agent_rl.rollout.merge_outputs import check_context, from_chunks, merge_outputs, remaining_request, seen
from jax_agent_rl.rollout.protocol import GenerateRequest, TokenChunk, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer, OnIds, ServerLifecycle, ServingStats, take_weights
from jax_agent_rl.rollout.stops import DecodeText
from jax_agent_rl.tracing import span
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput

logger = logging.getLogger(__name__)

_MAX_FRUITLESS = 100
"""Interruptions in a row without a new id after which a request fails: an engine that aborts for ever is broken."""

_MAX_LOSSES = 20
"""Servers in a row that were lost under a request without a new id: then it is the request that kills them."""


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A request on its way: where it is, whether its caller wants it ended, and what its part has streamed so far."""

    on_ids: OnIds | None
    server: AsyncServer | None = None
    unwanted: bool = False
    losses: int = 0
    chunks: list[TokenChunk] = field(default_factory=list)

    def hear(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        if self.on_ids is not None:
            self.on_ids(chunk.token_ids)


class LLMServerClient:
    """Routes, resumes and retries. Use it from one event loop.

    Args:
        servers: started servers with different names, all at the same policy version.
        decode_text: ids to text, special tokens included; finds stop strings that an interruption cut in two.
            Without it, an interrupted request that has stop strings fails.
        max_in_flight_per_server: requests beyond it wait here, those of older sessions first; None: any number.
        wait_for_server_seconds: how long requests wait while there is no server but one is being brought back.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServer] = (),
        *,
        decode_text: DecodeText | None = None,
        max_in_flight_per_server: int | None = None,
        wait_for_server_seconds: float = 0.0,
    ):
        self._decode_text = decode_text
        self._updating = False
        self._admission = RequestQueue(max_in_flight=max_in_flight_per_server, wait_seconds=wait_for_server_seconds)
        self._balancer = self._admission.balancer
        self._flights: dict[str, _Flight] = {}
        self._overseer: ServerLifecycle | None = None
        self._served: int | None = None
        self._modalities: frozenset[str] = frozenset()
        self._asked = False
        self._lost = self._joined = self._stale = 0
        for server in servers:
            self.add_server(server)

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        """Those in rotation."""
        return self._admission.servers

    @property
    def policy_version(self) -> int | None:
        """Of the weights that are served; None before there was a server."""
        return self._served

    @property
    def is_open(self) -> bool:
        """Whether there is a server, or one can be waited for."""
        return self._admission.is_open

    @property
    def waiting(self) -> int:
        """Requests that wait for room on a server, or for a server."""
        return self._admission.waiting

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that every server takes; while there is none, what they took before."""
        taken = [server.backend.capabilities.multi_modal for server in self.servers]
        return frozenset.intersection(*taken) if taken else self._modalities

    def stats(self) -> ServingStats:
        """How the servers fared so far."""
        return ServingStats(
            servers_up=len(self.servers),
            servers_lost=self._lost,
            servers_joined=self._joined,
            stale_served=self._stale,
        )

    def require_server(self) -> None:
        """Whether there is anyone left to ask, or to wait for.

        Raises:
            EngineDiedError: every server is gone; says why the last one went.
        """
        if not self._admission.is_open:
            raise EngineDiedError(f"no rollout engine is left: {self._admission.why_closed}")

    # --- servers ----------------------------------------------------------------------------------------------

    def oversee(self, overseer: ServerLifecycle) -> None:
        """Leaves losses and weight updates to whoever looks after the servers from now on."""
        self._overseer = overseer

    def add_server(self, server: AsyncServer) -> None:
        """Takes a started server into the rotation, also while others are running.

        Raises:
            ValueError: its name is in use, or its weights are not those of the others.
        """
        self._check_version(server)
        self._admission.add(server)
        self._served = server.backend.policy_version
        self._joined += self._asked

    async def remove_server(self, name: str, *, drain: bool = False) -> AsyncServer:
        """Takes a server out of the rotation; what it was running goes on elsewhere. The caller closes it.

        A backend that cannot abort finishes its requests first.

        Args:
            drain: it finishes all its requests first, whatever it can do.

        Raises:
            KeyError: there is no such server.
        """
        server = self.detach(name)
        if drain:
            await server.drain()
        else:
            await server.evacuate()
        return server

    def detach(self, name: str) -> AsyncServer:
        """Takes a server out of the rotation and leaves it with what it is running.

        Raises:
            KeyError: there is no such server.
        """
        server = self._admission.get(name)
        self._remove(server, "was removed")
        return server

    def mark_lost(self, server: AsyncServer, why: str) -> None:
        """A server is gone; its requests and sessions move on. Nothing happens if it left before."""
        if not self._admission.has(server):
            return
        self._lost += 1
        if self._overseer is not None:
            self._overseer.lost(server, why)
        self._remove(server, why)
        logger.warning("server %s is gone (%s); %d left", server.name, why, len(self.servers))

    def _remove(self, server: AsyncServer, why: str) -> None:
        self._modalities = self.modalities
        self._admission.remove(server, why=why)

    def expect_server(self, name: str) -> None:
        """A server is being brought back: while there is no other, requests wait for it."""
        self._admission.expect(name)

    def expect_server_no_more(self, name: str) -> None:
        """It is back, or will not come back."""
        self._admission.expect_no_more(name)

    def serve(self, version: int) -> None:
        """These are the weights that are served from now on; what was computed with others is worth nothing."""
        self._served = version
        self._balancer.forget_prefixes()

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Updates all servers at once; see :meth:`AsyncServer.update_weights`.

        A server that dies of it leaves the rotation.

        Raises:
            WeightUpdateError: refused; the old weights are still served (without a manager: by those who refused).
            BackendError: no server is left.
        """
        if self._overseer is not None:
            await self._overseer.update_weights(update, mode=mode)
            return
        with self.updating():
            results = await take_weights(self.servers, update, mode=mode)
        failures = []
        for server, error in results.items():
            if isinstance(error, EngineDiedError | BackendClosedError):
                self.mark_lost(server, str(error))
            elif error is not None:
                failures.append(error)
        if failures:
            raise failures[0]
        if not self.servers:
            raise BackendError(f"no server is left to take weights of version {update.version}")
        self.serve(update.version)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While weights change, nobody may enter the rotation: it would be left out."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

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

    # --- requests ---------------------------------------------------------------------------------------------

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
        self._asked = True
        try:
            with span("generate") as traced:
                output = await self._run(request, flight)
                if traced:
                    traced.set(**seen(request, output, self._decode_text))
            return output
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
        self._admission.dismiss(request_id)
        if flight.server is not None:
            await flight.server.abort(request_id)
        return True

    def fork_session(self, parent_id: str, session_id: str) -> None:
        """Begins a session on the server of another, where the KV of their common context is, and with its priority."""
        self._balancer.fork_session(parent_id, session_id)

    def end_session(self, session_id: str) -> None:
        """Forgets where a session lives; call it when its trajectory is over."""
        self._balancer.end_session(session_id)

    async def _run(self, request: GenerateRequest, flight: _Flight) -> TokenOutput:
        """Sends the request until it is whole: each pass sends what is missing to some server."""
        so_far: TokenOutput | None = None
        rest, fruitless = request, 0
        while not flight.unwanted:
            part = await self._send(rest, flight)
            if part is None:
                continue
            fruitless = 0 if part.token_ids else fruitless + 1
            so_far = part if so_far is None else merge_outputs(request, so_far, part, self._decode_text)
            if so_far.stop_reason is not StopReason.ABORTED:
                return so_far
            if len(so_far.token_ids) >= request.sampling.max_tokens:
                return replace(so_far, stop_reason=StopReason.LENGTH)
            check_context(rest, part)
            if fruitless >= _MAX_FRUITLESS:
                raise BackendError(f"request {request.request_id!r} was aborted {fruitless} times without a new id")
            rest = remaining_request(request, so_far)
        return so_far or from_chunks(request, ())

    async def _send(self, request: GenerateRequest, flight: _Flight) -> TokenOutput | None:
        """One attempt on one server; None if nothing came of it."""
        with span("wait", "engine"):
            server = await self._admission.enter(request)
        if server is None:  # it was aborted while it waited
            return None
        try:
            if flight.unwanted or not self._admission.has(server):  # that happened since it was its turn
                return None
            return await self._ask(server, request, flight)
        except (EngineDiedError, BackendClosedError) as error:
            self.mark_lost(server, str(error))
            if not self._admission.is_open:
                raise
            return self._salvage(request, flight, error)
        finally:
            self._admission.leave(server)

    async def _ask(self, server: AsyncServer, request: GenerateRequest, flight: _Flight) -> TokenOutput:
        flight.server, flight.chunks, served = server, [], self._served
        try:
            part = await server.generate(request, on_chunk=flight.hear if flight.on_ids else None)
        finally:
            flight.server = None
        flight.losses = 0
        if served is not None and (stale := sum(version < served for version in part.policy_versions)):
            self._stale += stale
            logger.error("%s sampled %d tokens with weights older than %d", server.name, stale, served)
        return part

    def _salvage(self, request: GenerateRequest, flight: _Flight, error: BackendError) -> TokenOutput | None:
        """What a server that is gone had streamed; None where it had streamed nothing that can be gone on with."""
        if flight.chunks and (self._decode_text is not None or not request.sampling.stop):
            flight.losses = 0
            return from_chunks(request, flight.chunks)
        flight.losses += 1
        if flight.losses >= _MAX_LOSSES:
            raise BackendError(
                f"request {request.request_id!r}: {flight.losses} servers were lost under it, the last one because: "
                f"{error}"
            )
        return None
