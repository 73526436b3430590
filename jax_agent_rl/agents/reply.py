"""What an agent's framework reads of a generation: text, reasoning, tool calls; also while it is being sampled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.conversation import CallWithId
from jax_agent_rl.chat.codec import CALL_ID_LENGTH
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec

_UNFINISHED_TAG = re.compile(r"<[^<>\s]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """An assistant turn for a framework.

    Attributes:
        content: text without reasoning, calls and stop string. A turn with a call that cannot be decoded is shown
            whole, so that the agent can tell the model.
        reasoning: text inside ``<think>``, or None.
        tool_calls: decoded calls; none unless the request named tools.
        malformed: calls that could not be decoded.
        finish_reason: ``stop``, ``length`` or ``tool_calls``, as OpenAI names them.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[CallWithId, ...] = ()
    malformed: int = 0
    finish_reason: str = "stop"


def read_reply(
    codec: ChatCodec, output: TokenOutput, *, tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
) -> ChatReply:
    """Parse a whole generation.

    Args:
        codec: ids to text and calls.
        output: the generation.
        tools: schemas of the request's tools; without any, what looks like a call is text.
        stop: the request's stop strings; the text ends before the one that was met.
    """
    reply = codec.parse_reply(output.token_ids, tools=tools)
    length = output.stop_reason is StopReason.LENGTH
    if not tools:
        content = visible_text(codec, output.token_ids)
        return ChatReply(
            content=cut_at_stop(content, stop), reasoning=reply.reasoning, finish_reason="length" if length else "stop"
        )
    calls = tuple(
        CallWithId(id=call.id or _call_id(output, index), name=call.name, arguments=call.arguments)
        for index, call in enumerate(reply.tool_calls)
    )
    content = codec.decode(output.token_ids) if reply.malformed else reply.content
    reason = "length" if length else "tool_calls" if calls else "stop"
    return ChatReply(
        content=cut_at_stop(content, stop),
        reasoning=reply.reasoning,
        tool_calls=calls,
        malformed=len(reply.malformed),
        finish_reason=reason,
    )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string."""
    ends = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """The text of a growing generation, in pieces that are never taken back.

    What may still turn out to be something else is held back: half a character, half a tag, the beginning of a stop
    string. Only for requests without tools: whether text is a call shows at its end.

    Args:
        read: ids to the text a client sees of them, e.g. :func:`visible_text`.
        stop: the request's stop strings.
    """

    def __init__(self, read: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._read = read
        self._stop = stop
        self.ids: list[int] = []
        self._sent = ""

    def add(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain."""
        self.ids += ids
        text = cut_at_stop(self._read(self.ids), self._stop).rstrip()
        text = _UNFINISHED_TAG.sub("", text.rstrip("\ufffd"))
        text = text[: len(text) - self._held_back(text)]
        if not text.startswith(self._sent):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        return new

    def finish(self, reply: ChatReply) -> tuple[str, ChatReply]:
        """Return the rest of the text, and the reply as the client has it.

        They differ from ``reply`` only if text that was sent turned out to be reasoning (a template that opens
        ``<think>`` in the prompt): what was sent stays, and what follows it is sent after it.
        """
        if reply.content.startswith(self._sent):
            return reply.content[len(self._sent) :], reply
        return reply.content, replace(reply, content=self._sent + reply.content)

    def _held_back(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        lengths = (n for s in self._stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
        return max(lengths, default=0)


def visible_text(codec: ChatCodec, ids: Sequence[int]) -> str:
    """Return the text without reasoning; tool calls without tools are text."""
    reply = codec.parse_reply(ids)
    return codec.decode(ids) if reply.tool_calls or reply.malformed else reply.content


def _call_id(output: TokenOutput, index: int) -> str:
    """Return an id that every template accepts and that depends on the whole context, so turns differ."""
    return digest_ids([*output.context_digest.encode(), index])[:CALL_ID_LENGTH]
