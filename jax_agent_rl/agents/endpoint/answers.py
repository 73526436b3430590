"""What answers are in every API, OpenAI's chat and text completions, and failures as answers.

Other APIs have modules of their own.
"""

from __future__ import annotations

import bisect
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from jax_agent_rl.agents.conversation import ChatReply
from jax_agent_rl.agents.endpoint.requests import REFUSED, ApiError, ChatRequest, CompletionRequest
from jax_agent_rl.agents.endpoint.sessions import Piece, StoredResponses
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    HistoryEditedError,
    JaxAgentRLError,
    PromptTooLongError,
    TemplateError,
    TurnRefusedError,
)
from jax_agent_rl.types import FinishReason
from jax_agent_rl.utils.wrong_values import describe_value, place_of

logger = logging.getLogger(__name__)

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiCall:
    """A request as it was received.

    Attributes:
        body: its JSON.
        model: the model that its path names, Gemini's; empty in other APIs.
        query: parameters in its address.
        stored: the session's responses that it can continue; None outside sessions.
    """

    body: Any
    model: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    stored: StoredResponses | None = None


class ApiAnswer(ABC):
    """One request of an API and its answer.

    Attributes:
        model_request: the request, as this endpoint serves it.
        end_of_stream: what is sent after the last event.
        ping: what is sent in a pause, so that no proxy takes the connection for dead; empty where
            clients cannot read such a thing.
    """

    model_request: ChatRequest | CompletionRequest
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
        """Return the body of an error answer or event; as OpenAI's API has it by default."""
        error = {
            "message": str(problem),
            "type": _ERRORS.get(problem.status, "server_error"),
            "param": problem.param,
            "code": problem.code,
        }
        return {"error": error}

    @staticmethod
    def encode(event: dict[str, Any]) -> str:
        """Return an event as sent in the stream; one with a type is named by it."""
        data = f"data: {json.dumps(event)}\n\n"
        if "type" in event:
            return f"event: {event['type']}\n{data}"
        return data


class ApiCount(ABC):
    """One request of an API for the number of ids of a prompt, and its answer.

    Attributes:
        model_request: the equivalent chat request.
    """

    model_request: ChatRequest

    @abstractmethod
    def answer(self, count: int) -> dict[str, Any]:
        """Return the JSON of the answer."""


def only_turn(choices: Sequence[Piece]) -> RecordedTurn:
    """Return the turn of an API whose requests have one choice."""
    (turn,) = (piece.turn for piece in choices if piece.turn is not None)
    return turn


class _CompletionsAnswer(ApiAnswer):
    """What answers of the two completion APIs share.

    Token ids stand where vLLM has them: a choice's in it, a prompt's in the answer of
    a chat and in a choice of text. In a stream they are in a choice's last and first chunk.

    Raises:
        ValidationError: a field is missing, wrong or not supported.
    """

    request: type[ChatRequest] | type[CompletionRequest]
    objects: tuple[str, str, str]
    """Prefix of ids, and the names of a whole answer and of a chunk."""
    end_of_stream = "data: [DONE]\n\n"

    def __init__(self, call: ApiCall) -> None:
        self.model_request: Any = self.request.model_validate(call.body)
        self._head = {
            "id": f"{self.objects[0]}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": self.model_request.model,
        }
        self._started: set[int] = set()  # choices of which something was sent

    @abstractmethod
    def choice(self, codec: ChatCodec, piece: Piece) -> dict[str, Any]:
        """Return a complete choice."""

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        complete = [self.choice(codec, piece) for piece in choices]
        return self._head | {
            "object": self.objects[1],
            "choices": complete,
            "usage": self._usage(choices),
        }

    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        if self.model_request.wants_usage:
            yield self._chunk() | {"usage": self._usage(choices)}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": self.objects[2], "choices": list(choices)}

    def _end(self, turn: RecordedTurn, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the fields that end a choice."""
        end = {"logprobs": logprobs, "finish_reason": turn.reply.finish_reason}
        if self.model_request.return_token_ids:
            end["token_ids"] = turn.output.token_ids
        return end

    def _prompt_ids(self, piece: Piece) -> dict[str, Any]:
        """Return the field with the ids of a prompt, where the request asks for them."""
        if not self.model_request.return_token_ids:
            return {}
        return {"prompt_token_ids": piece.prompt_ids}

    def _usage(self, choices: Sequence[Piece]) -> dict[str, Any]:
        """Return the tokens of all choices; OpenAI counts a prompt with several choices once."""
        turns = []
        for piece in sorted(choices, key=lambda piece: piece.index):
            if piece.turn is not None:
                turns.append(piece.turn)
        completion_tokens = sum(len(turn.output.token_ids) for turn in turns)

        prompt_count = 1
        if isinstance(self.model_request, CompletionRequest):
            prompt_count = len(self.model_request.prompts)
        choices_per_prompt = len(turns) // prompt_count
        first_choices = turns[::choices_per_prompt]
        prompt_tokens = sum(len(turn.prompt_ids) for turn in first_choices)
        cached_tokens = sum(turn.output.cached_tokens for turn in first_choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class ChatAnswer(_CompletionsAnswer):
    """``POST /v1/chat/completions``."""

    request = ChatRequest
    objects = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        # All choices have one prompt.
        return super().whole(codec, choices) | self._prompt_ids(choices[0])

    def choice(self, codec: ChatCodec, piece: Piece) -> dict[str, Any]:
        assert piece.turn is not None
        reply = piece.turn.reply
        calls = tool_calls(reply)
        content = reply.content or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"index": piece.index, "message": message, **self._chat_end(codec, piece.turn)}

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.index not in self._started:
            self._started.add(piece.index)
            yield self._delta(piece, {"role": "assistant", "content": ""}) | self._prompt_ids(piece)
        if piece.reasoning is not None:
            yield self._delta(piece, {"reasoning_content": piece.reasoning})
        if (
            piece.turn is None
        ):  # calls come with the last chunk: a chat message does not say what came before them
            if piece.text:
                yield self._delta(piece, {"content": piece.text})
            return

        delta: dict[str, Any] = {}
        if piece.text:
            delta["content"] = piece.text
        calls = tool_calls(piece.turn.reply)
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        yield self._delta(piece, delta, self._chat_end(codec, piece.turn))

    def _delta(
        self, piece: Piece, delta: dict[str, Any], end: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        end = end or {"logprobs": None, "finish_reason": None}
        return self._chunk({"index": piece.index, "delta": delta, **end})

    def _chat_end(self, codec: ChatCodec, turn: RecordedTurn) -> dict[str, Any]:
        """Return the fields that end a choice, with the log-probs of all its tokens."""
        if not self.model_request.logprobs:
            return self._end(turn, None)
        content = []
        for token, logprob in zip(token_texts(codec, turn), turn.output.log_probs, strict=True):
            # A replacement character stands for a part of a character: its bytes are not known.
            token_bytes = None if "\ufffd" in token else list(token.encode())
            content.append(
                {"token": token, "logprob": logprob, "bytes": token_bytes, "top_logprobs": []}
            )
        return self._end(turn, {"content": content, "refusal": None})


class CompletionAnswer(_CompletionsAnswer):
    """``POST /v1/completions``."""

    request = CompletionRequest
    objects = ("cmpl", "text_completion", "text_completion")

    def choice(self, codec: ChatCodec, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": None}
        if piece.index not in self._started:
            self._started.add(piece.index)
            choice |= self._prompt_ids(piece)
        turn = piece.turn
        if turn is None:
            return choice
        # 0 asks for the log-probs of the sampled tokens, without alternatives.
        if self.model_request.logprobs is None or self.model_request.logprobs is False:
            return choice | self._end(turn, None)

        tokens = token_texts(codec, turn)
        text_offset = []
        offset = 0
        for token in tokens:
            text_offset.append(offset)
            offset += len(token)
        logprobs = {
            "tokens": tokens,
            "token_logprobs": list(turn.output.log_probs),
            "top_logprobs": None,
            "text_offset": text_offset,
        }
        return choice | self._end(turn, logprobs)

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        yield self._chunk(self.choice(codec, piece))


def token_texts(codec: ChatCodec, turn: RecordedTurn) -> list[str]:
    """Return the text of each sampled id."""
    return [codec.decode([token], skip_special_tokens=False) for token in turn.output.token_ids]


def reasoning_tokens(codec: ChatCodec, turn: RecordedTurn) -> int:
    """Count the sampled ids up to the end of the reasoning text."""
    if not turn.reply.reasoning:
        return 0
    ids = turn.output.token_ids
    reasoning = turn.reply.reasoning.strip()

    def has_reasoning(length: int) -> bool:
        return reasoning in codec.decode(ids[:length])

    return bisect.bisect_left(range(len(ids)), True, key=has_reasoning)


def tool_calls(reply: ChatReply) -> list[dict[str, Any]]:
    """Return a reply's calls, with their arguments as a string of JSON."""
    calls = []
    for call in reply.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


# --- failures -------------------------------------------------------------------------------------


def as_api_error(error: Exception) -> ApiError:
    """Convert a failure for the client; log unexpected ones."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error)
        case JaxAgentRLError():
            return _from_failure(error)
        case RecursionError():
            return ApiError(
                400,
                "the request is nested too deep (arguments of a tool call?); send a flatter one",
            )
        case UnicodeEncodeError():
            return ApiError(
                400, f"the request holds a lone surrogate, which is not text: {error.reason}"
            )
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _from_validation(error: ValidationError) -> ApiError:
    """Return an error with a request's first problem and the number of others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    message = describe_value(first)
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    if first["type"] == REFUSED:
        return ApiError(400, message, param=first.get("ctx", {}).get("name"))

    path = place_of(first)
    where = f"{path}=" if path else "the request is "
    param = path.split(".")[0] or None
    return ApiError(400, f"{where}{first['input']!r:.120}: {message}", param=param)


def _from_failure(error: JaxAgentRLError) -> ApiError:
    """Convert a failure of ours for the client."""
    text = str(error)
    match error:
        case PromptTooLongError() | TurnRefusedError(finish_reason=FinishReason.RESPONSE_LENGTH):
            return ApiError(400, text, code="context_length_exceeded", param="messages")
        case TurnRefusedError():
            return ApiError(400, text, code=str(error.finish_reason))
        case TemplateError() | HistoryEditedError():
            return ApiError(400, text, code=str(error.drop_reason), param="messages")
        case EngineDiedError() | BackendClosedError():
            return ApiError(503, text, code="engine_gone")
        case BackendError():
            return ApiError(500, text, code="backend_error", retry=True)
    return ApiError(500, text, code="internal_error")
