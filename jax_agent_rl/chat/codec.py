"""The chat codec: messages to ids and back, such that sampled ids never change.

The first prompt is rendered and tokenized as a whole. After that nothing is ever rendered again::

    context = prompt_ids
    context = context + sampled_ids + encode_append(sampled_ids, new messages)

After an assistant turn comes what the template writes there (``template``): the end of the turn unless the model wrote
it, any text behind it (Qwen's newline), the new messages, the next generation prompt. Contents of messages are text,
whatever they look like (``special_tokens``).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats import Reply, detect_format, get_format
from jax_agent_rl.chat.formats.base import ALL_THINK_TAGS, Message
from jax_agent_rl.chat.grammar import CallSyntax, GrammarCompiler, GrammarError, TurnGrammar
from jax_agent_rl.chat.special_tokens import ControlTokens, MediaTokens, unused_word
from jax_agent_rl.chat.template import ASKED, CALL_ID_LENGTH, ChatTemplate, ToolPrompt, TurnBoundary
from jax_agent_rl.errors import ConfigError, ModelError, TemplateError
from jax_agent_rl.models.image_processor import Pixels
from jax_agent_rl.types import digest_ids
from jax_agent_rl.utils.hub import model_folder, read_pretrained


class ChatCodec:
    """Encodes messages and decodes replies; see the module docstring.

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written, ``agent.tool_format``; ``auto`` finds it in the chat template. If that
            is of an unknown format, only agents without tools can be run.
        tool_prompt: ``agent.tool_prompt``.
        eos_token_ids: ids that end a generation; default the tokenizer's EOS.
        media: how many ids an image or a video takes; None: one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_format: str = "hermes",
        tool_prompt: ToolPrompt = "template",
        eos_token_ids: Sequence[int] | None = None,
        media: MediaTokens | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError("the tokenizer has no chat template; choose an instruction-tuned model")
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        self._no_format: ConfigError | None = None
        try:
            self._format = detect_format(template) if tool_format == "auto" else get_format(tool_format)
        except ConfigError as error:
            if tool_format != "auto":
                raise
            self._no_format, self._format = error, get_format("hermes")
        self._template = ChatTemplate(tokenizer, self._format, tool_prompt)
        self.eos_token_ids = tuple(eos_token_ids if eos_token_ids is not None else [tokenizer.eos_token_id])
        self._control = ControlTokens(tokenizer)
        self._boundary = TurnBoundary(self._template, self._control, call_end=self._format.call_end)
        self._media = media
        self._modalities: frozenset[str] | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        tool_format: str = "hermes",
        tool_prompt: ToolPrompt = "template",
        pixels: Pixels | None = None,
    ) -> ChatCodec:
        """Load the codec of a Hugging Face model folder.

        Args:
            path: the folder, or a model's name on the hub.
            tool_format: see the class.
            tool_prompt: see the class.
            pixels: ``model.min_pixels`` and ``max_pixels``; images and frames are counted as scaled to so many.

        Raises:
            ModelError: tokenizer files are missing or unreadable.
        """
        from transformers import AutoTokenizer

        folder = model_folder(path)
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"no tokenizer at {str(folder)!r} (tokenizer.json is missing); set model.path to a Hugging Face "
                "folder, or run `jax-agent-rl fetch-model` for the quickstart's"
            )
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
        )

    # --- messages to ids --------------------------------------------------------------------------------------

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation up to and including the generation prompt.

        Text of control tokens in messages and tools (``<|im_end|>`` in a user's question) is tokenized as plain text.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        messages, tools, mark = self._marked(messages, tools)
        return self._control.encode_rendered(self._template.render(messages, tools, generation_prompt=True), mark)

    def encode_turn(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of an assistant message as the model would have sampled them, with the id that ends its turn.

        Where the generation prompt opens a think block, the turn begins with ``reasoning_content`` and closes it. A
        template that ends a turn by opening the next message (GLM's) gives no id for that; :meth:`encode_append` does.

        Args:
            message: with ``content``, ``tool_calls``, or what else the template shows of it.
            tools: as in :meth:`encode_prompt`.

        Raises:
            TemplateError: the template refuses the message, or writes a turn otherwise than it asks for one.
        """
        (message,), tools, mark = self._marked([message], tools)
        begin = self._template.render([ASKED], tools, generation_prompt=True)
        text = self._template.render([ASKED, message], tools, generation_prompt=False)
        if not text.startswith(begin) and (tag := self._boundary.think_tag):
            said = text.removeprefix(begin.rpartition(tag)[0])
            close = next(after for before, after in ALL_THINK_TAGS if before == tag)
            text = begin + (
                said.removeprefix(tag)
                if said.startswith(tag)
                else f"{message.get('reasoning_content') or ''}{close}\n\n{said}"
            )
        if not text.startswith(begin):
            raise TemplateError(
                f"the chat template writes an assistant turn as {text[-80:]!r}, which does not begin as its generation "
                f"prompt ends: {begin[-40:]!r}"
            )
        ids = self._control.encode_rendered(text.removeprefix(begin), mark)
        ends = {*self.eos_token_ids, *self._boundary.ends}
        last = next((number for number, token in enumerate(ids) if token in ends), None)
        return ids if last is None else ids[: last + 1]

    def encode_append(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the ids to insert after a sampled turn: its boundary, new messages, the next generation prompt.

        Text of control tokens in the new messages is tokenized as plain text, as in :meth:`encode_prompt`. An end of
        turn that the model wrote itself is not written again, be it another one than the template's.

        Args:
            sampled_ids: the assistant turn. If it does not end with an end-of-turn id (it was cut), one is inserted.
            messages: ``tool`` or ``user`` messages. For templates that show which call a result answers, a ``tool``
                message without a ``tool_call_id`` is given one of its own. One with ``media`` (kinds of images and
                videos, in order) shows these before its text, each as one placeholder of the template's.
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
        written_twice = ids[0] == end or (ids[0] in self._boundary.ends and end not in self._boundary.openings)
        return ids[1:] if written_twice else ids

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        """Return whether ids made by :meth:`encode_append` take the place of the last sampled one.

        They do when the model stopped at a token that opens another message than the one which follows, as GLM does
        with ``<|observation|>`` before a user's turn: left there, it would make an observation of what the user says.
        """
        if len(sampled_ids) < 2 or sampled_ids[-1] not in self.eos_token_ids or not appended_ids:
            return False
        boundary = self._boundary
        return sampled_ids[-1] in boundary.openings and appended_ids[0] in boundary.openings | boundary.ends

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
        """Return messages and tools without whole control tokens, and the mark that breaks those.

        Raises:
            ConfigError: there are tools, but the tool-call format is unknown.
        """
        self._require_format(tools)
        mark = unused_word("mark", messages, tools)
        marked: list[Message] = [self._control.mark_message(message, mark) for message in messages]
        return marked, self._control.mark(list(tools), mark), mark

    def _require_format(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and self._no_format:
            raise self._no_format

    # --- ids to text ------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with white space unchanged."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media (``image``, ``video``) that the chat template can show in a tool result."""
        if self._modalities is None:
            self._modalities = frozenset(kind for kind in ("image", "video") if self._template.shows(kind))
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

    def parse_reply(self, sampled_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """Parse a sampled assistant turn into text, reasoning and calls of ``tools`` (their schemas)."""
        self._require_format(tools)
        ids = list(sampled_ids)
        while ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        text = self.decode(ids, skip_special_tokens=False)
        return self._format.parse(self._boundary.think_tag + text, tools)

    # --- grammars ---------------------------------------------------------------------------------------------

    def turn_grammar(self, *, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, answer: Any = None) -> str:
        """Return the checked grammar of a turn: calls of tools, or an answer in JSON, whichever are given.

        Args:
            tools: schemas of the tools that may be called.
            several: whether there may be more than one call.
            answer: JSON schema of an answer.

        Raises:
            GrammarError: there is none for the tool-call format, or a schema is wrong; says which part.
        """
        syntax = self._call_syntax
        if tools and syntax is None:
            raise GrammarError(
                f"there is no grammar of calls in the format {self.tool_format!r}; leave it out, or let the server run "
                "with agent.tool_format=hermes"
            )
        grammar = self._turns.turn(syntax=syntax, tools=tools, several=several, answer=answer)
        self._grammars.start(grammar)
        return grammar

    def free_turn_grammar(self, *, tools: Sequence[Mapping[str, Any]], several: bool = True) -> str:
        """Return the checked grammar of a turn of any text, with one call or ``several`` that fit these schemas.

        Raises:
            GrammarError: there is none for the tool-call format, or a schema is wrong; says which part.
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
        return TurnGrammar(self._control.ids, is_special=self._grammars.is_special, thinking=thinking)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, eos_ids=self.eos_token_ids)

    def grammar_compiler(self, *, eos_ids: Sequence[int], vocab_size: int) -> GrammarCompiler:
        """Return a compiler of grammars for a model of ``vocab_size`` ids, whose outputs end with ``eos_ids``."""
        return GrammarCompiler(self._tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)


def _with_call_ids(messages: Sequence[Message], sampled_ids: Sequence[int]) -> list[Message]:
    """Give tool results ids that differ within a turn and, derived from the sampled ids, between turns."""
    return [
        {"tool_call_id": digest_ids([*sampled_ids, index])[:CALL_ID_LENGTH], **message}
        if message["role"] == "tool"
        else message
        for index, message in enumerate(messages)
    ]


def _eos_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the EOS ids of the generation config, else the model config, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise ModelError(f"{file} is not valid JSON ({error}); download the model again") from None
        if isinstance(content, dict) and (eos := content.get("eos_token_id")) is not None:
            return list(eos) if isinstance(eos, list) else [eos]
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{folder} names no eos_token_id, so no turn would ever end; add it to generation_config.json")
    return [tokenizer.eos_token_id]
