"""Sessions: who may talk to which recorder; and the generations of a request.

Each session has a secret and limits of its own. A request's choices are generated side by side:

::

    choice 0 ──┐  recorder.chat / .complete
    choice 1 ──┼─► one task each ──► queue of events ──► whole answer, or server-sent events
    choice n ──┘                     ("text", index, piece) … ("turn", index, rest, turn) … | error
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.agents.endpoint.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    grammar_of,
)
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.reply import ReplyPart, ToolCall
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.ids import check_safe_id

StoredResponses = dict[str, list[dict[str, Any]]]
"""The conversation up to and including each response of the Responses API, by the response's id."""


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One agent's conversations.

    Attributes:
        session_id: part of the path of its requests.
        api_key: what its client must send; None asks for nothing.
        free_sampling: whether requests choose temperature, top_p, top_k, min_p and seed. In
            training they do not: the learner computes log-probs with the run's own settings, so an
            agent's wishes are set aside.
        tasks: running generations; they end with the session.
        requests: number of running requests.
        last_used: when the last request came or went.
        responses: conversations that ``previous_response_id`` can continue.
    """

    session_id: str
    recorder: ChatRecorder
    sampling: SamplingParams
    api_key: str | None = None
    free_sampling: bool = False
    tasks: set[asyncio.Task] = field(default_factory=set)
    requests: int = 0
    last_used: float = 0.0
    responses: StoredResponses = field(default_factory=dict)

    def check_key(self, key: str) -> None:
        """Raise ApiError 401 unless the key is right."""
        if self.api_key is None:
            return
        if not hmac.compare_digest(self.api_key.encode(), key.encode()):
            raise ApiError(
                401, "the API key does not belong to this session", code="invalid_api_key"
            )

    def sampling_for(self, request: ChatRequest | CompletionRequest) -> SamplingParams:
        """Return how to sample one request; the recorder derives each choice's seed.

        Raises:
            ApiError: it demands a structure that there is no grammar for.
        """
        grammar = grammar_of(request, self.recorder.context.codec)
        max_tokens = self.sampling.max_tokens
        if request.limit is not None:
            max_tokens = min(max_tokens, request.limit)
        try:
            sampling = replace(
                self.sampling, max_tokens=max_tokens, stop=request.stops, grammar=grammar
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="stop") from None
        if not self.free_sampling:
            return sampling

        wishes: dict[str, Any] = {}
        for name in ("temperature", "top_p", "seed", "min_p", "top_k"):
            value = getattr(request, name)
            if value is not None:
                wishes[name] = value
        if "top_k" in wishes:
            wishes["top_k"] = max(0, wishes["top_k"])  # vLLM's -1 for all tokens is 0 here
        return replace(sampling, **wishes)

    def close(self) -> None:
        """End its requests and forget where its KV lives."""
        for task in self.tasks:
            task.cancel()
        self.recorder.context.client.end_session(self.session_id)


class SessionStore:
    """Sessions by id.

    Args:
        ttl: seconds after which an idle session that a client opened is forgotten.
        create: makes the session of a new id for the key of the client that names it; with None
            there are only the sessions that :meth:`add` was given.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        ttl: float,
        create: Callable[[str, str | None], Session] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions: dict[str, Session] = {}
        self._max = max_sessions
        self._ttl = ttl
        self.create = create
        self._clock = clock

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Add a session.

        Raises:
            ApiError: there are too many.
        """
        if len(self._sessions) >= self._max:
            raise ApiError(
                429, f"there are {len(self._sessions)} sessions, the maximum; end some", retry=True
            )
        session.last_used = self._clock()
        self._sessions[session.session_id] = session

    def known(self, session_id: str, key: str) -> Session | None:
        """Return the session of a request; None if there is none and the request may open it.

        Raises:
            ApiError: there is none, or the key is wrong.
        """
        self._forget_idle()
        session = self._sessions.get(session_id)
        if session is not None:
            session.check_key(key)
            session.last_used = self._clock()
        elif self.create is None:
            raise ApiError(
                404, f"there is no session {session_id!r}; it may be over", code="session_not_found"
            )
        return session

    def with_key(self, key: str) -> Session | None:
        """Return the session handed out with this key; None where clients open sessions."""
        if self.create is not None or not key:
            return None
        for session in self._sessions.values():
            if session.api_key is None:
                continue
            if hmac.compare_digest(session.api_key.encode(), key.encode()):
                return session
        return None

    def open(self, session_id: str, key: str) -> Session:
        """Open a session for a client; from then on it belongs to ``key`` unless that is empty.

        Raises:
            ApiError: the id is not allowed, or there are too many.
        """
        session = self.known(session_id, key)
        if session is not None:  # another request was faster
            return session
        try:
            check_safe_id(session_id)
        except ValueError as error:
            raise ApiError(400, f"session {error}") from None
        assert self.create is not None  # by known
        session = self.create(session_id, key or None)
        self.add(session)
        return session

    def visible_to(self, key: str) -> list[Session]:
        """Return the sessions that a key may see."""
        self._forget_idle()
        return [session for session in self._sessions.values() if session.api_key in (None, key)]

    def full(self, session: Session, max_ids: int) -> bool:
        """Return whether a session that a client opened has recorded ``max_ids`` ids.

        Each context is counted in full.
        """
        if self.create is None or session.session_id not in self._sessions:
            return False
        return sum(len(turn.context_ids) for turn in session.recorder.turns) >= max_ids

    def used(self, session: Session) -> None:
        """Record the end of a request; drop the session after a failed or single request."""
        session.last_used = self._clock()
        if session.requests:
            return
        if self._sessions.get(session.session_id) is not session:
            session.close()
        elif self.create is not None and not session.recorder.turns:
            self.end(session.session_id)

    def end(self, session_id: str) -> bool:
        """End a session and its requests; return False if there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.close()
        return True

    def close(self) -> None:
        """End all sessions."""
        for session_id in list(self._sessions):
            self.end(session_id)

    def _forget_idle(self) -> None:
        """End idle sessions that clients opened; agent loops end theirs with the trajectory."""
        if self.create is None:
            return
        now = self._clock()
        for session in list(self._sessions.values()):
            if not session.requests and now - session.last_used > self._ttl:
                self.end(session.session_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """New content of one choice.

    Attributes:
        index: number of the choice.
        prompt_ids: what the choice is sampled after.
        turn: the complete turn, with its last piece.
        reasoning: comes before ``text``.
        call: a call, without text or reasoning.
    """

    index: int
    text: str
    prompt_ids: tuple[int, ...] = ()
    turn: RecordedTurn | None = None
    reasoning: str | None = None
    call: ToolCall | None = None


def _of_part(part: ReplyPart) -> dict[str, Any]:
    """Return a part of a turn as the fields of a piece."""
    if part.kind == "call":
        return {"text": "", "call": part.call}
    if part.kind == "reasoning":
        return {"text": "", "reasoning": part.text}
    return {"text": part.text}


async def _sample(
    session: Session,
    request: ChatRequest | CompletionRequest,
    sampling: SamplingParams,
    index: int,
    emit: Callable[[Piece], None],
    adapter: str | None,
) -> None:
    """Run one generation; emit its pieces as they come."""
    recorder = session.recorder
    prompt_ids: tuple[int, ...] = ()

    def on_prompt(ids: tuple[int, ...]) -> None:
        nonlocal prompt_ids
        prompt_ids = ids

    def emit_piece(**fields: Any) -> None:
        emit(Piece(index=index, prompt_ids=prompt_ids, **fields))

    def on_text(text: str, reasoning: str | None) -> None:
        emit_piece(text=text, reasoning=reasoning)

    options: dict[str, Any] = {"sampling": sampling, "adapter": adapter, "on_prompt": on_prompt}
    is_streamed = bool(request.stream)
    if isinstance(request, ChatRequest):
        is_streamed = is_streamed and not request.prompt_tools
        turn = await recorder.chat(
            request.messages,
            tools=request.prompt_tools,
            template_kwargs=request.chat_template_kwargs,
            continue_last=request.continue_final_message,
            on_text=on_text if is_streamed else None,
            **options,
        )
    else:
        prompt = request.prompts[index // (request.n or 1)]
        turn = await recorder.complete(prompt, on_text=on_text if is_streamed else None, **options)

    if not request.stream:
        emit_piece(text=turn.reply.content, turn=turn, reasoning=turn.reply.reasoning)
        return
    if not is_streamed:  # nothing of it was sent yet
        for part in turn.reply.parts:
            emit_piece(**_of_part(part))
    emit_piece(text="", turn=turn)


def choice_count(request: ChatRequest | CompletionRequest) -> int:
    """Return how many choices a request asks for, of all its prompts."""
    prompt_count = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    return (request.n or 1) * prompt_count


async def pieces(
    session: Session,
    request: ChatRequest | CompletionRequest,
    sampling: SamplingParams,
    *,
    adapter: str | None = None,
) -> AsyncGenerator[Piece, None]:
    """Run all choices concurrently; the first failure ends the others.

    Args:
        sampling: what :meth:`Session.sampling_for` made of the request.
        adapter: LoRA adapter to sample with; None is the session's.

    Raises:
        JaxAgentRLError: a generation failed.
        ApiError: the session ended.
    """
    # Each task puts its pieces into the queue, and at last itself.
    queue: asyncio.Queue[Piece | asyncio.Task] = asyncio.Queue()
    tasks = []
    for index in range(choice_count(request)):
        sample = _sample(session, request, sampling, index, queue.put_nowait, adapter)
        task = asyncio.create_task(sample)
        task.add_done_callback(queue.put_nowait)
        tasks.append(task)
    session.tasks.update(tasks)

    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if isinstance(event, Piece):
                yield event
                continue
            if event.cancelled():
                raise ApiError(
                    503, "the session ended while the request was running", code="session_ended"
                )
            event.result()  # raises what the choice raised
            running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session.tasks.difference_update(tasks)


async def turns(
    session: Session,
    request: ChatRequest | CompletionRequest,
    sampling: SamplingParams,
    *,
    adapter: str | None = None,
) -> list[Piece]:
    """Return all choices, complete and in order."""
    complete = []
    async with aclosing(pieces(session, request, sampling, adapter=adapter)) as stream:
        async for piece in stream:
            if piece.turn is not None:
                complete.append(piece)
    return sorted(complete, key=lambda piece: piece.index)
