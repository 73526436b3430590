r"""One model's chat template: messages in the shape it accepts, and the text it writes between two turns.

That text is found with an *anchor*: a short fixed conversation that ends with an assistant turn
holding a unique word. The anchor is rendered together with the new messages, and everything after
the word is the addition::

    user: question   assistant: WORD   tool: 42   ──►   …WORD<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n…
                                                             └─ the addition, from the end of the turn on

Whatever a template rewrites before the word (strips ``<think>``, injects dates) does not affect the
addition. It begins with a control token that either *ends* the turn, as ``<|im_end|>`` always does,
or *opens* the next message, as GLM's ``<|user|>`` and ``<|observation|>`` do, which its models also
stop at.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from jax_agent_rl.chat.formats.base import Message, ToolFormat
from jax_agent_rl.chat.grammar import Thinking
from jax_agent_rl.chat.messages import REASONING_FIELDS
from jax_agent_rl.chat.special_tokens import ControlTokens, unused_word
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS, ends_thinking
from jax_agent_rl.errors import TemplateError

ToolPrompt = Literal["template", "none"]
_PROBE = "PROBE5d2e81"

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of ``apply_chat_template`` that are not the template's own: a conversation decides
them, not a setting."""
MAX_KWARGS_CHARS = 4096


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return arguments for the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: they are no object of JSON values, too long, or would replace the conversation
            or the template.
    """
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(
            f"must be an object of arguments for the chat template, got {kwargs!r:.120}"
        )
    try:
        size = len(json.dumps(kwargs, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"must hold JSON values only: {error}") from None
    if size > MAX_KWARGS_CHARS:
        raise ValueError(f"has {size} characters as JSON, at most {MAX_KWARGS_CHARS} are read")
    reserved = sorted(RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise ValueError(f"{reserved[0]!r} cannot be set here: it is decided by the conversation")
    return dict(kwargs)


def _in_parts(message: Message) -> Message:
    """Return a message with its content in parts, as multi-modal templates take it."""
    content = message.get("content") or ""
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": kind} for kind in message.get("media", ())), *text]
    return {key: value for key, value in message.items() if key != "media"} | {"content": parts}


def _with_arguments_as_text(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


class ChatTemplate:
    """Renders conversations, bridging what a template lacks.

    * No ``tool`` role: tool results become user messages in the tool-call format's own notation.
    * A message with ``media`` (kinds of images and videos it shows) gets its content in parts:
      these, then the text. So does every message where the template reads parts alone (SmolVLM,
      Idefics3).
    * No tool calls in assistant turns: they are written into the turn's text, in that notation too.
    * No section for tools: the format's description goes into the system message (or the first user
      message).
    * Arguments of calls are objects; a template that concatenates them as text (DeepSeek V3) gets
      JSON.
    * Reasoning has three names (``REASONING_FIELDS``); each template finds it under its own. One
      that refuses reasoning beside text in a turn with calls (gpt-oss) gets both as reasoning.

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written.
        tool_prompt: ``none`` leaves tools out of the prompt.
        kwargs: further arguments of the template, see :func:`check_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_format: ToolFormat,
        tool_prompt: ToolPrompt,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = tool_format
        self._tool_prompt = tool_prompt
        self._kwargs = dict(kwargs or {})
        source = str(tokenizer.chat_template)
        self._has_tool_role = "'tool'" in source or '"tool"' in source or "tool_response" in source
        self._has_tools_section = "tools" in source
        self._mentions_tool_calls = "tool_calls" in source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping], *, generation_prompt: bool
    ) -> str:
        """Return the conversation as text.

        Raises:
            TemplateError: the template refuses it.
        """
        tools = tools if self._tool_prompt == "template" else ()
        if tools and not self._has_tools_section:
            messages, tools = self._with_tools_as_text(messages, tools), ()
        adapted = [
            _in_parts(m) if self._needs_parts or m.get("media") else m for m in self.adapt(messages)
        ]
        try:
            return self._apply(adapted, list(tools) or None, generation_prompt=generation_prompt)
        except TemplateError:
            if not any(_reasons_and_speaks_before_a_call(message) for message in adapted):
                raise
        adapted = [
            _with_text_as_reasoning(m) if _reasons_and_speaks_before_a_call(m) else m
            for m in adapted
        ]
        return self._apply(adapted, list(tools) or None, generation_prompt=generation_prompt)

    def _apply(
        self,
        messages: Sequence[Message],
        tools: list[Mapping] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Apply the template to messages unchanged."""
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [m["role"] for m in messages]
            raise TemplateError(
                f"the chat template refuses a conversation of roles {roles}: {error}"
            ) from error

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Return whether the template reads content in parts only.

        Raises:
            TemplateError: it leaves out content in parts, too.
        """
        asked = {"role": "user", "content": _PROBE}
        with suppress(TemplateError):  # wants other roles, too, or parts
            if _PROBE in self._apply([asked]):
                return False
        if _PROBE in self._apply([_in_parts(asked)]):
            return True
        raise TemplateError(
            "the chat template leaves out what a user says; choose another model or repair its"
            " template"
        )

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the roles and fields the template supports.

        Without tool calls in the template they become text; without a ``tool`` role, adjacent
        results become one user message.
        """
        messages = [_with_reasoning_under_all_names(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            if self._call_form == "none":
                messages = [
                    self._with_calls_as_text(m) if m.get("tool_calls") else m for m in messages
                ]
            elif self._call_form == "text":
                messages = [
                    _with_arguments_as_text(m) if m.get("tool_calls") else m for m in messages
                ]
        if self._has_tool_role:
            return list(messages)
        adapted: list[Message] = []
        joining = False
        for message in messages:
            if message["role"] != "tool":
                adapted.append(message)
                joining = False
                continue
            text, media = (
                self._format.tool_result(message["content"]),
                list(message.get("media", ())),
            )
            if joining:
                before = adapted.pop()
                text, media = f"{before['content']}\n{text}", [*before.get("media", ()), *media]
            adapted.append({"role": "user", "content": text} | ({"media": media} if media else {}))
            joining = True
        return adapted

    @functools.cached_property
    def _call_form(self) -> Literal["object", "text", "none"]:
        """How the template takes the arguments of earlier calls; ``none``: it leaves such calls out.

        Found by rendering a call in both forms. Most templates write an object, as JSON or in a
        notation of their own; one that concatenates text fails with an object, and one that prints
        it writes Python's notation.
        """
        if not self._mentions_tool_calls:
            return "none"
        leaves_out = False
        for form in ("object", "text"):
            call = _calling_message([_RESULT], _PROBE)
            if form == "text":
                call = _with_arguments_as_text(call)
            for conversation in ([ASKED, call, _RESULT], [ASKED, call]):
                try:
                    text = self._apply(conversation, generation_prompt=False)
                except TemplateError:
                    continue
                if _PROBE in text and f"'{_PROBE}'" not in text:
                    return form
                leaves_out = leaves_out or _PROBE not in text
        return "none" if leaves_out else "object"

    def shows(self, kind: str) -> bool:
        """Return whether the template can show an ``image`` or a ``video`` in a tool result.

        Tested by rendering: it must write a special token for it, keep the text and not print the
            message's parts.
        """
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        result = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "0" * 9}
        try:
            plain = self.render([question, answer, result], (), generation_prompt=False)
            shown = self.render(
                [question, answer, {**result, "media": [kind]}], (), generation_prompt=False
            )
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
        calls = [
            write(call["function"]["name"], call["function"]["arguments"])
            for call in message["tool_calls"]
        ]
        text = "\n".join([message["content"], *calls] if message["content"] else calls)
        return {key: value for key, value in message.items() if key != "tool_calls"} | {
            "content": text
        }

    def _with_tools_as_text(
        self, messages: Sequence[Message], tools: Sequence[Mapping]
    ) -> list[Message]:
        section = self._format.system_section(tools)
        messages = list(messages)
        if messages and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{section}"}
            return messages
        with_system = [{"role": "system", "content": section}, *messages]
        with suppress(TemplateError):
            self.render(with_system, (), generation_prompt=False)
            return with_system
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        asked = messages[first]["content"]
        text = f"{section}\n\n"
        shown = text + asked if isinstance(asked, str) else [{"type": "text", "text": text}, *asked]
        messages[first] = {**messages[first], "content": shown}
        return messages


def _with_reasoning_under_all_names(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    return {**message, **dict.fromkeys(REASONING_FIELDS, reasoning)}


def _reasons_and_speaks_before_a_call(message: Message) -> bool:
    return bool(
        message.get("tool_calls") and message.get("reasoning_content") and message.get("content")
    )


def _with_text_as_reasoning(message: Message) -> Message:
    reasoning = f"{message['reasoning_content']}\n\n{message['content']}"
    return {**message, "content": "", **dict.fromkeys(REASONING_FIELDS, reasoning)}


CALL_ID_LENGTH = 9  # of letters and digits, as Mistral's templates demand
ASKED = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": "answer"}
_RESULT = {"role": "tool", "content": "result", "name": "f", "tool_call_id": "0" * CALL_ID_LENGTH}
_WORD = unused_word("anchor", ASKED, _ANSWER, _RESULT)

Anchor = Callable[[Sequence[Message], Sequence[Mapping], str], str]
"""From messages, tools and the word to the text that follows an assistant turn."""


class TurnBoundary:
    """The additions of one template.

    Args:
        template: renders conversations.
        control: the tokenizer's control tokens.
        call_end: text that closes the last call of a turn, see ``ToolFormat``.
    """

    def __init__(self, template: ChatTemplate, control: ControlTokens, *, call_end: str) -> None:
        self._template = template
        self._control = control
        self._call_end = call_end
        self._anchor_of: dict[tuple[str, ...], int] = {}

    def addition(
        self,
        messages: Sequence[Message],
        with_call_ids: Sequence[Message],
        tools: Sequence[Mapping] = (),
    ) -> str:
        """Return the text after an assistant turn, beginning with the end of that turn.

        Args:
            messages: what follows the turn.
            with_call_ids: the same, every ``tool`` message with a ``tool_call_id``.
            tools: schemas; templates may refer to them.

        Raises:
            TemplateError: the template refuses the messages, or leaves one out.
        """
        key = tuple(message["role"] for message in messages)
        word = unused_word("anchor", messages, tools)
        anchors = ((self._plain_anchor, messages), (self._calling_anchor, with_call_ids))
        known = self._anchor_of.get(key)
        problems = []
        for number in sorted(
            range(len(anchors)), key=lambda number: number != known
        ):  # the known one first
            anchor, following = anchors[number]
            try:
                if number != known:
                    _check_keeps(anchor, following, tools, word)
                addition = anchor(following, tools, word)
            except TemplateError as error:
                problems.append(str(error))
                continue
            self._anchor_of[key] = number
            return addition
        raise TemplateError("; ".join(problems))

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Ids that the template ends a turn with, whatever follows it."""
        asked, said = {"role": "user", "content": _WORD}, {"role": "assistant", "content": _WORD}
        pairs = [([asked], [asked, _ANSWER]), ([ASKED, said], [ASKED, said, ASKED])]
        calling = [ASKED, _calling_message([_RESULT], _WORD)]
        ids = [self._common_end(last, followed) for last, followed in pairs]
        ids.append(self._common_end(calling, [*calling, _RESULT], before_another=True))
        return frozenset(i for i in ids if i is not None)

    @functools.cached_property
    def openings(self) -> frozenset[int]:
        """Ids that the template writes right after an assistant turn to open the next message."""
        ids = set()
        for message in (ASKED, _RESULT):
            try:
                addition = self.addition([message], [message])
            except TemplateError:
                continue
            token = self._control.first(addition)
            if token and not addition[: token.start()].strip():
                ids.add(self._control.ids[token.group()])
        return frozenset(ids - self.ends)

    @functools.cached_property
    def generation_prompt(self) -> str:
        """What the template writes between a question and the assistant's turn; "" if it refuses one."""
        try:
            return self.addition([ASKED], [ASKED]).rpartition(ASKED["content"])[2]
        except TemplateError:
            return ""

    @functools.cached_property
    def header(self) -> str:
        """The part of the generation prompt that opens the assistant's turn, without a think block; "" if unknown."""
        prompt = self.generation_prompt
        for begin, _ in ALL_THINK_TAGS:
            prompt = prompt.partition(begin)[0]
        tokens = list(self._control.all(prompt))
        return prompt[tokens[-1].start() :] if tokens else prompt

    @functools.cached_property
    def think_tag(self) -> str:
        """The tag of a think block that the generation prompt leaves open, in which every turn then begins; or ""."""
        prompt = self.generation_prompt
        return (
            max((begin for begin, _ in ALL_THINK_TAGS), key=prompt.rfind)
            if ends_thinking(prompt)
            else ""
        )

    def thinking(self, template: str) -> Thinking | None:
        """Return the reasoning that a turn begins with, or may begin with; ``template`` is the template's source."""
        if self.think_tag:
            return Thinking(
                tags=next(tags for tags in ALL_THINK_TAGS if tags[0] == self.think_tag), opened=True
            )
        shown = (
            tags
            for tags in ALL_THINK_TAGS
            if tags[0] in template and tags[1] not in self.generation_prompt
        )
        tags = next(shown, None)
        return Thinking(tags=tags) if tags else None

    def _common_end(
        self, last: Sequence[Message], followed: Sequence[Message], *, before_another: bool = False
    ) -> int | None:
        """Return the control token after :data:`_WORD` if it is the same in both conversations.

        Args:
            last: a conversation that ends with the word.
            followed: the same conversation, continued.
            before_another: count it only if another control token follows at once: after a call
                Gemma 4 opens the result with the same token whether or not there is one yet.
        """
        found = []
        for messages in (last, followed):
            try:
                _, written, text = self._template.render(
                    messages, (), generation_prompt=False
                ).rpartition(_WORD)
            except TemplateError:
                return None
            token = self._control.first(self._after_call(text) if before_another else text)
            if not written or token is None:
                return None
            rest = token.string[token.end() :].lstrip()
            if (
                before_another
                and rest
                and not ((following := self._control.first(rest)) and following.start() == 0)
            ):
                return None
            found.append(token.group())
        return self._control.ids[found[0]] if found[0] == found[1] else None

    def _plain_anchor(
        self, messages: Sequence[Message], tools: Sequence[Mapping], word: str
    ) -> str:
        """Return the text after an assistant turn without calls."""
        anchor = [ASKED, {"role": "assistant", "content": word}]
        before, found, after = self._template.render(
            [*anchor, *messages], tools, generation_prompt=True
        ).rpartition(word)
        if not found or word in before:
            raise TemplateError("the chat template does not write an assistant turn exactly once")
        return after

    def _calling_anchor(
        self, messages: Sequence[Message], tools: Sequence[Mapping], word: str
    ) -> str:
        """Return the text after an assistant turn with calls, for templates that require one before a tool result."""
        results = [message for message in messages if message["role"] == "tool"]
        anchor = [ASKED, _calling_message(results or [_RESULT], word)]
        text = self._template.render([*anchor, *messages], tools, generation_prompt=True)
        rest = self._after_call(text[text.rindex(word) :] if word in text else "")
        if (end := self._control.first(rest)) is None:
            raise TemplateError(
                "the chat template does not mark the end of an assistant turn that calls a tool"
            )
        return rest[end.start() :]

    def _after_call(self, rest: str) -> str:
        """Skip the text that closes a call, which the model writes itself, unlike the end of the turn."""
        if (end := self._call_end) and end in rest:
            return rest[rest.index(end) + len(end) :]
        return rest


def _calling_message(results: Sequence[Message], word: str) -> dict[str, Any]:
    """Return an assistant message with the calls that these results answer."""
    calls = [
        {
            "id": result["tool_call_id"],
            "type": "function",
            "function": {"name": result.get("name", "f"), "arguments": {"a": word}},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _check_keeps(
    anchor: Anchor, messages: Sequence[Message], tools: Sequence[Mapping], word: str
) -> None:
    """Check with marked contents that an anchor makes the template write every message.

    Raises:
        TemplateError: a message is left out, as some templates do with a tool result without a
            call.
    """
    kept = unused_word("kept", messages, tools)
    marked = [{**message, "content": f"{kept}{index}"} for index, message in enumerate(messages)]
    text = anchor(marked, tools, word)
    for message in marked:
        if message["content"] not in text:
            raise TemplateError(
                f"the chat template leaves out a message of role {message['role']!r}"
            )
