"""Control tokens, which only a chat template writes, and placeholders of images and videos.

Control tokens are the tokenizer's added tokens: those that open and end turns, and those that a
model reads as structure (``<tool_call>``, ``<think>``, ``<|image_pad|>``). Whatever a user, a tool,
an environment or a dataset wrote may look like one, but is tokenized as ordinary text::

    messages   ──► a mark after every character that could begin a control token
                   "a<|end|>"  ──► "a<MARK|end|>"
    template   ──► text in which an unbroken control token is the template's own
                   "…a<MARK|end|><|end|>…"
    encode     ──► marks removed; the template's own control tokens become their ids, all else text

The tokenizer itself is used if it finds no other control tokens than the template's own, as in all
ordinary conversations. If it finds others, a copy of it is used whose control tokens have secret
names.

Tokenizers cut a text at control tokens first, so what stands between two of them has the same ids
wherever it stands. Long passages are remembered: instructions and tools of 20,000 ids are in every
conversation of an agent, and take 50 ms to encode.

Exceptions, all of them here:

* Tags around thinking in an assistant message, which models write and templates look for.
* Added tokens that are pieces of ordinary text to the model: white space, words, HTML tags (Gemma
  has all three).
* :meth:`ChatCodec.encode_markup`, for prompts that somebody else rendered (``/v1/completions``) and
  configured separators.

A chat template writes one placeholder for each image or video::

    written by the template   … <|vision_start|> <|image_pad|> <|vision_end|> …
    read by the model         … <|vision_start|> <|image_pad|> … <|image_pad|> <|vision_end|> …

The model reads one for each patch of the item. They are written out here, once, before any engine
sees the ids: budgets count them, and an engine that would read another number of them refuses the
request.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats.base import Message
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS
from jax_agent_rl.errors import ModelError, TemplateError
from jax_agent_rl.models.image_processor import ImageProcessor, Pixels
from jax_agent_rl.utils.text import NEVER, any_of

_ORDINARY = re.compile(
    r"[\s▁]+|\w+"
    r"|</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup"
    r"|code)>"
)
"""Added tokens that are pieces of ordinary text, see the module's docstring."""
MIN_PASSAGE = 1000
"""Characters of the shortest passage that is remembered."""
MAX_REMEMBERED = 16 * 2**20
"""Characters of all passages that are remembered."""


class ControlTokens:
    """The control tokens of a tokenizer.

    Args:
        tokenizer: a ``transformers`` fast tokenizer.
        min_passage: characters of the shortest passage whose ids are remembered.

    Attributes:
        ids: the ids of control tokens, by text.
    """

    def __init__(self, tokenizer: Any, *, min_passage: int = MIN_PASSAGE) -> None:
        self._tokenizer = tokenizer
        self._min_passage = min_passage
        self._passages = _Passages(MAX_REMEMBERED)
        self.ids: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if _is_control(token):
                self.ids[token.content] = token_id
        self._id_set = frozenset(self.ids.values())

        beginning = _beginning(self.ids)
        think_tags = any_of(itertools.chain.from_iterable(ALL_THINK_TAGS))
        self._token = re.compile(any_of(self.ids))
        self._beginning = re.compile(beginning, re.DOTALL)
        self._beginning_but_think_tags = re.compile(f"(?!{think_tags})(?:{beginning})", re.DOTALL)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._id_set

    def first(self, text: str) -> re.Match[str] | None:
        """Return the first control token in a text."""
        return self._token.search(text)

    def all(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the control tokens in a text."""
        return self._token.finditer(text)

    # --- text from outside ------------------------------------------------------------------------

    def mark_message(self, message: Message, mark: str) -> dict[str, Any]:
        """Return a message in which no control token is whole.

        Tags around thinking stay whole in the content of an assistant.

        Args:
            mark: a word that does not occur in it, see :func:`unused_word`.
        """
        marked = self.mark(message, mark)
        if message.get("role") == "assistant" and "content" in message:
            marked["content"] = _mark(message["content"], mark, self._beginning_but_think_tags)
        return marked

    def mark(self, value: Any, mark: str) -> Any:
        """Return a value, e.g. a tool's schema, in whose texts no control token is whole."""
        return _mark(value, mark, self._beginning)

    # --- text to ids ------------------------------------------------------------------------------

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered text: control tokens are those that no mark breaks.

        Raises:
            TemplateError: the template changed a mark.
        """
        if mark in text.replace(mark, "").lower():
            raise TemplateError(
                "the chat template changes the case of a message that holds a control token"
            )
        if not self._separate_passages:
            return self._encode_run(text, mark)

        ids: list[int] = []
        run_start = 0
        for start, end in self._long_passages(text):
            ids += self._encode_run(text[run_start:start], mark)
            ids += self._encode_passage(text[start:end].replace(mark, ""))
            run_start = end
        return ids + self._encode_run(text[run_start:], mark)

    def _long_passages(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where long texts without a control token begin and end."""
        start = 0
        for token in self._token.finditer(text):
            if token.start() - start >= self._min_passage:
                yield start, token.start()
            start = token.end()
        if len(text) - start >= self._min_passage:
            yield start, len(text)

    def _encode_passage(self, text: str) -> Sequence[int]:
        """Return the ids of a text without control tokens, which are remembered."""
        ids = self._passages.get(text)
        if ids is None:
            ids = array("i", self.encode_text(text))
            self._passages.add(text, ids)
        return ids

    def _encode_run(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered text, or of a part of it, with its control tokens."""
        unmarked = text.replace(mark, "")
        ids = self._tokenizer.encode(unmarked, add_special_tokens=False)
        control_ids = [token for token in ids if token in self._id_set]
        template_ids = [self.ids[token] for token in self._token.findall(text)]
        if control_ids == template_ids:
            return ids

        # Some text looks like a control token once its mark is removed.
        secret_names, encode = self.under_secret_names
        renamed = self._token.sub(lambda token: secret_names[token.group()], text)
        return encode(renamed.replace(mark, ""))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text that holds no control token, whatever it looks like."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if self._id_set.isdisjoint(ids):
            return ids
        _, encode = self.under_secret_names
        return encode(text)

    @functools.cached_property
    def _separate_passages(self) -> bool:
        """Whether the ids of a text between two control tokens depend on that text alone.

        They depend on more where a control token takes white space around it, or is looked for
        after the whole text was normalized, and where the beginning of the whole text is encoded in
        a way of its own (SentencePiece's prefix, if it is for the first word alone).
        """
        backend = self._tokenizer.backend_tokenizer
        for token in self._tokenizer.added_tokens_decoder.values():
            if token.content not in self.ids:
                continue
            if token.lstrip or token.rstrip or token.single_word:
                return False
            if token.normalized and backend.normalizer is not None:
                return False
        if backend.pre_tokenizer is None:
            return True
        return b'"prepend_scheme":"first"' not in backend.pre_tokenizer.__getstate__()

    @functools.cached_property
    def under_secret_names(self) -> tuple[dict[str, str], Any]:
        """Names of control tokens that no text from outside can hold, and an encoder with them.

        Nothing but the names differs, so ordinary text has the ids it always has.
        """
        from tokenizers import Tokenizer

        secret = secrets.token_hex(8)
        names = {token: f"<{secret}:{token_id}>" for token, token_id in self.ids.items()}
        file = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in file["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_vocabulary(file["model"], names)
        renamed = Tokenizer.from_str(
            json.dumps(file | {"truncation": None, "padding": None, "post_processor": None})
        )
        for token, name in names.items():
            if renamed.token_to_id(name) != self.ids[token]:
                raise ModelError(
                    f"the tokenizer's added token {token!r} cannot be distinguished from text"
                )
        return names, lambda text: renamed.encode(text, add_special_tokens=False).ids


class _Passages:
    """Ids of passages, by text; those that were used last.

    Args:
        max_characters: limit of all passages together.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._characters = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()

    def get(self, text: str) -> array[int] | None:
        ids = self._ids.pop(text, None)
        if ids is not None:
            self._ids[text] = ids
        return ids

    def add(self, text: str, ids: array[int]) -> None:
        if text not in self._ids:
            self._characters += len(text)
        self._ids[text] = ids
        while self._ids and self._characters > self._max_characters:
            oldest, _ = self._ids.popitem(last=False)
            self._characters -= len(oldest)


def unused_word(stem: str, *values: Any) -> str:
    """Return the first of ``stem0x``, ``stem1x``, … that does not occur in the values.

    It takes time linear in their length as JSON, even if they hold thousands of such words.
    """
    text = json.dumps(values, default=str).lower()
    numbers = set(re.findall(rf"(?={re.escape(stem)}([0-9]+)x)", text))
    number = 0
    while str(number) in numbers:
        number += 1
    return f"{stem}{number}x"


def _mark(value: Any, mark: str, beginning: re.Pattern[str]) -> Any:
    """Return a value with the mark after everything in its texts that may begin a control token."""
    if isinstance(value, str):
        return beginning.sub(rf"\g<0>{mark}", value)
    if isinstance(value, Mapping):
        marked = {}
        for key, item in value.items():
            marked[_mark(key, mark, beginning)] = _mark(item, mark, beginning)
        return marked
    if isinstance(value, list | tuple):
        return [_mark(item, mark, beginning) for item in value]
    return value


def _is_control(token: Any) -> bool:
    if not token.content:
        return False
    return token.special or not _ORDINARY.fullmatch(token.content)


def _beginning(tokens: Iterable[str]) -> str:
    """Return the pattern of a character that may begin a control token.

    It matches the character alone, whatever follows: a template may cut out text behind it, so that
    it meets the end of a token. Where a token begins like a word, the whole token has to follow,
    since its first letter is everywhere.
    """
    signs = set()
    words = []
    for token in tokens:
        if token[0].isalnum() or token[0].isspace():
            words.append(token)
        else:
            signs.add(token[0])

    patterns = []
    if signs:
        patterns.append(f"[{re.escape(''.join(sorted(signs)))}]")
    if words:
        patterns.append(f"(?={any_of(words)}).")
    return "|".join(patterns) or NEVER


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the model of a ``tokenizer.json``.

    Merges that would form the tokens, or consume them, are removed.
    """
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        merges = []
        for merge in model["merges"]:
            if names.keys().isdisjoint(_pieces(merge)):
                merges.append(merge)
        model["merges"] = merges


def _pieces(merge: str | Sequence[str]) -> list[str]:
    """Return the pieces of a merge, and the piece that they become."""
    pair = merge.split(" ") if isinstance(merge, str) else list(merge)
    return [*pair, "".join(pair)]


_MEDIA_KINDS = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image",),
    "qwen3_5": ("image",),
    "qwen3_5_moe": ("image",),
}
"""Kinds of media whose placeholders stand in one run per item, by model type."""


class MediaTokens:
    """Placeholder counts of a Qwen-VL or Qwen3.5 model.

    Args:
        placeholders: id that stands for a patch, by kind of media.
        image_processor: cuts images and videos into patches.
    """

    def __init__(self, placeholders: Mapping[str, int], image_processor: ImageProcessor) -> None:
        self.placeholders = placeholders
        self._image_processor = image_processor

    @classmethod
    def read(cls, folder: Path, *, pixels: Pixels | None = None) -> MediaTokens | None:
        """Load from a Hugging Face folder.

        Args:
            pixels: replace the processor's limits.

        Returns:
            None if the model takes no images, or is not supported.

        Raises:
            ModelError: the files that describe its processors are missing or damaged.
        """
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        kinds = _MEDIA_KINDS.get(config.get("model_type", ""))
        # The latter is Qwen3.5's: only its text model is read.
        if kinds is None or config.get("language_model_only"):
            return None
        try:
            placeholders = {kind: config[f"{kind}_token_id"] for kind in kinds}
        except KeyError as error:
            raise ModelError(f"{file} does not say {error}; download the model again") from None
        return cls(placeholders, ImageProcessor.read(folder, pixels=pixels))

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Return ids with each placeholder repeated as often as the model reads it for its item.

        Args:
            ids: with one placeholder for each item.
            media: items by kind, in the order of their placeholders.

        Raises:
            TemplateError: an item cannot be counted, or there are more or fewer placeholders than
                items.
        """
        unknown_kinds = sorted(media.keys() - self.placeholders.keys())
        if unknown_kinds:
            raise TemplateError(
                f"items of kind {unknown_kinds} cannot be shown to this model, only"
                f" {sorted(self.placeholders)}"
            )

        kind_of = {placeholder: kind for kind, placeholder in self.placeholders.items()}
        counts = {kind: self._patch_counts(kind, items) for kind, items in media.items()}
        expanded: list[int] = []
        for token in ids:
            kind = kind_of.get(token)
            if kind is None:
                expanded.append(token)
                continue
            repeats = next(counts[kind], 0) if kind in counts else 0
            if repeats == 0:
                raise TemplateError(
                    f"the text shows more of kind {kind!r} than the {len(media.get(kind, ()))}"
                    " given"
                )
            expanded += [token] * repeats

        for kind, remaining in counts.items():
            unseen = len(list(remaining))
            if unseen > 0:
                raise TemplateError(f"the chat template shows {unseen} of kind {kind!r} too few")
        return expanded

    def _patch_counts(self, kind: str, items: Sequence[Any]) -> Iterator[int]:
        for index, item in enumerate(items):
            try:
                yield self._image_processor.count(kind, item)
            except ValueError as error:
                raise TemplateError(
                    f"{kind} {index + 1} of {len(items)} cannot be shown: {error}"
                ) from None
