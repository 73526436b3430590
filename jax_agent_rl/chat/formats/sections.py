r"""Formats of special tokens around JSON arguments: Kimi K2, DeepSeek V3 and V3.1, Mistral, Harmony (gpt-oss).

::

    kimi          <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                  <|tool_call_end|> … <|tool_calls_section_end|>            the text before the arguments is the id;
                                                                            some models write call-NAME-0
    deepseek_v3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```
                  <｜tool▁call▁end｜> … <｜tool▁calls▁end｜>
    deepseek_v31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
                  … <｜tool▁calls▁end｜>
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]   or, since v11,
                  [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}[TOOL_CALLS] …
    harmony       <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
                  <|constrain|>json<|message|>{…}<|call|>

In Harmony a turn is a row of messages, each with a channel. ``analysis`` is reasoning, ``final``
and unaddressed ``commentary`` are content. What a header addresses is a call whatever the channel;
text that merely looks like one inside a message is not. The recipient may stand before the channel
(as the template writes it) or after it (as models write it).
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
"""What Mistral's templates accept as an id; any other is left to the codec to invent."""


class SectionReader:
    """Reads one call that begins with a special token, a head, JSON arguments and an end.

    Args:
        head: pattern of the text between the opening and the arguments, with the group ``name``.
        end: text that must follow the arguments.
        to_call: the match of the head and the arguments as a call.
        marks: tags that begin or end something else, for going on after a broken call.
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
            return self._broken(
                text, opening.end(), f"expected a tool's name after {opening.group()}"
            )
        arguments, end = arguments_at(text, head.end(), self._end)
        close = self._end.match(text, end)
        if isinstance(arguments, str):
            return self._broken(text, end, arguments)
        if close is None:
            return self._broken(
                text, end, f"unexpected text after the arguments: {text[end : end + 40]!r}"
            )
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
    noise = "|".join(map(re.escape, section))
    scanner = Scanner(re.escape(opening), read, noise=noise, announces=section[0])
    syntaxes = (replace(syntax, begin=section[0], end=section[1]),)
    return ToolFormat(
        name=name,
        parse=scanner.parse,
        scanner=scanner,
        example=example,
        markers=(tuple(markers),),
        call_end=section[1],
        syntaxes=syntaxes,
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
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"KEY":'
        " VALUE}<|tool_call_end|><|tool_calls_section_end|>"
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
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY":'
        " VALUE}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    syntax=CallSyntax(
        before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", after="<｜tool▁call▁end｜>", between=""
    ),
)

_TOOL_CALLS = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}<>]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\])?(?=\s*\{)"
)


def _with_id(call: ToolCall | str, call_id: Any) -> ToolCall | str:
    """Return the call under the id the model wrote, if templates accept it."""
    valid = isinstance(call_id, str) and _MISTRAL_ID.fullmatch(call_id)
    return replace(call, id=call_id) if valid and isinstance(call, ToolCall) else call


def _read_mistral(text: str, opening: re.Match[str]) -> Read:
    at = skip_space(text, opening.end())
    if text.startswith("[", at) and not text.startswith(_TOOL_CALLS, at):
        values, end, problem = json_at(text, at)
        if problem is None and not values:
            problem = f"no call after {_TOOL_CALLS}"
        if problem is None:
            return Read(
                [
                    _with_id(to_call(v), v.get("id") if isinstance(v, dict) else None)
                    for v in values
                ],
                end,
            )
    elif head := _MISTRAL_HEAD.match(text, at):
        value, end, problem = json_at(text, head.end())
        if problem is None:
            return Read([_with_id(ToolCall(name=head["name"], arguments=value), head["id"])], end)
    else:
        end, problem = at, f"expected a list of calls or NAME[ARGS]{{…}} after {_TOOL_CALLS}"
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
_ENDS = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>")
_ENDED = re.compile(r"(?:\s*<\|(?:end|call|return)\|>)+\s*")
_START = re.compile(r"<\|start\|>(?:assistant)?")
_HEADER = re.compile(r"<\|(?:start|channel|constrain)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _parse_harmony(
    text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
) -> Reply:
    """Parse a turn of Harmony, whose reasoning is a message of its own: no prompt opens it."""
    parts: list[ReplyPart] = []
    calls = 0
    at = 0
    while at < len(text) and calls <= MAX_CALLS:
        ended = _ENDED.match(text, at)
        if ended:
            at = ended.end()
            continue
        message_at = at
        start = _START.match(text, at)
        header_at = start.end() if start else at
        body_at = text.find(_MESSAGE, header_at)
        ends = _ENDS.search(text, header_at)
        if body_at < 0 or ends is not None and ends.start() < body_at:
            # Text without a header: the rest of a message that the prompt began, or of one without
            # a form.
            stop = ends.start() if ends else len(text)
            parts.append(_headless(text[message_at:stop], is_header=start is not None))
            at = stop
            continue
        header = text[header_at:body_at]
        body_at += len(_MESSAGE)
        channel_at = header.find("<|channel|>")
        if start is None and channel_at > 0 and not _RECIPIENT.search(header[:channel_at]):
            parts.append(ReplyPart(kind="text", text=header[:channel_at]))
        recipient = _RECIPIENT.search(header)
        if recipient:
            item, at = _read_harmony(text, body_at, recipient[1])
            written = text[message_at:at]
            if isinstance(item, str):
                parts.append(ReplyPart(kind="malformed", text=written, problem=item))
            else:
                parts.append(ReplyPart(kind="call", text=written, call=item))
            calls += 1
            continue
        ends = _ENDS.search(text, body_at)
        at = ends.start() if ends else len(text)
        channel = _CHANNEL.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        kind = "reasoning" if is_reasoning else "text"
        parts.append(ReplyPart(kind=kind, text=text[body_at:at], is_closed=ends is not None))
    return Reply(parts=_with_blank_lines(parts))


def _with_blank_lines(parts: Sequence[ReplyPart]) -> Iterator[ReplyPart]:
    """Yield the parts, messages of one kind with a blank line between them."""
    seen: set[str] = set()
    for part in parts:
        is_text = part.kind == "text"
        text = part.text.strip() if is_text else part.text
        if is_text and not text:
            continue
        if part.kind in ("text", "reasoning"):
            if part.kind in seen:
                text = "\n\n" + text
            seen.add(part.kind)
        yield replace(part, text=text)


def _headless(text: str, *, is_header: bool) -> ReplyPart:
    """Return text that no message body follows: plain text, or a header that was cut, in which nothing is said.

    Args:
        text: up to the next message.
        is_header: it stands where a header begins.
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


def _read_harmony(text: str, at: int, recipient: str) -> tuple[ToolCall | str, int]:
    """Return the call in the message body at ``at``, or its problem, and where the message ends."""
    arguments, end = arguments_at(text, at, _ENDS)
    ends = _ENDS.search(text, end)
    stop = ends.start() if ends else len(text)
    call_end = stop
    if ends is not None and ends.group() == "<|call|>":
        call_end = ends.end()  # which is of the call
    if isinstance(arguments, str):
        return arguments, call_end
    if skip_space(text, end) < stop:
        return f"unexpected text after the arguments: {text[end : end + 40]!r}", call_end
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
