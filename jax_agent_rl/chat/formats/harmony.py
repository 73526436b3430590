"""Harmony (gpt-oss): a turn is a row of messages, each with a channel; one that is addressed to a function is a call.

::

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

``analysis`` is reasoning, ``final`` and unaddressed ``commentary`` are content. What a header addresses is a call
whatever the channel; text that merely looks like one inside a message is not. The recipient may stand before the
channel (as the template writes it) or after it (as models write it).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.base import (
    MAX_CALLS,
    Reply,
    Schema,
    ToolCall,
    ToolFormat,
    json_at,
    skip_space,
    to_arguments,
)
from jax_agent_rl.chat.formats.syntax import CallSyntax

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>")
_START = re.compile(r"(?:<\|(?:end|call|return)\|>\s*)*<\|start\|>assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
    """Parse an assistant turn."""
    content: list[str] = []
    reasoning: list[str] = []
    items: list[ToolCall | str] = []
    at = 0
    while at < len(text) and len(items) <= MAX_CALLS:
        start = _START.match(text, at)
        header_at = start.end() if start else at
        body_at = text.find(_MESSAGE, header_at)
        if body_at < 0:
            _headless(text[header_at:], content, items)
            break
        header = text[header_at:body_at]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        body_at += len(_MESSAGE)
        if recipient:
            item, at = _call(text, body_at, recipient[1])
            items.append(item)
            continue
        ends = _ENDS.search(text, body_at)
        body = text[body_at : ends.start()] if ends else text[body_at:]
        (reasoning if channel and channel[1] == "analysis" else content).append(body)
        at = _message_end(text, ends.start() if ends else len(text))
    return Reply(
        content="\n\n".join(part.strip() for part in content if part.strip()),
        tool_calls=tuple(item for item in items if isinstance(item, ToolCall)),
        malformed=tuple(item for item in items if isinstance(item, str)),
        reasoning="\n\n".join(reasoning) if reasoning else None,
    )


def _headless(rest: str, content: list[str], items: list[ToolCall | str]) -> None:
    """Add text without a message: a header that is not followed by one, or plain text."""
    if _RECIPIENT.search(rest) and _CHANNEL.search(rest):
        items.append(f"a header that names a recipient, but no {_MESSAGE}")
    else:
        content.append(rest)


def _call(text: str, at: int, recipient: str) -> tuple[ToolCall | str, int]:
    """Return the call in the message body at ``at``, or its problem, and where the message ends."""
    value, end, problem = json_at(text, at)
    arguments = to_arguments(value) if problem is None else problem
    ends = _ENDS.search(text, end)
    stop = ends.start() if ends else len(text)
    if isinstance(arguments, str):
        return arguments, _message_end(text, stop)
    if skip_space(text, end) < stop:
        return f"unexpected text after the arguments: {text[end : end + 40]!r}", _message_end(text, stop)
    name = recipient.removeprefix("functions.")
    return ToolCall(name=name, arguments=arguments), _message_end(text, stop)


def _message_end(text: str, at: int) -> int:
    """Return the start of the next message, or the end of the text."""
    following = text.find("<|start|>", at)
    return following if following >= 0 else len(text)


FORMAT = ToolFormat(
    name="harmony",
    parse=parse,
    example='<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": VALUE}<|call|>',
    markers=(("<|channel|>", "commentary", "functions."),),
    syntaxes=(
        CallSyntax(
            before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            after="<|call|>",
            answer="<|channel|>final<|message|>",
            thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ),
    ),
)
