r"""Formats of special tokens around JSON arguments: Kimi K2, DeepSeek V3, Mistral, Harmony.

::

    kimi          <|tool_calls_section_begin|>
                  <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                  <|tool_call_end|> … <|tool_calls_section_end|>
    deepseek_v3   <｜tool▁calls▁begin｜>
                  <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```
                  <｜tool▁call▁end｜> … <｜tool▁calls▁end｜>
    deepseek_v31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}
                  <｜tool▁call▁end｜> … <｜tool▁calls▁end｜>
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]   or, since v11,
                  [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}[TOOL_CALLS] …
    harmony       <|channel|>analysis<|message|>thinking<|end|>
                  <|start|>assistant<|channel|>commentary to=functions.NAME
                  <|constrain|>json<|message|>{…}<|call|>

In Kimi K2's format the text before the arguments is the id of the call; some models write
``call-NAME-0`` there.

In Harmony (gpt-oss) a turn is a row of messages, each with a channel. ``analysis`` is reasoning,
``final`` and unaddressed ``commentary`` are content. A message whose header names a recipient is a
call whatever its channel; text inside a message that looks like a call is not. The recipient may
stand before the channel (as the template writes it) or after it (as models write it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax_agent_rl.chat.formats.base import (
    MAX_CALLS,
    Read,
    Scanner,
    Schema,
    ToolFormat,
    arguments_at,
    json_at,
    resume_after,
    skip_space,
    to_call,
)
from jax_agent_rl.chat.grammar import CallSyntax
from jax_agent_rl.chat.reply import Reply, ReplyPart, ToolCall

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Ids that Mistral's templates accept; in place of others the codec makes one up."""


class SectionReader:
    """Reads one call: a special token, a head, JSON arguments and an end.

    Args:
        head: pattern of the text between the opening and the arguments, with the group ``name``.
        end: pattern of the text that must follow the arguments.
        to_call: makes a call of the match of the head and the arguments.
        marks: the tag that closes a call, and then tags that begin or end something else, to find
            where to resume after a broken call.
    """

    def __init__(
        self,
        head: str,
        end: str,
        to_call: Callable[[re.Match[str], dict[str, Any]], ToolCall],
        marks: Sequence[str],
    ) -> None:
        self._head = re.compile(head)
        self._end = re.compile(r"\s*" + end)
        self._to_call = to_call
        self._marks = marks

    def __call__(self, text: str, opening: re.Match[str]) -> Read:
        head = self._head.match(text, opening.end())
        if head is None:
            problem = f"expected a tool's name after {opening.group()}"
            return self._broken(text, opening.end(), problem)

        arguments, end = arguments_at(text, head.end(), self._end)
        if isinstance(arguments, str):
            return self._broken(text, end, arguments)
        close = self._end.match(text, end)
        if close is None:
            problem = f"unexpected text after the arguments: {text[end : end + 40]!r}"
            return self._broken(text, end, problem)
        return Read([self._to_call(head, arguments)], close.end())

    def _broken(self, text: str, at: int, problem: str) -> Read:
        return Read([problem], resume_after(text, at, *self._marks))


def _section_format(
    name: str,
    *,
    opening: str,
    section: tuple[str, str],
    read: SectionReader,
    example: str,
    markers: Sequence[str],
    syntax: CallSyntax,
) -> ToolFormat:
    """Return the format of calls between the two tags of a section."""
    begin, end = section
    noise = "|".join(map(re.escape, section))
    scanner = Scanner(re.escape(opening), read, noise=noise, announces=begin)
    return ToolFormat(
        name=name,
        parse=scanner.parse,
        scanner=scanner,
        example=example,
        markers=(tuple(markers),),
        call_end=end,
        syntaxes=(replace(syntax, begin=begin, end=end),),
    )


def _plain_call(head: re.Match[str], arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name=head["name"].strip(), arguments=arguments)


_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = _section_format(
    "kimi",
    opening="<|tool_call_begin|>",
    section=_KIMI_SECTION,
    read=SectionReader(
        r"\s*(?P<id>(?:functions\.|(?P<call>call-))?(?P<name>[^\s<|:]+?)(?(call)-\d+|(?::\d+)?))\s*"
        r"<\|tool_call_argument_begin\|>",
        re.escape("<|tool_call_end|>"),
        lambda head, arguments: ToolCall(name=head["name"], arguments=arguments, id=head["id"]),
        ("<|tool_call_end|>", "<|tool_call_begin|>", *_KIMI_SECTION),
    ),
    example=(
        "<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"KEY": VALUE}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    markers=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    syntax=CallSyntax(  # one call, as they are numbered
        before="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
    ),
)

_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_MARKS = ("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", *_DEEPSEEK_SECTION)
DEEPSEEK_V3 = _section_format(
    "deepseek_v3",
    opening="<｜tool▁call▁begin｜>",
    section=_DEEPSEEK_SECTION,
    read=SectionReader(
        r"\s*function\s*<｜tool▁sep｜>(?P<name>[^\n<>`]+)\n\s*```(?:json)?",
        re.escape("```") + r"\s*<｜tool▁call▁end｜>",
        _plain_call,
        _DEEPSEEK_MARKS,
    ),
    example=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
        '{"KEY": VALUE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
    syntax=CallSyntax(
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
)
DEEPSEEK_V31 = _section_format(
    "deepseek_v31",
    opening="<｜tool▁call▁begin｜>",
    section=_DEEPSEEK_SECTION,
    read=SectionReader(
        r"(?P<name>[^\n<>]+)<｜tool▁sep｜>",
        re.escape("<｜tool▁call▁end｜>"),
        _plain_call,
        _DEEPSEEK_MARKS,
    ),
    example=(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY": VALUE}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    syntax=CallSyntax(
        before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", after="<｜tool▁call▁end｜>", between=""
    ),
)

_TOOL_CALLS = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}<>]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\])?"
    r"(?=\s*\{)"
)


def _with_mistral_id(call: ToolCall | str, call_id: Any) -> ToolCall | str:
    """Return the call under the id the model wrote, if templates accept it."""
    if isinstance(call, str) or not isinstance(call_id, str):
        return call
    if not _MISTRAL_ID.fullmatch(call_id):
        return call
    return replace(call, id=call_id)


def _read_mistral(text: str, opening: re.Match[str]) -> Read:
    at = skip_space(text, opening.end())
    is_list = text.startswith("[", at) and not text.startswith(_TOOL_CALLS, at)
    head = None if is_list else _MISTRAL_HEAD.match(text, at)

    if is_list:
        values, end, problem = json_at(text, at)
        if problem is None and values:
            calls = []
            for value in values:
                call_id = value.get("id") if isinstance(value, dict) else None
                calls.append(_with_mistral_id(to_call(value), call_id))
            return Read(calls, end)
        if problem is None:
            problem = f"no call after {_TOOL_CALLS}"
    elif head is not None:
        arguments, end, problem = json_at(text, head.end())
        if problem is None:
            call = ToolCall(name=head["name"], arguments=arguments)
            return Read([_with_mistral_id(call, head["id"])], end)
    else:
        end = at
        problem = f"expected a list of calls or NAME[ARGS]{{…}} after {_TOOL_CALLS}"
    return Read([problem], resume_after(text, end, None, _TOOL_CALLS))


_MISTRAL_SCANNER = Scanner(re.escape(_TOOL_CALLS), _read_mistral)
MISTRAL = ToolFormat(
    name="mistral",
    parse=_MISTRAL_SCANNER.parse,
    scanner=_MISTRAL_SCANNER,
    example='[TOOL_CALLS][{"name": "NAME", "arguments": {"KEY": VALUE}}]',
    markers=((_TOOL_CALLS,),),
    syntaxes=(
        CallSyntax(before=f"{_TOOL_CALLS}NAME[ARGS]", after="", between="", needs="[ARGS]"),
        CallSyntax(
            begin=f"{_TOOL_CALLS}[",
            before='{"name": "NAME", "arguments": ',
            after="}",
            between=", ",
            end="]",
        ),
    ),
)

_MESSAGE = "<|message|>"
_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>")
_BETWEEN_MESSAGES = re.compile(r"(?:\s*<\|(?:end|call|return)\|>)+\s*")
_START = re.compile(r"<\|start\|>(?:assistant)?")
_HEADER = re.compile(r"<\|(?:start|channel|constrain)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _parse_harmony(
    text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
) -> Reply:
    """Parse a turn of Harmony, whose reasoning is a message of its own: no prompt opens it."""
    parts: list[ReplyPart] = []
    call_count = 0
    next_message = -1
    at = 0
    while at < len(text) and call_count <= MAX_CALLS:
        separator = _BETWEEN_MESSAGES.match(text, at)
        if separator:
            at = separator.end()
            continue

        message_start = at
        start_token = _START.match(text, at)
        header_start = start_token.end() if start_token else at
        # Many headers without a message may follow each other: the next one is looked for once.
        if next_message < header_start:
            next_message = text.find(_MESSAGE, header_start)
            if next_message < 0:
                next_message = len(text)
        header_end = next_message
        end = _END.search(text, header_start)
        if header_end == len(text) or (end is not None and end.start() < header_end):
            # No message with a header: the end of one that the prompt began, or malformed text.
            at = end.start() if end else len(text)
            text_without_body = text[message_start:at]
            parts.append(_read_without_body(text_without_body, is_header=start_token is not None))
            continue

        # Text before a channel belongs to no message, unless the header names a recipient there.
        header = text[header_start:header_end]
        body_start = header_end + len(_MESSAGE)
        before_channel, channel_token, _ = header.partition("<|channel|>")
        if start_token is None and channel_token and not _RECIPIENT.search(before_channel):
            if before_channel:
                parts.append(ReplyPart(kind="text", text=before_channel))

        recipient = _RECIPIENT.search(header)
        if recipient:
            call, at = _read_harmony_call(text, body_start, recipient[1])
            message = text[message_start:at]
            if isinstance(call, str):
                parts.append(ReplyPart(kind="malformed", text=message, problem=call))
            else:
                parts.append(ReplyPart(kind="call", text=message, call=call))
            call_count += 1
            continue

        end = _END.search(text, body_start)
        at = end.start() if end else len(text)
        channel = _CHANNEL.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        kind = "reasoning" if is_reasoning else "text"
        parts.append(ReplyPart(kind=kind, text=text[body_start:at], is_closed=end is not None))
    return Reply(parts=_with_blank_lines(parts))


def _with_blank_lines(parts: Sequence[ReplyPart]) -> Iterator[ReplyPart]:
    """Yield the parts, messages of one kind with a blank line between them."""
    previous_kinds: set[str] = set()
    for part in parts:
        text = part.text
        if part.kind == "text":
            text = text.strip()
            if not text:
                continue
        if part.kind in ("text", "reasoning"):
            if part.kind in previous_kinds:
                text = "\n\n" + text
            previous_kinds.add(part.kind)
        yield replace(part, text=text)


def _read_without_body(text: str, *, is_header: bool) -> ReplyPart:
    """Return text that no message body follows as a part: plain text, or a header that was cut.

    Args:
        text: the text up to the next message.
        is_header: whether it stands where a header begins; a header says nothing.
    """
    if _RECIPIENT.search(text) and _CHANNEL.search(text):
        return ReplyPart(
            kind="malformed",
            text=text,
            problem=f"a header that names a recipient, but no {_MESSAGE}",
        )
    header = _HEADER.search(text)
    if is_header:
        text = ""
    elif header:
        text = text[: header.start()]
    return ReplyPart(kind="text", text=text)


def _read_harmony_call(text: str, at: int, recipient: str) -> tuple[ToolCall | str, int]:
    """Return the call in the message body at ``at``, or its problem, and where the call ends."""
    arguments, arguments_end = arguments_at(text, at, _END)
    end = _END.search(text, arguments_end)
    body_end = end.start() if end else len(text)
    call_end = body_end
    if end is not None and end.group() == "<|call|>":
        call_end = end.end()  # this token is part of the call
    if isinstance(arguments, str):
        return arguments, call_end
    if skip_space(text, arguments_end) < body_end:
        unexpected = text[arguments_end : arguments_end + 40]
        return f"unexpected text after the arguments: {unexpected!r}", call_end
    name = recipient.removeprefix("functions.")
    return ToolCall(name=name, arguments=arguments), call_end


HARMONY = ToolFormat(
    name="harmony",
    parse=_parse_harmony,
    example=(
        '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": VALUE}<|call|>'
    ),
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
