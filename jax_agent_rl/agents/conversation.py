"""Chat messages of agents' frameworks: what they send, normalized and compared by content, and what they read.

A framework sends the whole conversation with every request, and no two write it alike: ``content`` is None, a string
or a list of parts, arguments are JSON with other spaces, fields come and go. Two messages are the *same* when role,
text, images and tool calls (name and decoded arguments) are.
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
from jax_agent_rl.chat.template import CALL_ID_LENGTH
from jax_agent_rl.errors import TemplateError
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids
from jax_agent_rl.utils.media import text_content

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

REASONING = ("reasoning", "thinking")
"""Parts that frameworks send back and no model reads: reasoning is not part of a reply."""

_REASONING_FIELDS = ("reasoning_content", *REASONING)
_BEFORE, _EXCERPT = 20, 60  # characters of an excerpt: before a difference, in all


@dataclass(frozen=True, kw_only=True, slots=True)
class CallWithId:
    """A decoded tool call of a reply, with the id under which its result will be sent back."""

    id: str
    name: str
    arguments: Mapping[str, Any]


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
        fields = (message.get(name) for name in _REASONING_FIELDS)
        reasoning = next((field for field in fields if isinstance(field, str)), None)
        content = message.get("content")
        for part in content if reasoning is None and isinstance(content, list) else ():
            if isinstance(part, Mapping) and (kind := part.get("type")) in REASONING:
                text = part.get(kind) or part.get("text")
                reasoning = (reasoning or "") + text if isinstance(text, str) else reasoning
        return cls(reasoning=reasoning, call_ids=tuple(str(call.get("id")) for call in message.get("tool_calls") or ()))


def plain_messages(
    messages: Sequence[Mapping[str, Any]], modalities: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return OpenAI-style messages in one form: arguments as objects, named results, and text as content.

    Where there are images, which only a model with that modality reads, content is a list of parts, see
    :mod:`jax_agent_rl.agents.prompt`.

    Raises:
        TemplateError: an unknown role, content that the model does not read, or a tool call that is no call; says which
            message.
    """
    names: dict[str, str] = {}
    plain = []
    for index, message in enumerate(messages):
        try:
            one = _plain(message, modalities)
        except (TypeError, KeyError, ValueError) as error:
            raise TemplateError(f"messages[{index}]: {error}") from None
        names |= {call["id"]: call["function"]["name"] for call in one.get("tool_calls", ())}
        if one["role"] == "tool" and one.get("tool_call_id") in names:
            one.setdefault("name", names[one["tool_call_id"]])
        plain.append(one)
    return plain


def assistant_message(content: str, calls: Sequence[CallWithId]) -> dict[str, Any]:
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
    """Say where a conversation of text leaves the recorded one that it follows longest.

    >>> said = [{"role": "user", "content": "look it up"}, {"role": "assistant", "content": "I will"}]
    >>> first_difference([said[0], {"role": "assistant", "content": "I did"}], [said])
    "message 2 of 2 (assistant) has 'I did' where the recorded one (assistant) has 'I will'"
    """
    keys = [_content_key(message) for message in messages]
    known = [(_common(keys, map(_content_key, conversation)), conversation) for conversation in recorded]
    common, conversation = max(known, key=lambda pair: pair[0])
    if common == len(messages):
        images = " or shows other images" if any(message.get("media") for message in messages) else ""
        return f"asks again for what is on record{images}"
    if common == len(conversation):
        return f"goes on after message {common}, where the recorded one ends, but with other tools"
    here, there = messages[common], conversation[common]
    texts = [_shown(here), _shown(there)]
    start = max(0, len(commonprefix(texts)) - _BEFORE)  # excerpts begin shortly before the first difference
    new, old = ("…" * (start > 0) + t[start : start + _EXCERPT] + "…" * (len(t) > start + _EXCERPT) for t in texts)
    where = f"message {common + 1} of {len(messages)} ({here['role']})"
    return f"{where} has {new!r} where the recorded one ({there['role']}) has {old!r}"


def _common(one: Iterable[Any], other: Iterable[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _shown(message: Mapping[str, Any]) -> str:
    calls = (call["function"] for call in message.get("tool_calls", ()))
    written = (f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls)
    return " ".join([text_content(message).strip(), *written]).strip()


def _plain(message: Mapping[str, Any], modalities: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {sorted(ROLES)}")
    plain: dict[str, Any] = {"role": ROLES[role], "content": _content(message.get("content"), role, modalities)}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            plain[key] = message[key]
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any, role: str, modalities: frozenset[str]) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"content must be text or a list of parts, got {type(content).__name__}")
    plain: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in REASONING:
            continue
        one = _part(part, role, modalities)
        if plain and one["type"] == plain[-1]["type"] == "text":
            plain[-1] = {"type": "text", "text": plain[-1]["text"] + one["text"]}
        elif one.get("text") != "":
            plain.append(one)
    if all(part["type"] == "text" for part in plain):
        return "".join(part["text"] for part in plain)
    return plain


def _part(part: Any, role: str, modalities: frozenset[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url" or "image" not in modalities:
        reads = "text and images" if "image" in modalities else "text only"
        raise ValueError(f"content part of type {kind!r} is not supported; this model reads {reads}")
    if role not in ("user", "tool"):
        raise ValueError(f"images belong in messages of role user or tool, not {role!r}")
    return {"type": "image", "image": EncodedImage.from_part(part)}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping) or not isinstance(function["name"], str):
        raise ValueError(f"a tool call needs a name and an object of arguments, got {dict(function)!r:.120}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


_UNFINISHED_TAG = re.compile(r"<[^<>\s]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """An assistant turn for a framework.

    Attributes:
        content: text without reasoning, calls and stop string. A turn with a call that cannot be decoded is shown
            whole, so that the agent can report it to the model.
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
    # Ids that every template accepts; they depend on the whole context, so turns differ.
    calls = tuple(
        CallWithId(
            id=call.id or digest_ids([*output.context_digest.encode(), index])[:CALL_ID_LENGTH],
            name=call.name,
            arguments=call.arguments,
        )
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

    Text that may still change is held back: an incomplete character or tag, the beginning of a stop string. Only for
    requests without tools: whether text is a call shows at its end.

    Args:
        read: ids to the text a client sees of them, e.g. :func:`visible_text`.
        stop: the request's stop strings.

    Attributes:
        ids: the generation so far.
        sent: the text returned so far.
    """

    def __init__(self, read: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._read = read
        self._stop = stop
        self.ids: list[int] = []
        self.sent = ""

    def add(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain."""
        self.ids += ids
        text = cut_at_stop(self._read(self.ids), self._stop).rstrip()
        text = _UNFINISHED_TAG.sub("", text.rstrip("\ufffd"))
        text = text[: len(text) - self._held_back(text)]
        if not text.startswith(self.sent):
            return ""
        new = text[len(self.sent) :]
        self.sent = text
        return new

    def finish(self, reply: ChatReply) -> tuple[str, ChatReply]:
        """Return the rest of the text, and the reply as the client has it.

        They differ from ``reply`` only if text that was sent turned out to be reasoning (a template that opens
        ``<think>`` in the prompt): what was sent stays, and what follows it is sent after it.
        """
        if reply.content.startswith(self.sent):
            return reply.content[len(self.sent) :], reply
        return reply.content, replace(reply, content=self.sent + reply.content)

    def _held_back(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        lengths = (n for s in self._stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
        return max(lengths, default=0)


def visible_text(codec: ChatCodec, ids: Sequence[int]) -> str:
    """Return the text without reasoning; tool calls without tools are text."""
    reply = codec.parse_reply(ids)
    return codec.decode(ids) if reply.tool_calls or reply.malformed else reply.content
