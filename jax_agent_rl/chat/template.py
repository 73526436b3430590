r"""One model's chat template: messages in its shape, and the text it writes between two turns.

That text is found with an *anchor*: a short fixed conversation that ends with an assistant turn
holding a unique word. The anchor is rendered together with the new messages, and everything after
the word is the *addition*::

    user: question   assistant: WORD   tool: 42
    ──►  …WORD<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n…
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
_UNIQUE_TEXT = "PROBE5d2e81"  # no template has it, so it is found again in what a template renders

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
"""Arguments of ``apply_chat_template`` that a conversation decides, not a setting."""
MAX_KWARGS_CHARS = 4096


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return arguments for the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: they are not an object of JSON values, are too long, or would replace the
            conversation or the template.
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
    text_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    media_parts = [{"type": kind} for kind in message.get("media", ())]
    without_media = {key: value for key, value in message.items() if key != "media"}
    return without_media | {"content": [*media_parts, *text_parts]}


def _with_arguments_as_text(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
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
    * No tool calls in assistant turns: they are written into the turn's text, in the same notation.
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
        if self._tool_prompt != "template":
            tools = ()
        if tools and not self._has_tools_section:
            messages = self._with_tools_as_text(messages, tools)
            tools = ()
        shown_tools = list(tools) or None

        adapted = self.adapt(messages)
        for index, message in enumerate(adapted):
            if self._needs_parts or message.get("media"):
                adapted[index] = _in_parts(message)
        try:
            return self._apply(adapted, shown_tools, generation_prompt=generation_prompt)
        except TemplateError:
            if not any(map(_has_reasoning_text_and_calls, adapted)):
                raise

        # The template may refuse reasoning beside text: render again with both as reasoning.
        for index, message in enumerate(adapted):
            if _has_reasoning_text_and_calls(message):
                adapted[index] = _with_text_as_reasoning(message)
        return self._apply(adapted, shown_tools, generation_prompt=generation_prompt)

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
            roles = [message["role"] for message in messages]
            raise TemplateError(
                f"the chat template refuses a conversation of roles {roles}: {error}"
            ) from error

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Whether the template reads content in parts only.

        Raises:
            TemplateError: it leaves out content in parts as well.
        """
        question = {"role": "user", "content": _UNIQUE_TEXT}
        with suppress(TemplateError):  # a template may refuse text, or a question alone
            if _UNIQUE_TEXT in self._apply([question]):
                return False
        if _UNIQUE_TEXT in self._apply([_in_parts(question)]):
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
        adapted: list[Message] = []
        for message in messages:
            message = _with_reasoning_under_all_names(message)
            if message.get("tool_calls"):
                message = self._adapt_calls(message)
            adapted.append(message)
        if self._has_tool_role:
            return adapted
        return self._results_as_user_messages(adapted)

    def _adapt_calls(self, message: Message) -> Message:
        if self._call_form == "none":
            return self._with_calls_as_text(message)
        if self._call_form == "text":
            return _with_arguments_as_text(message)
        return message

    def _results_as_user_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with adjacent tool results joined into one user message."""
        adapted: list[Message] = []
        joins_previous = False
        for message in messages:
            if message["role"] != "tool":
                adapted.append(message)
                joins_previous = False
                continue

            text = self._format.tool_result(message["content"])
            media = list(message.get("media", ()))
            if joins_previous:
                previous = adapted.pop()
                text = f"{previous['content']}\n{text}"
                media = [*previous.get("media", ()), *media]
            user_message: Message = {"role": "user", "content": text}
            if media:
                user_message["media"] = media
            adapted.append(user_message)
            joins_previous = True
        return adapted

    @functools.cached_property
    def _call_form(self) -> Literal["object", "text", "none"]:
        """How the template takes the arguments of earlier calls; ``none``: it leaves calls out.

        Found by rendering a call in both forms. Most templates write an object, as JSON or in a
        notation of their own; one that concatenates text fails with an object, and one that prints
        it writes Python's notation.
        """
        if not self._mentions_tool_calls:
            return "none"
        leaves_out_calls = False
        for form in ("object", "text"):
            call = _calling_message([_RESULT], _UNIQUE_TEXT)
            if form == "text":
                call = _with_arguments_as_text(call)
            for conversation in ([ASKED, call, _RESULT], [ASKED, call]):
                try:
                    text = self._apply(conversation, generation_prompt=False)
                except TemplateError:
                    continue
                if _UNIQUE_TEXT not in text:
                    leaves_out_calls = True
                elif f"'{_UNIQUE_TEXT}'" not in text:  # which would be Python's notation
                    return form
        return "none" if leaves_out_calls else "object"

    def shows(self, kind: str) -> bool:
        """Return whether the template can show an ``image`` or a ``video`` in a tool result.

        Tested by rendering: the template must write a special token for it, keep the text and not
        print the message's parts.
        """
        question = {"role": "user", "content": "q"}
        answer = {"role": "assistant", "content": "a"}
        result = {
            "role": "tool",
            "content": _UNIQUE_TEXT,
            "name": "f",
            "tool_call_id": "0" * CALL_ID_LENGTH,
        }
        result_with_media = {**result, "media": [kind]}
        try:
            plain = self.render([question, answer, result], (), generation_prompt=False)
            text = self.render([question, answer, result_with_media], (), generation_prompt=False)
        except TemplateError:
            return False

        keeps_text = text.count(_UNIQUE_TEXT) == 1
        prints_parts = "'type'" in text or '"type"' in text
        if not keeps_text or prints_parts:
            return False
        tokens = filter(None, self._tokenizer.get_added_vocab())
        return any(text.count(token) > plain.count(token) for token in tokens)

    def _with_calls_as_text(self, message: Message) -> Message:
        """Return a message with its calls in its text, in the notation of the tool-call format."""
        write = self._format.write
        if write is None:
            raise TemplateError(
                "the chat template shows no tool calls of earlier turns, and agent.tool_format="
                f"{self._format.name} cannot write them as text; set it to hermes or text_tag"
            )
        texts = [message["content"]] if message["content"] else []
        for call in message["tool_calls"]:
            function = call["function"]
            texts.append(write(function["name"], function["arguments"]))
        without_calls = {key: value for key, value in message.items() if key != "tool_calls"}
        return without_calls | {"content": "\n".join(texts)}

    def _with_tools_as_text(
        self, messages: Sequence[Message], tools: Sequence[Mapping]
    ) -> list[Message]:
        """Return messages whose system message, or first user message, describes the tools."""
        section = self._format.system_section(tools)
        messages = list(messages)
        if messages and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{section}"}
            return messages

        with_system = [{"role": "system", "content": section}, *messages]
        with suppress(TemplateError):  # raised by a template that has no system role
            self.render(with_system, (), generation_prompt=False)
            return with_system

        index = next(i for i, message in enumerate(messages) if message["role"] == "user")
        question = messages[index]["content"]
        text = f"{section}\n\n"
        if isinstance(question, str):
            content = text + question
        else:
            content = [{"type": "text", "text": text}, *question]
        messages[index] = {**messages[index], "content": content}
        return messages


def _with_reasoning_under_all_names(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    return {**message, **dict.fromkeys(REASONING_FIELDS, reasoning)}


def _has_reasoning_text_and_calls(message: Message) -> bool:
    return bool(
        message.get("tool_calls") and message.get("reasoning_content") and message.get("content")
    )


def _with_text_as_reasoning(message: Message) -> Message:
    reasoning = f"{message['reasoning_content']}\n\n{message['content']}"
    return {**message, "content": "", **dict.fromkeys(REASONING_FIELDS, reasoning)}


CALL_ID_LENGTH = 9  # Mistral's templates demand so many letters and digits
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
        self._known_anchors: dict[tuple[str, ...], int] = {}  # by the roles that follow a turn

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
        roles = tuple(message["role"] for message in messages)
        word = unused_word("anchor", messages, tools)
        anchors = ((self._plain_anchor, messages), (self._calling_anchor, with_call_ids))

        # An anchor that worked for these roles goes first, and is not checked again.
        known = self._known_anchors.get(roles)
        order = [0, 1] if known != 1 else [1, 0]
        problems = []
        for index in order:
            anchor, following = anchors[index]
            try:
                if index != known:
                    _require_all_messages(anchor, following, tools, word)
                addition = anchor(following, tools, word)
            except TemplateError as error:
                problems.append(str(error))
                continue
            self._known_anchors[roles] = index
            return addition
        raise TemplateError("; ".join(problems))

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Ids that the template ends a turn with, whatever follows it."""
        question = [{"role": "user", "content": _WORD}]
        answer = [ASKED, {"role": "assistant", "content": _WORD}]
        call = [ASKED, _calling_message([_RESULT], _WORD)]
        ids = {
            self._common_end(question, [*question, _ANSWER]),
            self._common_end(answer, [*answer, ASKED]),
            self._common_end(call, [*call, _RESULT], before_another=True),
        }
        return frozenset(token for token in ids if token is not None)

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
        """The text between a question and the assistant's turn; "" if the template refuses one."""
        try:
            return self.addition([ASKED], [ASKED]).rpartition(ASKED["content"])[2]
        except TemplateError:
            return ""

    @functools.cached_property
    def header(self) -> str:
        """The part of the generation prompt that opens the assistant's turn; "" if unknown.

        It has no think block.
        """
        prompt = self.generation_prompt
        for opening, _ in ALL_THINK_TAGS:
            prompt = prompt.partition(opening)[0]
        tokens = list(self._control.all(prompt))
        return prompt[tokens[-1].start() :] if tokens else prompt

    @functools.cached_property
    def think_tag(self) -> str:
        """The opening tag of a think block that the generation prompt leaves open; or "".

        Every turn then begins in the block.
        """
        prompt = self.generation_prompt
        if not ends_thinking(prompt):
            return ""
        return max((opening for opening, _ in ALL_THINK_TAGS), key=prompt.rfind)

    def thinking(self, template: str) -> Thinking | None:
        """Return the reasoning that a turn begins with, or may begin with; None: there is none.

        Args:
            template: the source of the template.
        """
        for tags in ALL_THINK_TAGS:
            if tags[0] == self.think_tag:
                return Thinking(tags=tags, opened=True)
        for tags in ALL_THINK_TAGS:
            opening, closing = tags
            if opening in template and closing not in self.generation_prompt:
                return Thinking(tags=tags)
        return None

    def _common_end(
        self, last: Sequence[Message], followed: Sequence[Message], *, before_another: bool = False
    ) -> int | None:
        """Return the control token after :data:`_WORD` if it is the same in both conversations.

        Args:
            last: a conversation that ends with the word.
            followed: the same conversation, continued.
            before_another: whether the word stands in a call. The token then counts only if another
                control token follows at once, or nothing: after a call Gemma 4 opens the result
                with the same token whether or not there is a result yet.
        """
        tokens = []
        for messages in (last, followed):
            try:
                text = self._template.render(messages, (), generation_prompt=False)
            except TemplateError:
                return None
            _, word, addition = text.rpartition(_WORD)
            if before_another:
                addition = self._after_call(addition)
            token = self._control.first(addition)
            if not word or token is None:
                return None

            following_text = addition[token.end() :].lstrip()
            if before_another and following_text:
                following_token = self._control.first(following_text)
                if following_token is None or following_token.start() > 0:
                    return None
            tokens.append(token.group())
        return self._control.ids[tokens[0]] if tokens[0] == tokens[1] else None

    def _plain_anchor(
        self, messages: Sequence[Message], tools: Sequence[Mapping], word: str
    ) -> str:
        """Return the text after an assistant turn without calls."""
        anchor = [ASKED, {"role": "assistant", "content": word}]
        text = self._template.render([*anchor, *messages], tools, generation_prompt=True)
        if text.count(word) != 1:
            raise TemplateError("the chat template does not write an assistant turn exactly once")
        return text.partition(word)[2]

    def _calling_anchor(
        self, messages: Sequence[Message], tools: Sequence[Mapping], word: str
    ) -> str:
        """Return the text after an assistant turn with calls.

        For templates that require such a turn before a tool result.
        """
        results = [message for message in messages if message["role"] == "tool"]
        anchor = [ASKED, _calling_message(results or [_RESULT], word)]
        text = self._template.render([*anchor, *messages], tools, generation_prompt=True)

        following_text = self._after_call(text.rpartition(word)[2]) if word in text else ""
        turn_end = self._control.first(following_text)
        if turn_end is None:
            raise TemplateError(
                "the chat template does not mark the end of an assistant turn that calls a tool"
            )
        return following_text[turn_end.start() :]

    def _after_call(self, text: str) -> str:
        """Skip the text that closes a call.

        The model writes it itself, unlike the end of the turn.
        """
        if not self._call_end or self._call_end not in text:
            return text
        return text.partition(self._call_end)[2]


def _calling_message(results: Sequence[Message], word: str) -> dict[str, Any]:
    """Return an assistant message with the calls that these results answer."""
    calls = []
    for result in results:
        function = {"name": result.get("name", "f"), "arguments": {"a": word}}
        calls.append({"id": result["tool_call_id"], "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _require_all_messages(
    anchor: Anchor, messages: Sequence[Message], tools: Sequence[Mapping], word: str
) -> None:
    """Check with unique contents that an anchor makes the template write every message.

    Raises:
        TemplateError: a message is left out, as some templates do with a tool result without a
            call.
    """
    stem = unused_word("kept", messages, tools)
    numbered: list[Message] = []
    for index, message in enumerate(messages):
        numbered.append({**message, "content": f"{stem}{index}"})
    text = anchor(numbered, tools, word)
    for message in numbered:
        if message["content"] not in text:
            raise TemplateError(
                f"the chat template leaves out a message of role {message['role']!r}"
            )
