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
from jax_agent_rl.tools.schema import convert_arguments
from jax_agent_rl.types import digest_ids
from jax_agent_rl.utils.hub import model_folder, read_pretrained, require_model_file

MAX_VARIANTS = 32
"""Variants of a codec with other arguments for the template that are kept: requests may name any.
"""
_TAIL_IDS = 256  # last ids of a context in which the beginning of a turn mostly lies


class ChatCodec:
    """Encodes messages and decodes replies; see the module docstring.

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written, ``agent.tool_format``; ``auto`` finds it in the
            chat template. If that is of an unknown format, only agents without tools can be run.
        tool_prompt: ``agent.tool_prompt``.
        eos_token_ids: ids that end a generation; default the tokenizer's EOS.
        media: how many ids an image or a video takes; None: one.
        template_kwargs: further arguments of the chat template, such as ``enable_thinking``
            (``agent.chat_template_kwargs``).

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
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        self._no_format: ConfigError | None = None
        try:
            self._format = (
                detect_format(template) if tool_format == "auto" else get_format(tool_format)
            )
        except ConfigError as error:
            if tool_format != "auto":
                raise
            self._no_format, self._format = error, get_format("hermes")
        self.eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else [tokenizer.eos_token_id]
        )
        self._control = ControlTokens(tokenizer)
        self._tool_prompt: ToolPrompt = tool_prompt
        self._media = media
        self._modalities: frozenset[str] | None = None
        self._variants: OrderedDict[str, ChatCodec] = OrderedDict()
        self._grammar_compilers: list[
            GrammarCompiler
        ] = []  # one, made when it is first used, of all variants
        try:
            self._use_template(check_template_kwargs(template_kwargs or {}))
        except ValueError as error:
            raise ConfigError(f"agent.chat_template_kwargs {error}") from None

    def _use_template(self, kwargs: Mapping[str, Any]) -> None:
        self._template_kwargs = dict(kwargs)
        self._template = ChatTemplate(self._tokenizer, self._format, self._tool_prompt, kwargs)
        self._boundary = TurnBoundary(self._template, self._control, call_end=self._format.call_end)

    def with_template_kwargs(self, kwargs: Mapping[str, Any] | None) -> ChatCodec:
        """Return a codec of the same tokenizer that gives these arguments to the chat template, besides its own.

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
            variant.__dict__.pop("_turns", None)  # which is of the template
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
        """Load the codec of a Hugging Face model folder.

        Args:
            path: the folder, or a model's name on the hub.
            tool_format: see the class.
            tool_prompt: see the class.
            pixels: ``model.min_pixels`` and ``max_pixels``; images and frames are counted as scaled
                to so many.
            template_kwargs: see the class.

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
            messages: the conversation.
            tools: schemas that the template shows.
            continue_last: the last message is the beginning of the turn to be sampled
                (:meth:`encode_prefill`).

        Raises:
            TemplateError: the template refuses the conversation.
        """
        if continue_last:
            return self.encode_prompt(messages[:-1], tools) + self.encode_prefill(
                messages[-1], tools
            )
        messages, tools, mark = self._marked(messages, tools)
        return self._control.encode_rendered(
            self._template.render(messages, tools, generation_prompt=True), mark
        )

    def encode_prefill(
        self, message: Message, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of an assistant message that the model is to continue, for after the generation prompt.

        They are those of :meth:`encode_turn` up to the end of the message's text, without white
        space behind it.

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
            apart = _with_reasoning_apart(message)
            if apart is None:
                raise
            return self._prefill_ids(apart, tools)

    def _prefill_ids(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        said = message["content"].rstrip()
        text, mark = self._turn_text(message, tools)
        marked = self._control.mark_message({"role": "assistant", "content": said}, mark)["content"]
        end = text.rfind(marked)
        if said and end < 0:
            raise TemplateError(
                f"the chat template rewrites the text to be continued: {said[-80:]!r}"
            )
        return self._control.encode_rendered(text[: end + len(marked)], mark) if said else []

    def encode_turn(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of an assistant message as the model would have sampled them, with the id that ends its turn.

        Where the generation prompt opens a think block, the turn begins with ``reasoning_content``
        and closes it. A template that ends a turn by opening the next message (GLM's) gives no id
        for that; :meth:`encode_append` does.

        Args:
            message: with ``content``, ``tool_calls``, or what else the template shows of it.
            tools: as in :meth:`encode_prompt`.

        Raises:
            TemplateError: the template refuses the message, or writes a turn otherwise than it asks
                for one.
        """
        text, mark = self._turn_text(message, tools)
        ids = self._control.encode_rendered(text, mark)
        ends = {*self.eos_token_ids, *self._boundary.ends}
        last = next((number for number, token in enumerate(ids) if token in ends), None)
        return ids if last is None else ids[: last + 1]

    def _turn_text(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Return what the template writes of an assistant message after the generation prompt, and the mark in it."""
        (message,), tools, mark = self._marked([message], tools)
        begin = self._template.render([ASKED], tools, generation_prompt=True)
        text = self._template.render([ASKED, message], tools, generation_prompt=False)
        if text.startswith(begin):
            return text.removeprefix(begin), mark
        for tags in ALL_THINK_TAGS:
            header, tag, block = begin.rpartition(tags[0])
            if not tag or not text.startswith(header):
                continue
            # The generation prompt begins a think block, or gives an empty one, which the template
            # leaves out here.
            said = text.removeprefix(header)
            if tags[1] in block:
                return said, mark
            if said.startswith(tag):
                return said.removeprefix(tag), mark
            return f"{message.get('reasoning_content') or ''}{tags[1]}\n\n{said}", mark
        raise TemplateError(
            f"the chat template writes an assistant turn as {text[-80:]!r}, which does not begin as"
            f" its generation prompt ends: {begin[-40:]!r}"
        )

    def encode_append(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the ids to insert after a sampled turn: its boundary, new messages, the next generation prompt.

        Text of control tokens in the new messages is tokenized as plain text, as in
        :meth:`encode_prompt`. An end of turn that the model wrote itself is not written again, be
        it another one than the template's.

        Args:
            sampled_ids: the assistant turn. If it does not end with an end-of-turn id (it was cut),
                one is inserted.
            messages: ``tool`` or ``user`` messages. For templates that show which call a result
                answers, a ``tool`` message without a ``tool_call_id`` is given one of its own. One
                with ``media`` (kinds of images and videos, in order) shows these before its text,
                each as one placeholder of the template's.
            tools: as in :meth:`encode_prompt`; templates may refer to them.

        Raises:
            TemplateError: the template refuses the messages after an assistant turn.
        """
        messages, tools, mark = self._marked(messages, tools)
        addition = self._boundary.addition(messages, _with_call_ids(messages, sampled_ids), tools)
        ids = self._control.encode_rendered(addition, mark)
        end = sampled_ids[-1] if sampled_ids else None
        if end not in self.eos_token_ids or not ids:
            return ids
        written_twice = ids[0] == end or (
            ids[0] in self._boundary.ends and end not in self._boundary.openings
        )
        return ids[1:] if written_twice else ids

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        """Return whether ids made by :meth:`encode_append` take the place of the last sampled one.

        They do when the model stopped at a token that opens another message than the one which
        follows, as GLM does with ``<|observation|>`` before a user's turn: left there, it would
        make an observation of what the user says.
        """
        if len(sampled_ids) < 2 or sampled_ids[-1] not in self.eos_token_ids or not appended_ids:
            return False
        boundary = self._boundary
        return (
            sampled_ids[-1] in boundary.openings
            and appended_ids[0] in boundary.openings | boundary.ends
        )

    def expand_media(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Repeat each media placeholder as often as the model reads it for its item; items are in their order.

        Raises:
            TemplateError: an item cannot be shown, or the numbers of placeholders and items differ.
        """
        return self._media.expand(ids, media) if self._media and media else list(ids)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text; control tokens are neither added nor recognised."""
        return self._control.encode_text(text)

    def encode_markup(self, text: str) -> list[int]:
        """Return the ids of text whose control tokens are recognised; none is added.

        For configured separators and prompts rendered elsewhere, never for data.
        """
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]], str]:
        """Return normal messages and tools without whole control tokens, and the mark that breaks those.

        Raises:
            ConfigError: there are tools, but the tool-call format is unknown.
            TemplateError: a message is none.
        """
        self._require_format(tools)
        messages = normalize_messages(messages)
        mark = unused_word("mark", messages, tools)
        marked: list[Message] = [self._control.mark_message(message, mark) for message in messages]
        return marked, self._control.mark(list(tools), mark), mark

    def _require_format(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and self._no_format:
            raise self._no_format

    # --- ids to text ------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with white space unchanged."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media (``image``, ``video``) that the chat template can show in a tool result."""
        if self._modalities is None:
            self._modalities = frozenset(
                kind for kind in ("image", "video") if self._template.shows(kind)
            )
        return self._modalities

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._tokenizer.get_vocab().values())

    @functools.cached_property
    def longest_token(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def tool_format(self) -> str:
        """Name of the tool-call format; ``unknown`` if only agents without tools can be run."""
        return "unknown" if self._no_format else self._format.name

    def parse_reply(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        context_ids: Sequence[int] | None = None,
    ) -> Reply:
        """Parse a sampled assistant turn into reasoning, text and calls, in order.

        Special tokens are no part of text and reasoning; they are of what is written of calls.

        Args:
            sampled_ids: the turn.
            tools: schemas of the tools it may call, by which arguments are converted.
            context_ids: what it was sampled after, which may have opened a think block; None: a
                prompt that ends with the template's own generation prompt.
        """
        self._require_format(tools)
        thinking = bool(self._boundary.think_tag) or None
        if context_ids is not None:
            thinking = bool(self.thinking_after(context_ids))
        ids = self._without_end(sampled_ids)
        text = self.decode(ids, skip_special_tokens=False)
        reply = self._format.parse(text, tools, thinking=thinking)
        if not self._special_ids.isdisjoint(ids):
            reply = reply.with_text(self.without_special_tokens)
        return (
            reply.with_calls(functools.partial(_typed, tools))
            if tools and reply.tool_calls
            else reply
        )

    def growing_reply(self, context_ids: Sequence[int]) -> GrowingReply:
        """Return the reader of a turn without tools that is sampled after a context, for while it is."""
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
        """Return the opening tag of the think block in which a turn begins after a context; "" if it begins in none."""
        header = self._boundary.header
        tail = self.decode(context_ids[-_TAIL_IDS:], skip_special_tokens=False)
        if (
            header and header not in tail and len(context_ids) > _TAIL_IDS
        ):  # the text to be continued is long
            tail = self.decode(context_ids, skip_special_tokens=False)
        if not header or header not in tail:  # a prompt that was rendered elsewhere
            tail = tail.rstrip()
            return next((tag for tag in _THINK_OPENINGS if tail.endswith(tag)), "")
        begun = tail.rpartition(header)[2]
        if not ends_thinking(begun, thinking=False):
            return ""
        return max(_THINK_OPENINGS, key=begun.rfind)

    def turn_text(self, sampled_ids: Sequence[int], context_ids: Sequence[int]) -> str:
        """Return a sampled turn as text for people, reward functions and reports.

        It is what was decoded, and its reasoning always stands between think tags: a block that the
        prompt opened begins with its tag, and so does reasoning that the model marks with special
        tokens (Harmony's channels, ``[THINK]``), which decoding leaves out.
        """
        sampled_ids = self._without_end(sampled_ids)
        opened = self.thinking_after(context_ids)
        text = self.decode(sampled_ids)
        if not self._marks_thinking_specially:
            return opened + text
        parts: list[str] = []
        for part in self.parse_reply(sampled_ids, context_ids=context_ids).parts:
            if part.kind == "reasoning":
                parts.append(THINK_TAGS[0] + part.text + (THINK_TAGS[1] if part.is_closed else ""))
            else:
                parts.append(self.without_special_tokens(part.text))
        return "".join(parts)

    def without_special_tokens(self, text: str) -> str:
        """Return text in which special tokens were written out, without these."""
        return self._special.sub("", text)

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Pattern of the tokens that decoding leaves out."""
        tokens = sorted(self._tokenizer.all_special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @functools.cached_property
    def _marks_thinking_specially(self) -> bool:
        """Whether decoding leaves out what tells reasoning from text."""
        special = set(self._tokenizer.all_special_tokens)
        tags = {tag for tags in ALL_THINK_TAGS for tag in tags}
        return self._format.name == "harmony" or not tags.isdisjoint(special)

    def _without_end(self, sampled_ids: Sequence[int]) -> list[int]:
        ids = list(sampled_ids)
        while ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return ids

    # --- grammars ---------------------------------------------------------------------------------

    def turn_grammar(
        self, *, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, answer: Any = None
    ) -> str:
        """Return the checked grammar of a turn: calls of tools, or an answer in JSON, whichever are given.

        Args:
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.
            answer: JSON schema of an answer.

        Raises:
            GrammarError: there is none for the tool-call format, or a schema is wrong; says which
                part.
        """
        syntax = self._call_syntax
        if tools and syntax is None:
            raise GrammarError(
                f"there is no grammar of calls in the format {self.tool_format!r}; leave it out, or"
                " let the server run with agent.tool_format=hermes"
            )
        grammar = self._turns.turn(syntax=syntax, tools=tools, several=several, answer=answer)
        self._grammars.start(grammar)
        return grammar

    def free_turn_grammar(self, *, tools: Sequence[Mapping[str, Any]], several: bool = True) -> str:
        """Return the checked grammar of a turn of any text, with one call or ``several`` that fit these schemas.

        Raises:
            GrammarError: there is none for the tool-call format, or a schema is wrong; says which
                part.
        """
        if self._call_syntax is None:
            raise GrammarError(f"there is no grammar of calls in the format {self.tool_format!r}")
        grammar = self._turns.free_turn(syntax=self._call_syntax, tools=tools, several=several)
        self._grammars.start(grammar)
        return grammar

    @property
    def _call_syntax(self) -> CallSyntax | None:
        fits = (s for s in self._format.syntaxes if not s.needs or s.needs in self._control.ids)
        return None if self._no_format else next(fits, None)

    @functools.cached_property
    def _turns(self) -> TurnGrammar:
        thinking = self._boundary.thinking(str(self._tokenizer.chat_template))
        return TurnGrammar(
            self._control.ids, is_special=self._grammars.is_special, thinking=thinking
        )

    @property
    def _grammars(self) -> GrammarCompiler:
        if not self._grammar_compilers:
            self._grammar_compilers.append(
                GrammarCompiler(self._tokenizer, eos_ids=self.eos_token_ids)
            )
        return self._grammar_compilers[0]

    def grammar_compiler(self, *, eos_ids: Sequence[int], vocab_size: int) -> GrammarCompiler:
        """Return a compiler of grammars for a model of ``vocab_size`` ids, whose outputs end with ``eos_ids``."""
        return GrammarCompiler(self._tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)


_THINK_OPENINGS = tuple(opening for opening, _ in ALL_THINK_TAGS)


def _with_reasoning_apart(message: Message) -> Message | None:
    """Return a message whose text begins with a think block with that as its reasoning; None: it has no such text.

    Templates that know reasoning (Qwen3's) write such a block in a form of their own.
    """
    content = message["content"]
    blocks = think_blocks(content, thinking=False)
    if not blocks or blocks[0].start or not blocks[0].is_closed:
        return None
    said = content[blocks[0].end :].lstrip()
    return (
        {**message, "content": said, "reasoning_content": blocks[0].text.strip()} if said else None
    )


def _typed(tools: Sequence[Mapping[str, Any]], call: ToolCall) -> ToolCall:
    """Return a call with its arguments converted by the schema of its tool, if there is one of that name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == call.name:
            return replace(
                call, arguments=convert_arguments(function.get("parameters") or {}, call.arguments)
            )
    return call


def _with_call_ids(messages: Sequence[Message], sampled_ids: Sequence[int]) -> list[Message]:
    """Give tool results ids that differ within a turn and, derived from the sampled ids, between turns."""
    return [
        (
            {"tool_call_id": digest_ids([*sampled_ids, index])[:CALL_ID_LENGTH], **message}
            if message["role"] == "tool"
            else message
        )
        for index, message in enumerate(messages)
    ]


def _eos_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the EOS ids of the generation config, else the model config, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise ModelError(
                f"{file} is not valid JSON ({error}); download the model again"
            ) from None
        if isinstance(content, dict) and (eos := content.get("eos_token_id")) is not None:
            return list(eos) if isinstance(eos, list) else [eos]
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{folder} names no eos_token_id, so no turn would ever end; add it to"
            " generation_config.json"
        )
    return [tokenizer.eos_token_id]
