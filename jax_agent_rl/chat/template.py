"""One model's chat template: its features, and messages in the shape it accepts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax_agent_rl.chat.formats import ToolFormat
from jax_agent_rl.errors import TemplateError

Message = Mapping[str, Any]
ToolPrompt = Literal["template", "none"]


_PROBE = "PROBE5d2e81"


def _in_parts(message: Message) -> Message:
    """Return a message with its content in parts, as multi-modal templates take it."""
    content = message.get("content") or ""
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": kind} for kind in message.get("media", ())), *text]
    return {key: value for key, value in message.items() if key != "media"} | {"content": parts}


class ChatTemplate:
    """Renders conversations, bridging what a template lacks.

    * No ``tool`` role: tool results become user messages in the tool-call format's own notation.
    * A message with ``media`` (kinds of images and videos it shows) gets its content in parts: these, then the text.
      So does every message where the template reads parts alone (SmolVLM, Idefics3).
    * No tool calls in assistant turns: they are written into the turn's text, in that notation too.
    * No section for tools: the format's description goes into the system message (or the first user message).

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written.
        tool_prompt: ``none`` leaves tools out of the prompt.
    """

    def __init__(self, tokenizer: Any, tool_format: ToolFormat, tool_prompt: ToolPrompt) -> None:
        self._tokenizer = tokenizer
        self._format = tool_format
        self._tool_prompt = tool_prompt
        source = str(tokenizer.chat_template)
        self._has_tool_role = "'tool'" in source or '"tool"' in source or "tool_response" in source
        self._has_tools_section = "tools" in source
        self._has_tool_calls = "tool_calls" in source

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping], *, generation_prompt: bool) -> str:
        """Return the conversation as text.

        Raises:
            TemplateError: the template refuses it.
        """
        tools = tools if self._tool_prompt == "template" else ()
        if tools and not self._has_tools_section:
            messages, tools = self._with_tools_as_text(messages, tools), ()
        adapted = [_in_parts(m) if self._needs_parts or m.get("media") else m for m in self.adapt(messages)]
        return self._apply(adapted, list(tools) or None, generation_prompt=generation_prompt)

    def _apply(
        self, messages: Sequence[Message], tools: list[Mapping] | None = None, *, generation_prompt: bool = True
    ) -> str:
        """Apply the template to messages unchanged."""
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generation_prompt, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [m["role"] for m in messages]
            raise TemplateError(f"the chat template refuses a conversation of roles {roles}: {error}") from error

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Return whether the template reads content in parts only.

        Raises:
            TemplateError: it leaves out content in parts, too.
        """
        asked = {"role": "user", "content": _PROBE}
        try:
            if _PROBE in self._apply([asked]):
                return False
        except TemplateError:  # wants other roles, too, or parts
            pass
        if _PROBE in self._apply([_in_parts(asked)]):
            return True
        raise TemplateError(
            "the chat template leaves out what a user says; choose another model or repair its template"
        )

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the roles and fields the template supports.

        Without tool calls in the template they become text; without a ``tool`` role, adjacent results become one user
        message.
        """
        if not self._has_tool_calls:
            messages = [self._with_calls_as_text(m) if m.get("tool_calls") else m for m in messages]
        if self._has_tool_role:
            return list(messages)
        adapted: list[Message] = []
        joining = False
        for message in messages:
            if message["role"] != "tool":
                adapted.append(message)
                joining = False
                continue
            text, media = self._format.tool_result(message["content"]), list(message.get("media", ()))
            if joining:
                before = adapted.pop()
                text, media = f"{before['content']}\n{text}", [*before.get("media", ()), *media]
            adapted.append({"role": "user", "content": text} | ({"media": media} if media else {}))
            joining = True
        return adapted

    def shows(self, kind: str) -> bool:
        """Return whether the template can show an ``image`` or a ``video`` in a tool result.

        Tested by rendering: it must write a special token for it, keep the text and not print the message's parts.
        """
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        result = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "0" * 9}
        try:
            plain = self.render([question, answer, result], (), generation_prompt=False)
            shown = self.render([question, answer, {**result, "media": [kind]}], (), generation_prompt=False)
        except TemplateError:
            return False
        special = self._tokenizer.get_added_vocab()
        more = any(shown.count(token) > plain.count(token) for token in special if token)
        return more and shown.count(_PROBE) == 1 and "'type'" not in shown and '"type"' not in shown

    def _with_calls_as_text(self, message: Message) -> Message:
        if (write := self._format.write) is None:
            raise TemplateError(
                "the chat template shows no tool calls of earlier turns, and agent.tool_format="
                f"{self._format.name} cannot write them as text; set it to hermes or text_tag"
            )
        calls = [write(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        text = "\n".join([message["content"], *calls] if message["content"] else calls)
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}

    def _with_tools_as_text(self, messages: Sequence[Message], tools: Sequence[Mapping]) -> list[Message]:
        section = self._format.system_section(tools)
        messages = list(messages)
        if messages and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{section}"}
            return messages
        with_system = [{"role": "system", "content": section}, *messages]
        if self._accepts(with_system):
            return with_system
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        asked = messages[first]["content"]
        text = f"{section}\n\n"
        shown = text + asked if isinstance(asked, str) else [{"type": "text", "text": text}, *asked]
        messages[first] = {**messages[first], "content": shown}
        return messages

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self.render(messages, (), generation_prompt=False)
        except TemplateError:
            return False
        return True
