"""The chat codec: messages to ids and back, such that sampled ids never change.

The first prompt is rendered and tokenized as a whole. After that nothing is ever rendered again::

    context = prompt_ids
    context = context + sampled_ids + encode_append(sampled_ids, new messages)

After an assistant turn comes what the template writes there (``template``): the end of the turn
unless the model wrote it, any text behind it (Qwen's newline), the new messages, the next
generation prompt. Contents of messages are text, whatever they look like (``special_tokens``).
Every message that is encoded is normalized first (``messages``), and every sampled turn is read by
:meth:`ChatCodec.parse_reply`.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats import detect_format, get_format
from jax_agent_rl.chat.formats.base import Message
from jax_agent_rl.chat.grammar import CallSyntax, GrammarCompiler, GrammarError, TurnGrammar
from jax_agent_rl.chat.growing import GrowingReply
from jax_agent_rl.chat.markup import Ids, TemplateMarkup, markup_between
from jax_agent_rl.chat.messages import normalize_messages
from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.chat.special_tokens import ControlTokens, MediaTokens, unused_word
from jax_agent_rl.chat.template import (
    ASKED,
    CALL_ID_LENGTH,
    ChatTemplate,
    ToolPrompt,
    TurnBoundary,
    check_template_kwargs,
)
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS, THINK_TAGS, ends_thinking, think_blocks
from jax_agent_rl.errors import ConfigError, ModelError, TemplateError
from jax_agent_rl.models.image_processor import Pixels
from jax_agent_rl.tools.base import Side, truncate_text
from jax_agent_rl.tools.schema import convert_arguments
from jax_agent_rl.types import digest_ids
from jax_agent_rl.utils.hub import model_folder, read_pretrained, require_model_file

MAX_VARIANTS = 32
"""Number of variants of a codec that are cached, since requests may name any template arguments."""
_TAIL_IDS = 256  # the beginning of a turn mostly lies in this many last ids of its context


class ChatCodec:
    """Encodes messages and decodes replies; see the module docstring.

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written (``agent.tool_format``). ``auto`` finds it in the
            chat template; if the template has none that is known, only agents without tools run.
        tool_prompt: how prompts describe tools (``agent.tool_prompt``).
        eos_token_ids: ids that end a generation; None: the tokenizer's EOS.
        media: how many ids an image or a video takes; None: one.
        template_kwargs: further arguments of the chat template, such as ``enable_thinking``
            (``agent.chat_template_kwargs``).

    Attributes:
        tokenizer: as given.
        control: the tokenizer's control tokens.
        template: renders conversations.
        boundary: what the template writes after an assistant turn.

    Raises:
        ConfigError: the tool format is unknown, or the template cannot be given these arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_format: str = "hermes",
        tool_prompt: ToolPrompt = "template",
        eos_token_ids: Sequence[int] | None = None,
        media: MediaTokens | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template; choose an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self._unknown_format: ConfigError | None = None
        if tool_format == "auto":
            try:
                self._format = detect_format(str(tokenizer.chat_template))
            except ConfigError as error:
                # Raised when tools are used; agents without tools can be run with any format.
                self._unknown_format = error
                self._format = get_format("hermes")
        else:
            self._format = get_format(tool_format)

        if eos_token_ids is None:
            eos_token_ids = [tokenizer.eos_token_id]
        self.eos_token_ids = tuple(eos_token_ids)
        self.control = ControlTokens(tokenizer)
        self._tool_prompt: ToolPrompt = tool_prompt
        self._media = media
        self._modalities: frozenset[str] | None = None
        self._variants: OrderedDict[str, ChatCodec] = OrderedDict()

        # Holds one compiler once it is used. It is a list so that variants, which are shallow
        # copies, share the compiler.
        self._grammar_compilers: list[GrammarCompiler] = []
        try:
            self._use_template(check_template_kwargs(template_kwargs or {}))
        except ValueError as error:
            raise ConfigError(f"agent.chat_template_kwargs {error}") from None

    def _use_template(self, kwargs: Mapping[str, Any]) -> None:
        self._template_kwargs = dict(kwargs)
        self.template = ChatTemplate(self.tokenizer, self._format, self._tool_prompt, kwargs)
        self.boundary = TurnBoundary(self.template, self.control, call_end=self._format.call_end)

    def with_template_kwargs(self, kwargs: Mapping[str, Any] | None) -> ChatCodec:
        """Return a codec that also gives these arguments to the chat template.

        Raises:
            ValueError: the template cannot be given them, see :func:`check_template_kwargs`.
        """
        if not kwargs:
            return self
        merged = {**self._template_kwargs, **check_template_kwargs(kwargs)}
        key = json.dumps(merged, sort_keys=True)
        variant = self._variants.pop(key, None)
        if variant is None:
            variant = copy.copy(self)
            variant.__dict__.pop("_turns", None)  # a cached property that depends on the template
            variant._modalities = None
            variant._use_template(merged)
        self._variants[key] = variant
        if len(self._variants) > MAX_VARIANTS:
            self._variants.popitem(last=False)
        return variant

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        tool_format: str = "hermes",
        tool_prompt: ToolPrompt = "template",
        pixels: Pixels | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatCodec:
        """Load the codec of a Hugging Face model folder; for the other arguments see the class.

        Args:
            path: the folder, or a model's name on the Hub.
            pixels: the bounds ``model.min_pixels`` and ``max_pixels`` to which images and frames
                are scaled before their ids are counted.

        Raises:
            ModelError: tokenizer files are missing or unreadable.
        """
        from transformers import AutoTokenizer

        folder = model_folder(path)
        require_model_file(folder, "tokenizer.json")
        try:
            tokenizer = read_pretrained(AutoTokenizer, folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"the tokenizer at {folder} cannot be read: {error}") from error
        return cls(
            tokenizer,
            tool_format=tool_format,
            tool_prompt=tool_prompt,
            eos_token_ids=_eos_ids(folder, tokenizer),
            media=MediaTokens.read(folder, pixels=pixels),
            template_kwargs=template_kwargs,
        )

    # --- messages to ids --------------------------------------------------------------------------

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_last: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation up to and including the generation prompt.

        Text of control tokens in messages and tools (``<|im_end|>`` in a user's question) is
        tokenized as plain text.

        Args:
            tools: schemas that the template shows.
            continue_last: whether the last message is the beginning of the turn to be sampled, see
                :meth:`encode_prefill`.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        if continue_last:
            prompt_ids = self.encode_prompt(messages[:-1], tools)
            return prompt_ids + self.encode_prefill(messages[-1], tools)

        messages, tools, mark = self._mark(messages, tools)
        text = self.template.render(messages, tools, generation_prompt=True)
        return self.control.encode_rendered(text, mark)

    def encode_prefill(
        self, message: Message, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of the beginning of an assistant turn, which the model is to continue.

        They follow the generation prompt, and are the ids of :meth:`encode_turn` up to the end of
        the message's text, without the white space behind it.

        Raises:
            TemplateError: as :meth:`encode_turn`; or the message calls tools, or the template
                rewrites its text.
        """
        (message,) = normalize_messages([message])
        content = message["content"]
        if message.get("tool_calls") or not isinstance(content, str):
            raise TemplateError(
                "only an assistant's text can be continued; leave out calls and images"
            )
        try:
            return self._prefill_ids(message, tools)
        except TemplateError:
            split_message = _split_reasoning(message)
            if split_message is None:
                raise
            return self._prefill_ids(split_message, tools)

    def _prefill_ids(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        content = message["content"].rstrip()
        turn_text, mark = self._render_turn(message, tools)
        if not content:
            return []

        marked_message = self.control.mark_message({"role": "assistant", "content": content}, mark)
        marked_content = marked_message["content"]
        start = turn_text.rfind(marked_content)
        if start < 0:
            raise TemplateError(
                f"the chat template rewrites the text to be continued: {content[-80:]!r}"
            )
        return self.control.encode_rendered(turn_text[: start + len(marked_content)], mark)

    def encode_turn(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of an assistant message as the model would have sampled them.

        The last one is the id that ends the turn. Where the generation prompt opens a think block,
        the turn begins with ``reasoning_content`` and closes the block. A template that ends a turn
        by opening the next message (GLM's) gives no id for the end; :meth:`encode_append` does.

        Args:
            message: with ``content``, ``tool_calls``, or what else the template shows of it.
            tools: as in :meth:`encode_prompt`.

        Raises:
            TemplateError: the template refuses the message, or writes a turn otherwise than it asks
                for one.
        """
        text, mark = self._render_turn(message, tools)
        ids = self.control.encode_rendered(text, mark)
        end_ids = {*self.eos_token_ids, *self.boundary.ends}
        for index, token in enumerate(ids):
            if token in end_ids:
                return ids[: index + 1]
        return ids

    def _render_turn(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Return what the template writes of an assistant message after the generation prompt.

        Also return the mark that breaks the control tokens in it.
        """
        (message,), tools, mark = self._mark([message], tools)
        prompt = self.template.render([ASKED], tools, generation_prompt=True)
        text = self.template.render([ASKED, message], tools, generation_prompt=False)
        if text.startswith(prompt):
            return text.removeprefix(prompt), mark

        # The generation prompt may begin a think block, or give an empty one, which the template
        # leaves out of a message.
        for opening, closing in ALL_THINK_TAGS:
            header, found_opening, block = prompt.rpartition(opening)
            if not found_opening or not text.startswith(header):
                continue
            turn = text.removeprefix(header)
            if closing in block:
                return turn, mark
            if turn.startswith(opening):
                return turn.removeprefix(opening), mark
            reasoning = message.get("reasoning_content") or ""
            return f"{reasoning}{closing}\n\n{turn}", mark
        raise TemplateError(
            f"the chat template writes an assistant turn as {text[-80:]!r}, which does not begin as"
            f" its generation prompt ends: {prompt[-40:]!r}"
        )

    def encode_append(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the ids to insert after a sampled turn.

        They are the boundary of the turn, the new messages, and the next generation prompt. Text of
        control tokens in the new messages is tokenized as plain text, as in :meth:`encode_prompt`.
        An end of turn that the model wrote itself is not written again, even if it differs from the
        template's.

        Args:
            sampled_ids: the assistant turn. If it does not end with an end-of-turn id (it was cut),
                one is inserted.
            messages: ``tool`` or ``user`` messages. For templates that show which call a result
                answers, a ``tool`` message without a ``tool_call_id`` gets an id. A message with
                ``media`` (kinds of images and videos, in order) shows them before its text, each as
                one placeholder of the template.
            tools: as in :meth:`encode_prompt`; templates may refer to them.

        Raises:
            TemplateError: the template refuses the messages after an assistant turn.
        """
        messages, tools, mark = self._mark(messages, tools)
        addition = self.boundary.addition(messages, _with_call_ids(messages, sampled_ids), tools)
        ids = self.control.encode_rendered(addition, mark)
        sampled_end = sampled_ids[-1] if sampled_ids else None
        if sampled_end not in self.eos_token_ids or not ids:
            return ids

        # An end that opens the next message is followed by the end of the turn, if there is one.
        boundary = self.boundary
        ends_again = ids[0] in boundary.ends and sampled_end not in boundary.openings
        if ids[0] == sampled_end or ends_again:
            return ids[1:]
        return ids

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        """Return whether ids made by :meth:`encode_append` take the place of the last sampled id.

        They do when the model stopped at a token that opens another message than the one which
        follows, as GLM does with ``<|observation|>`` before a user's turn: if it stayed, it would
        make an observation of what the user says.
        """
        if len(sampled_ids) < 2 or not appended_ids:
            return False
        sampled_end = sampled_ids[-1]
        boundary = self.boundary
        if sampled_end not in self.eos_token_ids or sampled_end not in boundary.openings:
            return False
        return appended_ids[0] in boundary.openings | boundary.ends

    def append_markup(self) -> TemplateMarkup:
        """Return what the template writes around messages that are inserted after a turn."""
        turn = self.encode_text("y")
        openings = set()
        separators = set()
        closings = set()
        for role in ("tool", "user"):
            for end in ([], *([token] for token in self.eos_token_ids)):
                sampled_ids = [*turn, *end]
                try:
                    opening, closing = self._markup_around(role, sampled_ids)
                except TemplateError:
                    continue
                openings.add(opening)
                closings.add(closing)

                try:
                    separator = self._markup_between(role, sampled_ids)
                except TemplateError:  # it takes one message of the role after a turn
                    continue
                # A short one of text alone, such as a line break, may be in an observation.
                has_control_token = any(token in self.control for token in separator)
                if has_control_token or len(separator) > 3:
                    separators.add(separator)

        return TemplateMarkup(
            control_ids=frozenset(self.control.ids.values()),
            openings=frozenset(openings),
            separators=frozenset(separators),
            closings=frozenset(closings),
        )

    def _markup_around(self, role: str, sampled_ids: Sequence[int]) -> tuple[Ids, Ids]:
        """Return the ids before and behind the text of a message after a turn."""
        # Two texts without a common character at either end.
        seven = self.encode_append(sampled_ids, [{"role": role, "content": "7"}])
        x = self.encode_append(sampled_ids, [{"role": role, "content": "x"}])
        return markup_between(seven, x)

    def _markup_between(self, role: str, sampled_ids: Sequence[int]) -> Ids:
        """Return the ids between the texts of two messages after a turn."""
        opening, closing = self._markup_around(role, sampled_ids)
        seven = {"role": role, "content": "7"}
        x = {"role": role, "content": "x"}
        text_length = len(self.encode_append(sampled_ids, [seven])) - len(opening) - len(closing)
        up_to_second_text, _ = markup_between(
            self.encode_append(sampled_ids, [seven, seven]),
            self.encode_append(sampled_ids, [seven, x]),
        )
        return up_to_second_text[len(opening) + text_length :]

    def insert_message(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        """Return a prompt with one more user message before its generation prompt.

        None if the template refuses two user messages in a row, or the prompt does not end as it
        ends one after a user message.
        """
        try:
            opening, closing = self._user_markup
        except TemplateError:
            return None
        prompt = tuple(prompt_ids)
        if not closing or prompt[-len(closing) :] != closing:
            return None
        return [*prompt[: -len(closing)], *opening, *self.encode_text(text), *closing]

    @functools.cached_property
    def _user_markup(self) -> tuple[Ids, Ids]:
        """What the template writes around a user message after another one."""
        turn = self.encode_text("y")  # without an end, which the template writes then
        self._markup_between("user", turn)
        return self._markup_around("user", turn)

    def expand_media(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Repeat each media placeholder as often as the model reads it for its item.

        Args:
            ids: with one placeholder for each item.
            media: items by kind, in the order of their placeholders.

        Raises:
            TemplateError: an item cannot be shown, or the numbers of placeholders and items differ.
        """
        if not self._media or not media:
            return list(ids)
        return self._media.expand(ids, media)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text; control tokens are neither added nor recognised."""
        return self.control.encode_text(text)

    def truncate(self, text: str, limit: int, side: Side) -> str:
        """Return text within so many ids; see :func:`~jax_agent_rl.tools.base.truncate_text`."""
        return truncate_text(text, limit, side, encode=self.encode_text, decode=self.decode)

    def encode_markup(self, text: str) -> list[int]:
        """Return the ids of text whose control tokens are recognised; none is added.

        For configured separators and prompts rendered elsewhere, never for data.
        """
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _mark(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]], str]:
        """Normalize messages, and break the control tokens in them and in tools.

        Returns:
            The messages, the tools, and the mark that stands within each broken control token.

        Raises:
            ConfigError: there are tools, but the tool-call format is unknown.
            TemplateError: a message is not valid.
        """
        self._require_format(tools)
        messages = normalize_messages(messages)
        mark = unused_word("mark", messages, tools)
        marked_messages: list[Message] = []
        for message in messages:
            marked_messages.append(self.control.mark_message(message, mark))
        marked_tools = self.control.mark(list(tools), mark)
        return marked_messages, marked_tools, mark

    def _require_format(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and self._unknown_format:
            raise self._unknown_format

    # --- ids to text ------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with white space unchanged."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media (``image``, ``video``) that the template can show in a tool result."""
        if self._modalities is None:
            kinds = filter(self.template.shows, ("image", "video"))
            self._modalities = frozenset(kinds)
        return self._modalities

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @functools.cached_property
    def longest_token(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def tool_format(self) -> str:
        """Name of the tool-call format; ``unknown`` if only agents without tools can be run."""
        return "unknown" if self._unknown_format else self._format.name

    def parse_reply(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        context_ids: Sequence[int] | None = None,
    ) -> Reply:
        """Parse a sampled assistant turn into reasoning, text and calls, in order.

        Special tokens are left out of text and reasoning; a call keeps them as it was written.

        Args:
            tools: schemas of the tools it may call, by which arguments are converted.
            context_ids: the ids the turn was sampled after, which may have opened a think block.
                None: a prompt that ends with the template's generation prompt.
        """
        self._require_format(tools)
        if context_ids is not None:
            thinking = bool(self.thinking_after(context_ids))
        else:
            thinking = True if self.boundary.think_tag else None
        ids = self._without_end(sampled_ids)
        text = self.decode(ids, skip_special_tokens=False)
        reply = self._format.parse(text, tools, thinking=thinking)

        if not self._special_ids.isdisjoint(ids):
            reply = reply.with_text(self.without_special_tokens)
        if tools and reply.tool_calls:
            reply = reply.with_calls(functools.partial(_convert_arguments, tools))
        return reply

    def growing_reply(self, context_ids: Sequence[int]) -> GrowingReply:
        """Return a reader for a turn without tools that reads while the turn is sampled."""
        thinking = bool(self.thinking_after(context_ids))
        if self._format.scanner is not None:
            scan = self._format.scanner.start(thinking=thinking)
        else:
            scan = functools.partial(self._format.parse, thinking=thinking)
        return GrowingReply(
            functools.partial(self.decode, skip_special_tokens=False),
            scan,
            end_ids=self.eos_token_ids,
            special_ids=self._special_ids,
            without_special_tokens=self.without_special_tokens,
        )

    def thinking_after(self, context_ids: Sequence[int]) -> str:
        """Return the opening tag of the think block in which a turn after a context begins.

        It is empty if the turn begins outside of one.
        """
        header = self.boundary.header
        tail = self.decode(context_ids[-_TAIL_IDS:], skip_special_tokens=False)
        if header and header not in tail and len(context_ids) > _TAIL_IDS:
            # The turn to be continued is long, so its header is further in front.
            tail = self.decode(context_ids, skip_special_tokens=False)

        if not header or header not in tail:  # the prompt was rendered elsewhere
            tail = tail.rstrip()
            for opening in _THINK_OPENINGS:
                if tail.endswith(opening):
                    return opening
            return ""

        turn_beginning = tail.rpartition(header)[2]
        if not ends_thinking(turn_beginning, thinking=False):
            return ""
        return max(_THINK_OPENINGS, key=turn_beginning.rfind)

    def turn_text(self, sampled_ids: Sequence[int], context_ids: Sequence[int]) -> str:
        """Return a sampled turn as text for people, reward functions and reports.

        It is the decoded text, with reasoning always between think tags. Their opening tag is added
        where the prompt opened the block, and both where the model marks reasoning with special
        tokens (Harmony's channels, ``[THINK]``), which decoding leaves out.
        """
        sampled_ids = self._without_end(sampled_ids)
        if not self._marks_thinking_specially:
            return self.thinking_after(context_ids) + self.decode(sampled_ids)

        opening, closing = THINK_TAGS
        texts: list[str] = []
        for part in self.parse_reply(sampled_ids, context_ids=context_ids).parts:
            if part.kind != "reasoning":
                texts.append(self.without_special_tokens(part.text))
            elif part.is_closed:
                texts.append(opening + part.text + closing)
            else:
                texts.append(opening + part.text)
        return "".join(texts)

    def without_special_tokens(self, text: str) -> str:
        """Return text without the special tokens that are written out in it."""
        return self._special.sub("", text)

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Pattern of the tokens that decoding leaves out."""
        tokens = sorted(self.tokenizer.all_special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @functools.cached_property
    def _marks_thinking_specially(self) -> bool:
        """Whether decoding leaves out what tells reasoning from text."""
        if self._format.name == "harmony":
            return True
        special_tokens = set(self.tokenizer.all_special_tokens)
        return any(not special_tokens.isdisjoint(tags) for tags in ALL_THINK_TAGS)

    def _without_end(self, sampled_ids: Sequence[int]) -> list[int]:
        ids = list(sampled_ids)
        while ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return ids

    # --- grammars ---------------------------------------------------------------------------------

    def turn_grammar(
        self, *, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, answer: Any = None
    ) -> str:
        """Return the checked grammar of a turn: calls of tools, an answer in JSON, or either.

        Args:
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.
            answer: JSON schema of an answer; None: calls only.

        Raises:
            GrammarError: there is no grammar for the tool-call format, or a schema is wrong; the
                message says which part.
        """
        syntax = self.call_syntax
        if tools and syntax is None:
            raise GrammarError(
                f"there is no grammar of calls in the format {self.tool_format!r}; leave it out, or"
                " let the server run with agent.tool_format=hermes"
            )
        grammar = self._turns.turn(syntax=syntax, tools=tools, several=several, answer=answer)
        self.grammars.start(grammar)
        return grammar

    def free_turn_grammar(self, *, tools: Sequence[Mapping[str, Any]], several: bool = True) -> str:
        """Return the checked grammar of a turn of any text, in which calls fit these schemas.

        Args:
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.

        Raises:
            GrammarError: there is no grammar for the tool-call format, or a schema is wrong; the
                message says which part.
        """
        if self.call_syntax is None:
            raise GrammarError(f"there is no grammar of calls in the format {self.tool_format!r}")
        grammar = self._turns.free_turn(syntax=self.call_syntax, tools=tools, several=several)
        self.grammars.start(grammar)
        return grammar

    @property
    def call_syntax(self) -> CallSyntax | None:
        """The first syntax of the tool-call format whose tokens the tokenizer has.

        None if the format is unknown or has no such syntax.
        """
        if self._unknown_format:
            return None
        for syntax in self._format.syntaxes:
            if not syntax.needs or syntax.needs in self.control.ids:
                return syntax
        return None

    @functools.cached_property
    def _turns(self) -> TurnGrammar:
        thinking = self.boundary.thinking(str(self.tokenizer.chat_template))
        return TurnGrammar(self.control.ids, is_special=self.grammars.is_special, thinking=thinking)

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler that checks grammars of turns."""
        if not self._grammar_compilers:
            self._grammar_compilers.append(
                GrammarCompiler(self.tokenizer, eos_ids=self.eos_token_ids)
            )
        return self._grammar_compilers[0]

    def grammar_compiler(self, *, eos_ids: Sequence[int], vocab_size: int) -> GrammarCompiler:
        """Return a compiler of grammars for a model.

        Args:
            eos_ids: ids that end an output of the model.
            vocab_size: number of ids for which the model has logits.
        """
        return GrammarCompiler(self.tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)


_THINK_OPENINGS = tuple(opening for opening, _ in ALL_THINK_TAGS)


def _split_reasoning(message: Message) -> Message | None:
    """Return a message with the think block at its beginning as its reasoning.

    Templates that know reasoning (Qwen3's) write such a block in a form of their own. None if the
    text does not begin with a closed think block, or ends with it.
    """
    content = message["content"]
    blocks = think_blocks(content, thinking=False)
    if not blocks or blocks[0].start > 0 or not blocks[0].is_closed:
        return None
    answer = content[blocks[0].end :].lstrip()
    if not answer:
        return None
    return {**message, "content": answer, "reasoning_content": blocks[0].text.strip()}


def _convert_arguments(tools: Sequence[Mapping[str, Any]], call: ToolCall) -> ToolCall:
    """Return a call with its arguments converted by the schema of its tool, if it is known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == call.name:
            parameters = function.get("parameters") or {}
            return replace(call, arguments=convert_arguments(parameters, call.arguments))
    return call


def _with_call_ids(messages: Sequence[Message], sampled_ids: Sequence[int]) -> list[Message]:
    """Give an id to tool results that have none.

    Ids differ within a turn and, derived from the sampled ids, between turns.
    """
    with_ids = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = digest_ids([*sampled_ids, index])[:CALL_ID_LENGTH]
            message = {"tool_call_id": call_id, **message}
        with_ids.append(message)
    return with_ids


def _eos_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the EOS ids of the generation config, else the model config, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue

        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(
                f"{file} is not valid JSON ({error}); download the model again"
            ) from None

        eos_ids = content.get("eos_token_id") if isinstance(content, dict) else None
        if eos_ids is not None:
            return list(eos_ids) if isinstance(eos_ids, list) else [eos_ids]

    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{folder} names no eos_token_id, so no turn would ever end; add it to"
            " generation_config.json"
        )
    return [tokenizer.eos_token_id]
