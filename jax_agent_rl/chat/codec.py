"""Messages to ids and back, such that ids, once sampled, never change.

The first prompt is rendered and tokenized as a whole. After that nothing is ever rendered again::

    context = prompt_ids
    context = context + sampled_ids + encode_append(sampled_ids, new messages)

What a turn appends is found on an *anchor*: a short fixed conversation that ends with an assistant turn holding a
marker. It is rendered together with the new messages, and everything after the marker is the addition: the end of the
assistant turn, what the template puts behind it (Qwen's newline), the new messages, the next generation prompt.
However a template rewrites what stands before the marker (strips ``<think>``, injects dates), the addition is not
touched by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats import Reply, detect_format, get_format
from jax_agent_rl.chat.media import MediaTokens
from jax_agent_rl.chat.template import ChatTemplate, Message, ToolPrompt
from jax_agent_rl.errors import ModelError, TemplateError
from jax_agent_rl.model_folder import model_folder
from jax_agent_rl.patches import Pixels
from jax_agent_rl.types import digest_ids

MARKER = "ANCHOR7f3a9c"
CALL_ID_LENGTH = 9  # of letters and digits, as Mistral's templates demand
_QUESTION = {"role": "user", "content": "question"}
Anchor = Callable[[Sequence[Message], Sequence[Mapping]], str]
"""From messages and tools to the text that follows an assistant turn."""


class ChatCodec:
    """See the module docstring.

    Args:
        tokenizer: a ``transformers`` fast tokenizer with a chat template.
        tool_format: how tool calls are written, ``agent.tool_format``; ``auto`` finds it in the chat template.
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
        self._format = detect_format(template) if tool_format == "auto" else get_format(tool_format)
        self._template = ChatTemplate(tokenizer, self._format, tool_prompt)
        self.eos_token_ids = tuple(eos_token_ids if eos_token_ids is not None else [tokenizer.eos_token_id])
        self._special = tuple(token for token in tokenizer.get_added_vocab() if token)
        self._special_ids = frozenset(tokenizer.get_added_vocab().values())
        self._anchor_of: dict[tuple[str, ...], int] = {}
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
        """The codec of a Hugging Face model folder.

        Args:
            pixels: ``model.pixels``; images and frames are counted as scaled to so many.

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
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
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
        """Ids of a conversation up to and including the generation prompt.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return self._encode(self._template.render(messages, tools, generation_prompt=True))

    def encode_append(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids to insert after a sampled assistant turn: its boundary, new messages, the next generation prompt.

        Text of special tokens inside the new messages (a tool result that contains ``<|im_end|>``) is tokenized as
        plain text: it cannot end a turn or open another.

        Args:
            sampled_ids: the assistant turn. If it does not end with an end-of-turn id (it was cut), one is inserted.
            messages: ``tool`` or ``user`` messages. For templates that tell which call a result answers, a ``tool``
                message without a ``tool_call_id`` is given one of its own. One with ``media`` (kinds of images and
                videos, in order) shows these before its text, each as one placeholder of the template's.
            tools: as in :meth:`encode_prompt`; templates may refer to them.

        Raises:
            TemplateError: the template refuses the messages after an assistant turn.
        """
        plain, contents = self._guard(messages)
        addition = self._addition(plain, _with_call_ids(plain, sampled_ids), tools)
        ids = self._encode_guarded(addition, contents)
        ended = sampled_ids[-1] in self.eos_token_ids if sampled_ids else False
        if ended and ids and ids[0] in self._special_ids:
            # The model wrote the end of its turn itself (maybe another token than the template's).
            del ids[0]
        return ids

    def expand_media(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Ids of :meth:`encode_append` with every placeholder as often as the model reads it for its item.

        Args:
            media: images and videos by kind, in order of their placeholders.

        Raises:
            TemplateError: an item cannot be shown, or placeholders and items are not the same in number.
        """
        return self._media.expand(ids, media) if self._media and media else list(ids)

    def encode_text(self, text: str) -> list[int]:
        """Ids of bare text; no template, no special tokens added or recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_markup(self, text: str) -> list[int]:
        """Ids of text in which special tokens count and none is added: separators that a configuration gives, prompts
        that somebody else rendered; never data."""
        return self._encode(text)

    def _addition(self, messages: Sequence[Message], with_call_ids: Sequence[Message], tools: Sequence[Mapping]) -> str:
        """Text after the anchor's assistant turn, beginning with the end of that turn."""
        key = tuple(message["role"] for message in messages)
        anchors = ((self._plain_anchor, messages), (self._calling_anchor, with_call_ids))
        known = self._anchor_of.get(key)
        problems = []
        for number in sorted(range(len(anchors)), key=lambda number: number != known):  # the known one first
            anchor, following = anchors[number]
            try:
                if number != known:
                    _check_keeps(anchor, following, tools)
                addition = anchor(following, tools)
            except TemplateError as error:
                problems.append(str(error))
                continue
            self._anchor_of[key] = number
            return addition
        raise TemplateError("; ".join(problems))

    def _plain_anchor(self, messages: Sequence[Message], tools: Sequence[Mapping]) -> str:
        """On an assistant turn of text."""
        anchor = [_QUESTION, {"role": "assistant", "content": MARKER}]
        text = self._template.render([*anchor, *messages], tools, generation_prompt=True)
        return _after_marker(text)

    def _calling_anchor(self, messages: Sequence[Message], tools: Sequence[Mapping]) -> str:
        """On an assistant turn that calls tools, for templates that want one before a tool result."""
        results = [message for message in messages if message["role"] == "tool"]
        results = results or [{"tool_call_id": "0" * CALL_ID_LENGTH}]
        calls = [
            {
                "id": result["tool_call_id"],
                "type": "function",
                "function": {"name": result.get("name", "f"), "arguments": {"a": MARKER}},
            }
            for result in results
        ]
        anchor = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        text = self._template.render([*anchor, *messages], tools, generation_prompt=True)
        rest = text[text.rindex(MARKER) :] if MARKER in text else ""
        # What the template writes to close the call is the model's own business; the turn's end is not.
        if (end := self._format.call_end) and end in rest:
            rest = rest[rest.index(end) + len(end) :]
        ends = [place for token in self._special if (place := rest.find(token)) >= 0]
        if not ends:
            raise TemplateError("the chat template does not mark the end of an assistant turn that calls a tool")
        return rest[min(ends) :]

    # --- special tokens in foreign text -----------------------------------------------------------------------

    def _guard(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Messages with contents that hold special tokens' text replaced by placeholders, and what they stand for."""
        plain: list[Message] = []
        contents: dict[str, str] = {}
        for index, message in enumerate(messages):
            content = message["content"]
            if any(token in content for token in self._special):
                placeholder = f"GUARDED{index}x7f3a9c"
                contents[placeholder] = content
                message = {**message, "content": placeholder}
            plain.append(message)
        return plain, contents

    def _encode_guarded(self, text: str, contents: Mapping[str, str]) -> list[int]:
        """Tokenizes template text as usual, and what placeholders stand for as plain text."""
        ids: list[int] = []
        for placeholder, content in contents.items():
            before, found, text = text.partition(placeholder)
            if not found:
                raise TemplateError("the chat template changed a message's content, so it cannot be kept apart")
            ids += self._encode(before) + self.encode_text(content)
        return ids + self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    # --- ids to text ------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, white space as it is."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media (``image``, ``video``) that the chat template can show in a tool result."""
        if self._modalities is None:
            self._modalities = frozenset(kind for kind in ("image", "video") if self._template.shows(kind))
        return self._modalities

    @property
    def tool_format(self) -> str:
        """Name of the tool-call format."""
        return self._format.name

    def parse_reply(self, sampled_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """A sampled assistant turn taken apart into text, reasoning and calls of ``tools`` (their schemas)."""
        ids = list(sampled_ids)
        while ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return self._format.parse(self.decode(ids, skip_special_tokens=False), tools)


def _with_call_ids(messages: Sequence[Message], sampled_ids: Sequence[int]) -> list[Message]:
    """Tool results with ids that differ within a turn and, as they depend on what was sampled, between turns."""
    return [
        {"tool_call_id": digest_ids([*sampled_ids, index])[:CALL_ID_LENGTH], **message}
        if message["role"] == "tool"
        else message
        for index, message in enumerate(messages)
    ]


def _check_keeps(anchor: Anchor, messages: Sequence[Message], tools: Sequence[Mapping]) -> None:
    """Tries with marked contents whether an anchor makes the template write every message.

    Raises:
        TemplateError: it leaves one out, as some do with a tool result that no call comes before.
    """
    marked = [{**message, "content": f"KEPT{index}x7f3a9c"} for index, message in enumerate(messages)]
    text = anchor(marked, tools)
    for message in marked:
        if message["content"] not in text:
            raise TemplateError(f"the chat template leaves out a message of role {message['role']!r}")


def _after_marker(text: str) -> str:
    before, found, after = text.rpartition(MARKER)
    if not found or MARKER in before:
        raise TemplateError("the chat template does not write an assistant turn exactly once")
    return after


def _eos_ids(folder: Path, tokenizer: Any) -> list[int]:
    """EOS ids of the generation config, else the model config, else the tokenizer."""
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
