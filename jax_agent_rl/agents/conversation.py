"""Conversations with agents' frameworks: whether two are the same, and what a framework reads of a sampled turn.

A framework sends the whole conversation with every request, and no two write it alike. Messages are normalized first
(:mod:`jax_agent_rl.chat.messages`); two of them are the *same* when role, text, images and tool calls (name and decoded
arguments) are. Reasoning and call ids, which frameworks need not send back, only tell samples of the same text apart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.prompt import EncodedImage
from jax_agent_rl.chat.growing import GrowingText
from jax_agent_rl.chat.messages import ROLES, normalize_messages, reasoning_of
from jax_agent_rl.chat.reply import Reply, ReplyPart, ToolCall
from jax_agent_rl.chat.template import CALL_ID_LENGTH
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids
from jax_agent_rl.utils.media import text_content

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


_BEFORE, _EXCERPT = 20, 60  # characters of an excerpt: before a difference, in all


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """Reasoning and call ids of an assistant message, which distinguish samples of the same text.

    Frameworks need not send them back.

    Attributes:
        reasoning: the text of its thinking.
        call_ids: ids of its tool calls.
    """

    reasoning: str | None
    call_ids: tuple[str, ...]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Traces:
        """Return the traces of a message that :func:`plain_messages` accepts."""
        calls = message.get("tool_calls") or ()
        return cls(reasoning=reasoning_of(message), call_ids=tuple(str(call.get("id")) for call in calls))


def plain_messages(
    messages: Sequence[Mapping[str, Any]], modalities: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return the messages of a request in normal form (:func:`normalize_messages`).

    Where there are images, which only a model with that modality reads, content is a list of parts, see
    :mod:`jax_agent_rl.agents.prompt`.

    Raises:
        TemplateError: an unknown role, content that the model does not read, or a tool call that is no call; says which
            message.
    """

    def read_part(part: Any, role: str) -> Mapping[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "image_url" or "image" not in modalities:
            reads = "text and images" if "image" in modalities else "text only"
            raise ValueError(f"content part of type {kind!r} is not supported; this model reads {reads}")
        if role not in ("user", "tool"):
            raise ValueError(f"images belong in messages of role user or tool, not {role!r}")
        return {"type": "image", "image": EncodedImage.from_part(part)}

    return normalize_messages(messages, read_part=read_part, roles=ROLES)


def assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return a reply in the shape of :func:`plain_messages`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]
    return message


def fingerprint(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest that is equal iff two plain conversations with the same tools read the same to a model."""
    said = [_content_key(message) for message in messages]
    return hashlib.blake2b(json.dumps([said, list(tools)], sort_keys=True).encode(), digest_size=16).hexdigest()


def _content_key(message: Mapping[str, Any]) -> list[Any]:
    """Return what a model reads of a message; without call ids, which frameworks rename."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    content = message["content"]
    if not isinstance(content, str):
        content = [part["text"].strip() if part["type"] == "text" else [part["image"].digest] for part in content]
    return [message["role"], content.strip() if isinstance(content, str) else content, calls]


def first_difference(messages: Sequence[Mapping[str, Any]], recorded: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Say where a conversation of text leaves the recorded one that it follows longest; of several, the last one.

    >>> said = [{"role": "user", "content": "look it up"}, {"role": "assistant", "content": "I will"}]
    >>> first_difference([said[0], {"role": "assistant", "content": "I did"}], [said])
    "message 2 of 2 (assistant) has 'I did' where the recorded one (assistant) has 'I will'"
    """
    keys = [_content_key(message) for message in messages]
    common = -1
    conversation: Sequence[Mapping[str, Any]] = ()
    for candidate in recorded:
        followed = _common(keys, map(_content_key, candidate))
        if followed >= common:
            common = followed
            conversation = candidate
    if common == len(messages):
        images = " or shows other images" if any(message.get("media") for message in messages) else ""
        return f"asks again for what is on record{images}"
    if common == len(conversation):
        return f"goes on after message {common}, where the recorded one ends, but with other tools"
    new_message = messages[common]
    old_message = conversation[common]
    texts = [_shown(new_message), _shown(old_message)]
    start = max(0, len(commonprefix(texts)) - _BEFORE)  # excerpts begin shortly before the first difference
    new, old = [_excerpt(text, start) for text in texts]
    where = f"message {common + 1} of {len(messages)} ({new_message['role']})"
    return f"{where} has {new!r} where the recorded one ({old_message['role']}) has {old!r}"


def _excerpt(text: str, start: int) -> str:
    end = start + _EXCERPT
    before = "…" if start else ""
    after = "…" if len(text) > end else ""
    return f"{before}{text[start:end]}{after}"


def _common(one: Iterable[Any], other: Iterable[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _shown(message: Mapping[str, Any]) -> str:
    calls = (call["function"] for call in message.get("tool_calls", ()))
    written = (f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls)
    return " ".join([text_content(message).strip(), *written]).strip()


_UNFINISHED_TAG = re.compile(r"<[^<>\s]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """A call of a reply that could not be decoded.

    Attributes:
        id: under which an agent may answer it.
        text: as the model wrote it; empty if a call before it, written in the same block, has the text.
        problem: why it could not be decoded.
    """

    id: str
    text: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """An assistant turn for a framework.

    Attributes:
        parts: text, reasoning and decoded calls in the order in which the model wrote them. Text is without calls and
            stop string. A call that cannot be decoded is shown in it as the model wrote it, so that the agent can
            report it to the model; so is every call if the request named no tools.
        calls: decoded and malformed calls in order, each with the id under which its result will be sent back; none
            unless the request named tools.
        finish_reason: ``stop``, ``length`` or ``tool_calls``, as OpenAI names them.
    """

    parts: tuple[ReplyPart, ...]
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    finish_reason: str = "stop"

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Decoded calls, in order."""
        return tuple(call for call in self.calls if isinstance(call, ToolCall))

    @property
    def malformed(self) -> tuple[MalformedCall, ...]:
        """Calls that could not be decoded, in order."""
        return tuple(call for call in self.calls if isinstance(call, MalformedCall))

    @property
    def content(self) -> str:
        """All of the text."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str | None:
        """All of the model's thinking, or None."""
        thoughts = [part.text for part in self.parts if part.kind == "reasoning"]
        return "".join(thoughts) if thoughts else None


def read_reply(
    codec: ChatCodec,
    output: TokenOutput,
    *,
    tools: Sequence[Mapping[str, Any]],
    stop: Sequence[str],
    context_ids: Sequence[int] | None = None,
    continues: bool = False,
) -> ChatReply:
    """Return a whole generation as a framework reads it.

    Args:
        codec: ids to text and calls.
        output: the generation.
        tools: schemas of the request's tools; without any, what looks like a call is text.
        stop: the request's stop strings; the text ends before the one that was met.
        context_ids: what it was sampled after, see :meth:`ChatCodec.parse_reply`.
        continues: the request gave the beginning of the text, so white space before the rest counts.
    """
    reply = codec.parse_reply(output.token_ids, tools, context_ids=context_ids)
    was_cut = output.stop_reason is StopReason.LENGTH
    if not tools:
        parts = spoken_parts(codec, reply, stop=stop, continues=continues)
        return ChatReply(parts=parts, finish_reason="length" if was_cut else "stop")
    reply, calls = _with_call_ids(codec, reply, output.context_digest)
    parts = spoken_parts(codec, reply, stop=stop, with_tools=True, continues=continues)
    finish_reason = "tool_calls" if reply.tool_calls else "stop"
    return ChatReply(parts=parts, calls=calls, finish_reason="length" if was_cut else finish_reason)


def _with_call_ids(
    codec: ChatCodec, reply: Reply, context_digest: str
) -> tuple[Reply, tuple[ToolCall | MalformedCall, ...]]:
    """Return a turn in which every decoded call has an id of its own, and its calls in order, malformed ones too."""
    parts: list[ReplyPart] = []
    calls: list[ToolCall | MalformedCall] = []
    used: set[str] = set()
    for part in reply.parts:
        if part.kind in ("call", "malformed"):
            call_id = "" if part.call is None else part.call.id
            if not call_id or call_id in used:
                # An id that every template accepts; it depends on the whole context, so turns differ.
                call_id = digest_ids([*context_digest.encode(), len(calls)])[:CALL_ID_LENGTH]
            used.add(call_id)
            if part.call is None:
                text = codec.without_special_tokens(part.text)
                calls.append(MalformedCall(id=call_id, text=text, problem=part.problem))
            else:
                call = replace(part.call, id=call_id)
                part = replace(part, call=call)
                calls.append(call)
        parts.append(part)
    return Reply(parts=parts), tuple(calls)


def spoken_parts(
    codec: ChatCodec, reply: Reply, *, stop: Sequence[str], with_tools: bool = False, continues: bool = False
) -> tuple[ReplyPart, ...]:
    """Return the text, reasoning and, with tools, calls of a turn that a framework sees; arguments as above.

    The turn may be the beginning of one. Text has no white space around it, and ends before its first stop string.
    White space between two stretches of it belongs to the second one, so that nothing changes when the turn grows.
    """
    parts: list[ReplyPart] = []
    space = ""  # that more text may follow
    begun = continues
    for part in reply.parts:
        if part.kind == "reasoning":
            if part.text or not any(other.kind == "reasoning" for other in parts):
                parts.append(part)
            continue
        text = part.text
        if part.kind == "call" and with_tools:
            parts.append(part)
            continue
        if part.kind != "text":
            text = codec.without_special_tokens(text)
        text = space + text
        if not begun:
            text = text.lstrip()
        space = text[len(text.rstrip()) :]
        text = text.rstrip()
        if not text:
            continue
        begun = True
        if parts and parts[-1].kind == "text":
            text = parts.pop().text + text
        parts.append(ReplyPart(kind="text", text=text))
    return _before_stop(parts, stop) if stop else tuple(parts)


def _before_stop(parts: Sequence[ReplyPart], stop: Sequence[str]) -> tuple[ReplyPart, ...]:
    """Return the parts with their text cut before its first stop string."""
    content = "".join(part.text for part in parts if part.kind == "text")
    room = len(cut_at_stop(content, stop))
    before: list[ReplyPart] = []
    for part in parts:
        if part.kind == "text":
            part = replace(part, text=part.text[:room])
            room -= len(part.text)
        if part.text or part.kind != "text":
            before.append(part)
    return tuple(before)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string."""
    ends = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


OnText = Callable[[str, str | None], None]
"""Receives new text of a turn, and new reasoning that comes before it, or None."""


class TurnStream:
    """Sends text and reasoning of a turn to a listener while it is sampled, in pieces that are never taken back.

    Text that may still change is held back: an incomplete character or tag, white space at its end, the beginning of a
    stop string; and reasoning until it ends. Only for requests without tools: whether text is a call shows at its end.

    Args:
        read: takes sampled ids; returns text and reasoning of all of them so far.
        stop: the request's stop strings.
        on_text: the listener.
    """

    def __init__(
        self, read: Callable[[Sequence[int]], Sequence[ReplyPart]], *, stop: Sequence[str], on_text: OnText
    ) -> None:
        self._read = read
        self._stop = stop
        self._on_text = on_text
        self._sent: list[ReplyPart] = []

    @classmethod
    def of_chat(
        cls,
        codec: ChatCodec,
        context_ids: Sequence[int],
        *,
        stop: Sequence[str],
        on_text: OnText,
        continues: bool = False,
    ) -> TurnStream:
        """Return the stream of an assistant turn.

        Args:
            codec: ids to text and calls.
            context_ids: what the turn is sampled after.
            stop: see the class.
            on_text: see the class.
            continues: as in :func:`read_reply`.
        """
        growing = codec.growing_reply(context_ids)
        return cls(
            lambda ids: spoken_parts(codec, growing.add(ids), stop=stop, continues=continues),
            stop=stop,
            on_text=on_text,
        )

    @classmethod
    def of_text(cls, codec: ChatCodec, *, stop: Sequence[str], on_text: OnText) -> TurnStream:
        """Return the stream of all text that is sampled, whatever it says."""
        growing = GrowingText(codec.decode)
        return cls(lambda ids: raw_parts(growing.add(ids), stop), stop=stop, on_text=on_text)

    def on_ids(self, ids: Sequence[int]) -> None:
        """Take sampled ids; send what is certain now."""
        self._send(self._certain(self._read(ids)))

    def finish(self, reply: ChatReply) -> ChatReply:
        """Send the rest of a turn, and return it as the client has it."""
        self._send(reply.parts, is_whole=True)
        return replace(reply, parts=tuple(self._sent))

    def _certain(self, parts: Sequence[ReplyPart]) -> Sequence[ReplyPart]:
        """Return the parts so far that stay as they are, whatever follows."""
        if not parts:
            return parts
        *before, last = parts
        if last.kind == "reasoning":
            return parts if last.is_closed else before
        text = _UNFINISHED_TAG.sub("", last.text.rstrip().rstrip("\ufffd")).rstrip()
        text = text[: len(text) - self._held_back(text)].rstrip()
        return [*before, replace(last, text=text)]

    def _held_back(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        lengths = (n for s in self._stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
        return max(lengths, default=0)

    def _send(self, parts: Sequence[ReplyPart], *, is_whole: bool = False) -> None:
        """Send what was not sent of these parts.

        Text that differs from what was sent stays as it was sent; at the end follows what comes after the difference.
        """
        unchanged: dict[str, int] = {}
        for kind in ("text", "reasoning"):
            sent = _joined(self._sent, kind)
            told = _joined(parts, kind)
            unchanged[kind] = len(sent) if told.startswith(sent) else len(commonprefix([sent, told]))
            if unchanged[kind] < len(sent) and not is_whole:
                return
        had_reasoning = any(part.kind == "reasoning" for part in self._sent)
        for part in parts:
            known = min(unchanged[part.kind], len(part.text))
            unchanged[part.kind] -= known
            new = part.text[known:]
            if part.kind == "reasoning" and (new or not had_reasoning):
                had_reasoning = True
                self._sent.append(replace(part, text=new))
                self._on_text("", new)
            elif part.kind == "text" and new:
                self._note_text(new)
                self._on_text(new, None)

    def _note_text(self, text: str) -> None:
        if self._sent and self._sent[-1].kind == "text":
            text = self._sent.pop().text + text
        self._sent.append(ReplyPart(kind="text", text=text))


def _joined(parts: Iterable[ReplyPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def raw_parts(text: str, stop: Sequence[str]) -> tuple[ReplyPart, ...]:
    """Return all that was sampled as text, up to its first stop string."""
    text = cut_at_stop(text, stop)
    return (ReplyPart(kind="text", text=text),) if text else ()
