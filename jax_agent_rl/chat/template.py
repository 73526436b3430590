"""Chat templates: rendering, and putting a conversation into words that a given template knows.

Templates differ in what they understand. What one can do is found out once, by rendering small conversations
(:class:`Abilities`), and messages are rewritten to that (:meth:`ChatTemplate.lower`), so that nothing is lost silently:

================================  ====================================================================
the template has no               so the messages are rewritten:
================================  ====================================================================
tools section                     a section of the tool format goes into the system message
``tool`` role                     results become a user message, ``<tool_response>`` (SmolLM2, Gemma)
``tool_calls``                    calls become text of the assistant message
``system`` role                   its text goes in front of the first user message (Gemma)
two user messages in a row        they become one (Gemma, Mistral)
ids other than nine characters    ids are hashed to nine (Mistral)
================================  ====================================================================
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from jax_agent_rl.chat.formats import ToolFormat
from jax_agent_rl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

_PROBE = "anchorprobe"  # a word that no template contains and none changes
_CALL_PROBE = "callprobe"
_USER: Message = {"role": "user", "content": "Hi"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What a chat template can render.

    Attributes:
        system: a system message at the start.
        tools: a section that describes the tools.
        tool_role: tool results as messages of their own.
        call_arguments: how it wants the arguments of ``tool_calls``: as a mapping, as a JSON string (``str``), or
            None: it knows no tool calls.
        calls_with_content: an assistant message may have both text and calls.
        repeated_user: two user messages in a row.
        any_call_id: tool call ids of any form; otherwise nine letters and digits.
    """

    system: bool
    tools: bool
    tool_role: bool
    call_arguments: Literal["mapping", "str"] | None
    calls_with_content: bool
    repeated_user: bool
    any_call_id: bool


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: with a ``chat_template``.
        tool_format: how calls, results and tools are written where the template has no words for them.
        tool_prompt: ``none`` keeps tools out of the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        tool_format: ToolFormat,
        tool_prompt: Literal["template", "none"] = "template",
    ):
        self._tokenizer = tokenizer
        self._format = tool_format
        self._tool_prompt = tool_prompt

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The template's own text for messages it knows.

        Raises:
            TemplateError: it refuses them.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is a program of the model's author: anything may come out of it
            raise TemplateError(f"the chat template cannot render {_roles(messages)}: {error}") from error
        assert isinstance(text, str)
        return text

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a whole conversation with its tools and the generation prompt.

        Raises:
            TemplateError: it cannot be rendered.
        """
        if self._tool_prompt == "none":
            tools = ()
        if tools and not self.abilities.tools:
            messages, tools = _with_system_section(messages, self._format.render_tools(tools)), ()
        return self.render(self.lower(messages), generation_prompt=True, tools=tools)

    def lower(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The same messages in words this template knows; see the module's table."""
        can = self.abilities
        lowered: list[Message] = [{**message, "content": flatten_content(message.get("content"))} for message in messages]
        if any(message.get("tool_calls") or message["role"] == "tool" for message in lowered):
            lowered = [self._lower_calls(message) for message in _with_call_ids(lowered, hashed=not can.any_call_id)]
        if not can.tool_role:
            lowered = list(self._results_as_user(lowered))
        if not can.system and lowered and lowered[0]["role"] == "system":
            lowered = _fold_system(lowered)
        if not can.repeated_user:
            lowered = list(_merge_users(lowered))
        return lowered

    @cached_property
    def abilities(self) -> Abilities:
        """Found out by rendering small conversations, once."""
        call_arguments = self._call_arguments()
        return Abilities(
            system=self._shows(_PROBE, [{"role": "system", "content": _PROBE}, _USER]),
            tools=self._shows(_PROBE, [_USER], tools=[_tool(_PROBE)]),
            tool_role=self._has_tool_role(call_arguments),
            call_arguments=call_arguments,
            calls_with_content=call_arguments is not None
            and self._shows(_PROBE, [_USER, _calling(call_arguments, content=_PROBE)])
            and self._shows(_CALL_PROBE, [_USER, _calling(call_arguments, content=_PROBE)]),
            repeated_user=self._shows(_PROBE, [_USER, {"role": "user", "content": _PROBE}]),
            any_call_id=call_arguments is None
            or self._shows(_CALL_PROBE, [_USER, _calling(call_arguments, call_id="call_0123456789")]),
        )

    @cached_property
    def generation_prompt_opens_reasoning(self) -> bool:
        """The model starts inside a ``<think>`` block (DeepSeek-R1)."""
        return self.render([_USER], generation_prompt=True).rstrip().endswith("<think>")

    def _shows(self, word: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return word in self.render(messages, generation_prompt=False, tools=tools)
        except TemplateError:
            return False

    def _call_arguments(self) -> Literal["mapping", "str"] | None:
        for kind in ("mapping", "str"):
            if self._shows(_CALL_PROBE, [_USER, _calling(kind)]):
                return kind
        return None

    def _has_tool_role(self, call_arguments: Literal["mapping", "str"] | None) -> bool:
        """ChatML puts any role's name in a header. That is no support: its models never saw a ``tool`` header."""
        if not re.search(r"""['"]tool['"]""", str(self._tokenizer.chat_template)):
            return False
        result = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "call00000"}
        before: list[Message] = [{"role": "assistant", "content": "Hi"}]
        if call_arguments:
            before.append(_calling(call_arguments))
        return any(self._shows(_PROBE, [_USER, assistant, result]) for assistant in before)

    def _lower_calls(self, message: Message) -> Message:
        calls, can = message.get("tool_calls"), self.abilities
        if not calls:
            return {key: value for key, value in message.items() if key != "tool_calls"}
        if can.call_arguments is None or (message["content"] and not can.calls_with_content):
            texts = [self._format.render_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            content = "\n".join([message["content"], *texts] if message["content"] else texts)
            return {"role": message["role"], "content": content}
        if can.call_arguments == "mapping":
            return message
        return {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}

    def _results_as_user(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Neighbouring tool results become one user message."""
        results: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                results.append(self._format.render_result(message["content"]))
                continue
            if results:
                yield {"role": "user", "content": "\n".join(results)}
                results = []
            yield message
        if results:
            yield {"role": "user", "content": "\n".join(results)}


def flatten_content(content: Any) -> Any:
    """A message's content as a string: a list of OpenAI text parts is joined, None is empty. Others stay."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return "[" + ", ".join(str(message.get("role")) for message in messages) + "]"


def _tool(name: str) -> Message:
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def _calling(kind: Literal["mapping", "str"], *, content: str = "", call_id: str = "call00000") -> Message:
    arguments = {"x": "1"} if kind == "mapping" else '{"x": "1"}'
    call = {"id": call_id, "type": "function", "function": {"name": _CALL_PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_call_ids(messages: Sequence[Message], *, hashed: bool) -> Iterator[Message]:
    """Every call and every result with an id, arguments as a mapping; ids left out are matched by position."""
    made = answered = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = [_normal_call(call, _call_id(call.get("id"), made + k, hashed)) for k, call in enumerate(message["tool_calls"])]
            made += len(calls)
            answered = made - len(calls)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": _call_id(message.get("tool_call_id"), answered, hashed)}
            answered += 1
        yield message


def _call_id(given: str | None, index: int, hashed: bool) -> str:
    if given is None:
        return f"call{index:05d}"
    if not hashed or re.fullmatch("[A-Za-z0-9]{9}", given):
        return given
    return hashlib.blake2b(given.encode(), digest_size=5).hexdigest()[:9]


def _normal_call(call: Mapping[str, Any], call_id: str) -> Message:
    """A call in OpenAI's shape, its arguments a mapping if they can be read as one."""
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise TemplateError(f"the arguments of a tool call in the prompt are not JSON: {arguments:.100}") from error
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _with_system_section(messages: Sequence[Mapping[str, Any]], section: str) -> list[Mapping[str, Any]]:
    if messages and messages[0]["role"] == "system":
        content = f"{flatten_content(messages[0].get('content'))}\n\n{section}"
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": section}, *messages]


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _merge_users(messages: Sequence[Message]) -> Iterator[Message]:
    pending: Message | None = None
    for message in messages:
        if pending and message["role"] == "user":
            pending = {**pending, "content": f"{pending['content']}\n{message['content']}"}
            continue
        if pending:
            yield pending
        pending = message if message["role"] == "user" else None
        if not pending:
            yield message
    if pending:
        yield pending
