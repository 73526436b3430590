"""Conversations with agents' frameworks: which are the same, and how a sampled turn reads.

A framework sends the whole conversation with every request, and no two write it alike. Messages are
normalized first (:mod:`jax_agent_rl.chat.messages`); two of them are the *same* when role, text,
images and tool calls (name and decoded arguments) are. Reasoning and call ids, which frameworks
need not send back, only tell samples of the same text apart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.prompt import EncodedImage
from jax_agent_rl.chat.growing import GrowingText
from jax_agent_rl.chat.messages import ROLES, normalize_messages, reasoning_of
from jax_agent_rl.chat.reply import Reply, ReplyPart, ToolCall
from jax_agent_rl.chat.template import CALL_ID_LENGTH
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids
from jax_agent_rl.types.sequences import common_prefix_length
from jax_agent_rl.utils.media import text_content

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


_EXCERPT_CHARACTERS = 60
_CHARACTERS_BEFORE_DIFFERENCE = 20  # of an excerpt


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
        call_ids = [str(call.get("id")) for call in calls]
        return cls(reasoning=reasoning_of(message), call_ids=tuple(call_ids))


def plain_messages(
    messages: Sequence[Mapping[str, Any]], modalities: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return the messages of a request in normal form (:func:`normalize_messages`).

    Where there are images, which only a model with that modality reads, content is a list of parts:
    see :mod:`jax_agent_rl.agents.prompt`.

    Raises:
        TemplateError: an unknown role, content that the model does not read, or a tool call that is
            no call; says which message.
    """

    def read_part(part: Any, role: str) -> Mapping[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "image_url" or "image" not in modalities:
            reads = "text and images" if "image" in modalities else "text only"
            raise ValueError(
                f"content part of type {kind!r} is not supported; this model reads {reads}"
            )
        if role not in ("user", "tool"):
            raise ValueError(f"images belong in messages of role user or tool, not {role!r}")
        return {"type": "image", "image": EncodedImage.from_part(part)}

    return normalize_messages(messages, read_part=read_part, roles=ROLES)


def assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return a reply in the shape of :func:`plain_messages`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    for call in calls:
        function = {"name": call.name, "arguments": dict(call.arguments)}
        encoded = {"id": call.id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(encoded)
    return message


class Fingerprints:
    """Digests of a plain conversation's beginnings, and of its tools.

    Two digests are equal iff the beginnings read the same to a model, but for arguments that a call
    may leave out: some clients write out what the tool's schema has as their default. Each takes
    the time of one message, so that a long conversation can be looked for by all of them.
    """

    def __init__(
        self, messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self._defaults = _argument_defaults(tools)
        self._digest = hashlib.blake2b(digest_size=16)
        self._update(list(tools))
        self._of_lengths = [self._digest.hexdigest()]
        for message in messages:
            self.add(message)

    def add(self, message: Mapping[str, Any]) -> str:
        """Add a message, and return the digest of the conversation with it."""
        self._update(_content_key(message, self._defaults))
        self._of_lengths.append(self._digest.hexdigest())
        return self._of_lengths[-1]

    def first(self, count: int) -> str:
        """Return the digest of the first messages."""
        return self._of_lengths[count]

    def _update(self, value: list[Any]) -> None:
        # The JSON of a list says where it ends, so no two sequences of lists are the same bytes.
        self._digest.update(json.dumps(value, sort_keys=True).encode())


def _argument_defaults(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the defaults in the schemas of tools, by tool and argument."""
    defaults: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", {})
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if not isinstance(properties, Mapping):
            continue
        for name, schema in properties.items():
            if isinstance(schema, Mapping) and "default" in schema:
                defaults.setdefault(function["name"], {})[name] = schema["default"]
    return defaults


_NO_DEFAULTS: Mapping[str, Mapping[str, Any]] = {}


def _content_key(
    message: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]] = _NO_DEFAULTS
) -> list[Any]:
    """Return what a model reads of a message.

    Call ids are left out, as frameworks rename them, and arguments that have their default.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        arguments = dict(call["function"]["arguments"])
        for argument, default in defaults.get(name, {}).items():
            value = arguments.get(argument)
            if value == default and type(value) is type(default):  # 0 is equal to False
                arguments.pop(argument, None)
        calls.append([name, arguments])

    if isinstance(message["content"], str):
        return [message["role"], message["content"].strip(), calls]
    parts: list[Any] = []
    for part in message["content"]:
        if part["type"] == "text":
            parts.append(part["text"].strip())
        else:
            parts.append([part["image"].digest])
    return [message["role"], parts, calls]


def first_difference(
    messages: Sequence[Mapping[str, Any]], recorded: Iterable[Sequence[Mapping[str, Any]]]
) -> str:
    """Say where a conversation of text leaves the recorded one that it follows longest.

    If it follows several equally long, the last one counts.

    >>> question = {"role": "user", "content": "look it up"}
    >>> recorded = [question, {"role": "assistant", "content": "I will"}]
    >>> first_difference([question, {"role": "assistant", "content": "I did"}], [recorded])
    "message 2 of 2 (assistant) has 'I did' where the recorded one (assistant) has 'I will'"
    """
    keys = [_content_key(message) for message in messages]
    common = -1
    conversation: Sequence[Mapping[str, Any]] = ()
    for candidate in recorded:
        length = common_prefix_length(keys, map(_content_key, candidate))
        if length >= common:
            common = length
            conversation = candidate

    if common == len(messages):
        if any(message.get("media") for message in messages):
            return "asks again for what is on record or shows other images"
        return "asks again for what is on record"
    if common == len(conversation):
        return f"goes on after message {common}, where the recorded one ends, but with other tools"

    new_message = messages[common]
    old_message = conversation[common]
    new_text = _as_text(new_message)
    old_text = _as_text(old_message)
    # The excerpts begin shortly before the first difference.
    start = max(0, len(commonprefix([new_text, old_text])) - _CHARACTERS_BEFORE_DIFFERENCE)
    new_excerpt = _excerpt(new_text, start)
    old_excerpt = _excerpt(old_text, start)
    where = f"message {common + 1} of {len(messages)} ({new_message['role']})"
    return (
        f"{where} has {new_excerpt!r} where the recorded one ({old_message['role']}) has"
        f" {old_excerpt!r}"
    )


def _excerpt(text: str, start: int) -> str:
    end = start + _EXCERPT_CHARACTERS
    excerpt = text[start:end]
    if start > 0:
        excerpt = "…" + excerpt
    if len(text) > end:
        excerpt += "…"
    return excerpt


def _as_text(message: Mapping[str, Any]) -> str:
    """Return a message's text and calls for an excerpt."""
    texts = [text_content(message).strip()]
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        texts.append(f"{call['function']['name']}({arguments})")
    return " ".join(texts).strip()


UNFINISHED_TAG = re.compile(r"<[^<>\s]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """A call of a reply that could not be decoded.

    Attributes:
        id: under which an agent may answer it.
        text: as the model wrote it; empty if a call before it, written in the same block, has the
            text.
        problem: why it could not be decoded.
    """

    id: str
    text: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """An assistant turn for a framework.

    Attributes:
        parts: text, reasoning and decoded calls in the order in which the model wrote them. Text is
            without calls and stop string. A call that cannot be decoded is shown in it as the model
            wrote it, so that the agent can report it to the model; so is every call if the request
            named no tools.
        calls: decoded and malformed calls in order, each with the id under which its result will be
            sent back; none unless the request named tools.
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
        tools: schemas of the request's tools; without any, what looks like a call is text.
        stop: the request's stop strings; the text ends before the one that was met.
        context_ids: what it was sampled after, see :meth:`ChatCodec.parse_reply`.
        continues: the request gave the beginning of the text, so white space before the rest
            counts.
    """
    reply = codec.parse_reply(output.token_ids, tools, context_ids=context_ids)
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    if tools:
        reply, calls = _with_call_ids(codec, reply, output.context_digest)
    parts = spoken_parts(codec, reply, stop=stop, with_tools=bool(tools), continues=continues)

    finish_reason = "stop"
    if output.stop_reason is StopReason.LENGTH:
        finish_reason = "length"
    elif tools and reply.tool_calls:
        finish_reason = "tool_calls"
    return ChatReply(parts=parts, calls=calls, finish_reason=finish_reason)


def _with_call_ids(
    codec: ChatCodec, reply: Reply, context_digest: str
) -> tuple[Reply, tuple[ToolCall | MalformedCall, ...]]:
    """Give every decoded call of a turn an id of its own.

    Returns:
        The turn with these ids, and its calls in order, malformed ones included.
    """
    parts: list[ReplyPart] = []
    calls: list[ToolCall | MalformedCall] = []
    used_ids: set[str] = set()
    for part in reply.parts:
        if part.kind not in ("call", "malformed"):
            parts.append(part)
            continue

        call_id = "" if part.call is None else part.call.id
        if not call_id or call_id in used_ids:
            # An id that every template accepts; it depends on the whole context, so turns differ.
            call_id = digest_ids([*context_digest.encode(), len(calls)])[:CALL_ID_LENGTH]
        used_ids.add(call_id)

        if part.call is None:
            text = codec.without_special_tokens(part.text)
            calls.append(MalformedCall(id=call_id, text=text, problem=part.problem))
            parts.append(part)
        else:
            call = replace(part.call, id=call_id)
            calls.append(call)
            parts.append(replace(part, call=call))
    return Reply(parts=parts), tuple(calls)


def spoken_parts(
    codec: ChatCodec,
    reply: Reply,
    *,
    stop: Sequence[str],
    with_tools: bool = False,
    continues: bool = False,
) -> tuple[ReplyPart, ...]:
    """Return what a framework sees of a turn: text, reasoning and, with tools, calls.

    ``stop`` and ``continues`` are as in :func:`read_reply`. The turn may be the beginning of one.
    Text has no white space around it, and ends before its first stop string. White space between
    two stretches of it belongs to the second one, so that nothing changes when the turn grows.
    """
    parts: list[ReplyPart] = []
    held_space = ""  # white space at the end of the text, sent if more text follows
    has_reasoning = False
    has_text = continues
    for part in reply.parts:
        if part.kind == "reasoning":
            # An empty think block is reasoning as well, but one is enough.
            if part.text or not has_reasoning:
                parts.append(part)
            has_reasoning = True
            continue
        if part.kind == "call" and with_tools:
            parts.append(part)
            continue

        text = part.text
        if part.kind != "text":
            text = codec.without_special_tokens(text)
        text = held_space + text
        if not has_text:
            text = text.lstrip()
        stripped = text.rstrip()
        held_space = text[len(stripped) :]
        if not stripped:
            continue

        has_text = True
        if parts and parts[-1].kind == "text":
            stripped = parts.pop().text + stripped
        parts.append(ReplyPart(kind="text", text=stripped))
    return _before_stop(parts, stop) if stop else tuple(parts)


def _before_stop(parts: Sequence[ReplyPart], stop: Sequence[str]) -> tuple[ReplyPart, ...]:
    """Return the parts with their text cut before its first stop string."""
    content = _joined(parts, "text")
    characters_left = len(cut_at_stop(content, stop))
    cut_parts: list[ReplyPart] = []
    for part in parts:
        if part.kind != "text":
            cut_parts.append(part)
            continue
        text = part.text[:characters_left]
        characters_left -= len(text)
        if text:
            cut_parts.append(replace(part, text=text))
    return tuple(cut_parts)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string."""
    end = len(text)
    for string in stop:
        position = text.find(string)
        if position >= 0:
            end = min(end, position)
    return text[:end]


OnText = Callable[[str, str | None], None]
"""Receives new text of a turn, and new reasoning that comes before it, or None."""


class TurnStream:
    """Sends a turn's text and reasoning to a listener as they are sampled; takes nothing back.

    Text that may still change is held back: an incomplete character or tag, white space at its end,
    the beginning of a stop string; and reasoning until it ends. Only for requests without tools:
    whether text is a call shows at its end.

    Args:
        read: takes sampled ids; returns text and reasoning of all of them so far.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[ReplyPart]],
        *,
        stop: Sequence[str],
        on_text: OnText,
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
        """Return the stream of an assistant turn that is sampled after ``context_ids``.

        ``continues`` as in :func:`read_reply`.
        """
        growing = codec.growing_reply(context_ids)

        def read(ids: Sequence[int]) -> Sequence[ReplyPart]:
            return spoken_parts(codec, growing.add(ids), stop=stop, continues=continues)

        return cls(read, stop=stop, on_text=on_text)

    @classmethod
    def of_text(cls, codec: ChatCodec, *, stop: Sequence[str], on_text: OnText) -> TurnStream:
        """Return the stream of all text that is sampled, whatever it says."""
        growing = GrowingText(codec.decode)

        def read(ids: Sequence[int]) -> Sequence[ReplyPart]:
            return raw_parts(growing.add(ids), stop)

        return cls(read, stop=stop, on_text=on_text)

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
        *complete, last = parts
        if last.kind == "reasoning":
            return parts if last.is_closed else complete
        text = last.text.rstrip().rstrip("\ufffd")
        text = UNFINISHED_TAG.sub("", text).rstrip()
        text = text[: len(text) - self._partial_stop_length(text)].rstrip()
        return [*complete, replace(last, text=text)]

    def _partial_stop_length(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest

    def _send(self, parts: Sequence[ReplyPart], *, is_whole: bool = False) -> None:
        """Send what was not sent of these parts.

        Text that differs from what was sent stays as it was sent; at the end follows what comes
        after the difference.
        """
        # Characters at the beginning of each kind that are as they were sent.
        unchanged: dict[str, int] = {}
        for kind in ("text", "reasoning"):
            sent = _joined(self._sent, kind)
            current = _joined(parts, kind)
            unchanged[kind] = len(sent)
            if not current.startswith(sent):
                if not is_whole:
                    return
                unchanged[kind] = len(commonprefix([sent, current]))

        sent_reasoning = any(part.kind == "reasoning" for part in self._sent)
        for part in parts:
            skipped = min(unchanged[part.kind], len(part.text))
            unchanged[part.kind] -= skipped
            new_text = part.text[skipped:]
            if part.kind == "reasoning" and (new_text or not sent_reasoning):
                sent_reasoning = True
                self._sent.append(replace(part, text=new_text))
                self._on_text("", new_text)
            elif part.kind == "text" and new_text:
                self._add_sent_text(new_text)
                self._on_text(new_text, None)

    def _add_sent_text(self, text: str) -> None:
        if self._sent and self._sent[-1].kind == "text":
            text = self._sent.pop().text + text
        self._sent.append(ReplyPart(kind="text", text=text))


def _joined(parts: Iterable[ReplyPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def raw_parts(text: str, stop: Sequence[str]) -> tuple[ReplyPart, ...]:
    """Return all that was sampled as text, up to its first stop string."""
    text = cut_at_stop(text, stop)
    if not text:
        return ()
    return (ReplyPart(kind="text", text=text),)
