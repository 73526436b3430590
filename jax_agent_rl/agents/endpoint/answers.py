"""The answers of OpenAI's chat and text completion APIs, whole or streamed; other APIs have modules of their own."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from jax_agent_rl.agents.endpoint import wire
from jax_agent_rl.agents.endpoint.failures import ApiError
from jax_agent_rl.agents.endpoint.sessions import Piece
from jax_agent_rl.agents.endpoint.wire import ChatRequest, CompletionRequest
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.codec import ChatCodec


class ApiAnswer(ABC):
    """One request of an API and its answer.

    Attributes:
        asked: the request, as this endpoint serves it.
        end_of_stream: what is sent after the last event.
        ping: what is sent in a pause, so that nothing between takes the connection for dead.
    """

    asked: ChatRequest | CompletionRequest
    end_of_stream = ""
    ping = ": ping\n\n"

    @abstractmethod
    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        """Return the JSON of the whole answer."""

    @abstractmethod
    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the stream's events for one piece of the generation."""

    @abstractmethod
    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        """Yield the events that end the stream."""

    @staticmethod
    def failure(problem: ApiError) -> dict[str, Any]:
        """Return the body of an error answer or event."""
        return problem.body

    @staticmethod
    def encode(event: dict[str, Any]) -> str:
        """Return an event as sent in the stream."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def only_turn(choices: Sequence[Piece]) -> RecordedTurn:
    """Return the turn of an API whose requests have one choice."""
    (turn,) = (piece.turn for piece in choices if piece.turn is not None)
    return turn


class _CompletionsAnswer(ApiAnswer):
    """What answers of the two completion APIs share.

    Args:
        body: the request's JSON.

    Raises:
        ValidationError: a field is missing, wrong or not supported.
    """

    request: type[ChatRequest] | type[CompletionRequest]
    objects: tuple[str, str, str]
    """Prefix of ids, and the names of a whole answer and of a chunk."""
    end_of_stream = "data: [DONE]\n\n"

    def __init__(self, body: Any) -> None:
        self.asked: Any = self.request.model_validate(body)
        prefix, self._object, self._chunk_object = self.objects
        self._head = wire.head(f"{prefix}-{uuid.uuid4().hex}", self.asked.model)

    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        if self.asked.wants_usage:
            yield self._chunk([]) | {"usage": self._usage(choices)}

    @staticmethod
    def encode(event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"

    def _whole(self, choices: Sequence[Piece], worded: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self._object, "choices": list(worded), "usage": self._usage(choices)}

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self._chunk_object, "choices": list(choices)}

    def _usage(self, choices: Sequence[Piece]) -> dict[str, Any]:
        prompts = len(self.asked.prompts) if isinstance(self.asked, CompletionRequest) else 1
        ordered = sorted(choices, key=lambda piece: piece.index)
        return wire.usage([piece.turn for piece in ordered if piece.turn], prompts)


class ChatAnswer(_CompletionsAnswer):
    """``POST /v1/chat/completions``."""

    request = ChatRequest
    objects = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self._started: set[int] = set()

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        return self._whole(
            choices, [wire.chat_choice(codec, p.index, p.turn, self.asked) for p in choices if p.turn is not None]
        )

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.index not in self._started:
            self._started.add(piece.index)
            yield self._chunk([wire.chat_delta(piece.index, {"role": "assistant", "content": ""})])
        if piece.reasoning is not None:
            yield self._chunk([wire.chat_delta(piece.index, {"reasoning_content": piece.reasoning})])
        if piece.turn is not None:
            yield self._chunk([wire.last_chat_delta(codec, piece.index, piece.turn, piece.text, self.asked)])
        else:
            yield self._chunk([wire.chat_delta(piece.index, {"content": piece.text})])


class CompletionAnswer(_CompletionsAnswer):
    """``POST /v1/completions``."""

    request = CompletionRequest
    objects = ("cmpl", "text_completion", "text_completion")

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        return self._whole(choices, [wire.text_choice(codec, p.index, p.text, p.turn, self.asked) for p in choices])

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        yield self._chunk([wire.text_choice(codec, piece.index, piece.text, piece.turn, self.asked)])
