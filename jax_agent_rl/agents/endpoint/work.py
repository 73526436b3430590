"""A request's generations: all at once, or as events while they are sampled.

::

    choice 0 ──┐  recorder.chat / .complete
    choice 1 ──┼─► one task each ──► queue of events ──► whole answer, or server-sent events
    choice n ──┘                     ("text", index, piece) … ("turn", index, rest, turn) … | error
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from jax_agent_rl.agents.endpoint.failures import ApiError
from jax_agent_rl.agents.endpoint.sessions import Session
from jax_agent_rl.agents.endpoint.wire import ChatRequest, CompletionRequest
from jax_agent_rl.agents.recorder import RecordedTurn
from jax_agent_rl.agents.reply import ChatReply, TextStream, visible_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Something of one choice: new text, with the last piece the turn, and once the reasoning before the text."""

    index: int
    text: str
    turn: RecordedTurn | None = None
    reasoning: str | None = None


class _Choice:
    """One generation; tells its pieces as they come."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest | CompletionRequest,
        index: int,
        tell: Callable,
        adapter: str | None,
    ) -> None:
        self._session, self._adapter = session, adapter
        self._request = request
        self._index = index
        self._tell = tell
        streamed = request.stream and not (isinstance(request, ChatRequest) and request.prompt_tools)
        codec = session.recorder.context.codec
        read = functools.partial(visible_text, codec) if isinstance(request, ChatRequest) else codec.decode
        self._text = TextStream(read, request.stops) if streamed else None
        self._rest = ""
        self._text_begun = self._reasoning_sent = False

    async def run(self) -> None:
        turn = await (self._chat(self._request) if isinstance(self._request, ChatRequest) else self._complete())
        reasoning = None if self._reasoning_sent else turn.reply.reasoning
        self._tell(Piece(index=self._index, text=self._rest, turn=turn, reasoning=reasoning))

    async def _chat(self, request: ChatRequest) -> RecordedTurn:
        return await self._session.recorder.chat(
            request.messages,
            tools=request.prompt_tools,
            sampling=self._session.sampling_for(request),
            on_ids=self._on_ids if self._text else None,
            amend=self._amend,
            adapter=self._adapter,
        )

    async def _complete(self) -> RecordedTurn:
        assert isinstance(self._request, CompletionRequest)
        prompts = self._request.prompts
        prompt = prompts[self._index // (self._request.n or 1)]
        turn = await self._session.recorder.complete(
            prompt,
            sampling=self._session.sampling_for(self._request),
            on_ids=self._on_ids if self._text else None,
            adapter=self._adapter,
        )
        self._amend(turn.reply)
        return turn

    def _on_ids(self, ids: Sequence[int]) -> None:
        assert self._text is not None
        if not (text := self._text.add(ids)):
            return
        reasoning = None
        if not self._text_begun and isinstance(self._request, ChatRequest):  # reasoning ends where text begins
            self._text_begun = True
            reasoning = self._session.recorder.context.codec.parse_reply(self._text.ids).reasoning
            self._reasoning_sent = reasoning is not None
        self._tell(Piece(index=self._index, text=text, reasoning=reasoning))

    def _amend(self, reply: ChatReply) -> ChatReply:
        """Send the rest of the text, and return the reply as the client has it."""
        if self._text is None:
            self._rest = reply.content
            return reply
        self._rest, reply = self._text.finish(reply)
        return reply


async def pieces(
    session: Session, request: ChatRequest | CompletionRequest, *, adapter: str | None = None
) -> AsyncGenerator[Piece, None]:
    """Run all choices concurrently; the first failure ends the others.

    Args:
        session: the client's session.
        request: the request.
        adapter: LoRA adapter to sample with; None is the session's.

    Raises:
        JaxAgentRLError: a generation failed.
        ApiError: the session ended.
    """
    count = (request.n or 1) * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
    queue: asyncio.Queue[Piece | asyncio.Task] = asyncio.Queue()
    tasks = [asyncio.create_task(_Choice(session, request, i, queue.put_nowait, adapter).run()) for i in range(count)]
    session.tasks.update(tasks)
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        done = 0
        while done < count:
            event = await queue.get()
            if isinstance(event, Piece):
                yield event
                continue
            if event.cancelled():
                raise ApiError(503, "the session ended while the request was running", code="session_ended")
            event.result()  # raises what the choice raised
            done += 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session.tasks.difference_update(tasks)


async def turns(
    session: Session, request: ChatRequest | CompletionRequest, *, adapter: str | None = None
) -> list[Piece]:
    """All choices when they are whole, in order."""
    async with aclosing(pieces(session, request, adapter=adapter)) as stream:
        whole = [piece async for piece in stream if piece.turn is not None]
    return sorted(whole, key=lambda piece: piece.index)
