"""Special tokens: that only a chat template's own text becomes one, and how many an image or a video takes.

Control tokens are the tokenizer's added tokens: those that open and end turns, and those that a
model reads as structure (``<tool_call>``, ``<think>``, ``<|image_pad|>``). Whatever a user, a tool,
an environment or a dataset wrote may look like one, but is tokenized as ordinary text::

    messages   ──► marks after every character that could begin a control token      "a<|end|>"  ──► "a<MARK|end|>"
    template   ──► text in which an unbroken control token is the template's own     "…a<MARK|end|><|end|>…"
    encode     ──► marks away; the template's own become their ids, the rest text

Ids are those of the tokenizer itself if it finds no other control tokens than the template's own,
as in all ordinary conversations. If not, the same tokenizer is used with its control tokens under
secret names.

Exceptions, all of them here:

* Tags around thinking in an assistant message, which models write and templates look for.
* Added tokens that are pieces of ordinary text to the model: white space, words, HTML tags (Gemma
  has all three).
* :meth:`ChatCodec.encode_markup`, for prompts that somebody else rendered (``/v1/completions``) and
  configured separators.

A chat template writes one placeholder for each image or video::

    … <|vision_start|> <|image_pad|> <|vision_end|> …                                    what the template writes
    … <|vision_start|> <|image_pad|> <|image_pad|> … <|image_pad|> <|vision_end|> …      what the model reads

The model reads one for each of its patches. They are written out here, once, before any engine sees
the ids: budgets count them, and an engine that would read another number of them refuses the
request.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats.base import Message
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS
from jax_agent_rl.errors import ModelError, TemplateError
from jax_agent_rl.models.image_processor import ImageProcessor, Pixels
from jax_agent_rl.utils.text import NEVER, any_of

_ORDINARY = re.compile(
    r"[\s▁]+|\w+|</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code)>"
)


class ControlTokens:
    """The control tokens of a tokenizer.

    Args:
        tokenizer: a ``transformers`` fast tokenizer.

    Attributes:
        ids: of control tokens, by their text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.ids: dict[str, int] = {
            token.content: number for number, token in added if _is_control(token)
        }
        self._numbers = frozenset(self.ids.values())
        self._own = re.compile(any_of(self.ids))
        self._begins = re.compile(_beginning(self.ids), re.DOTALL)
        thinking = any_of(tag for tags in ALL_THINK_TAGS for tag in tags)
        self._begins_unless_thinking = re.compile(
            f"(?!{thinking})(?:{_beginning(self.ids)})", re.DOTALL
        )

    def __contains__(self, number: object) -> bool:
        return number in self._numbers

    def first(self, text: str) -> re.Match[str] | None:
        """Return the first control token in a text."""
        return self._own.search(text)

    def all(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the control tokens in a text."""
        return self._own.finditer(text)

    # --- text from outside ------------------------------------------------------------------------

    def mark_message(self, message: Message, mark: str) -> dict[str, Any]:
        """Return a message in which no control token is left whole, but for tags around an assistant's thinking.

        ``mark`` is a word that does not occur in it, see :func:`unused_word`.
        """
        marked = self.mark(message, mark)
        if message.get("role") == "assistant" and "content" in message:
            marked["content"] = _marked(message["content"], mark, self._begins_unless_thinking)
        return marked

    def mark(self, value: Any, mark: str) -> Any:
        """Return a value of texts, mappings and lists, e.g. a tool's schema, in which no control token is left."""
        return _marked(value, mark, self._begins)

    # --- text to ids ------------------------------------------------------------------------------

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered text: control tokens are those that no mark breaks.

        Raises:
            TemplateError: the template changed a mark.
        """
        unmarked = text.replace(mark, "")
        if mark in unmarked.lower():
            raise TemplateError(
                "the chat template changes the case of a message that holds a control token"
            )
        own = self._own.findall(text)
        ids = self._tokenizer.encode(unmarked, add_special_tokens=False)
        if [i for i in ids if i in self._numbers] == [self.ids[token] for token in own]:
            return ids
        secret, encode = self._under_secret_names
        renamed = self._own.sub(lambda token: secret[token.group()], text)
        return encode(renamed.replace(mark, ""))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text that holds no control token, whatever it looks like."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if self._numbers.isdisjoint(ids):
            return ids
        return self._under_secret_names[1](text)

    @functools.cached_property
    def _under_secret_names(self) -> tuple[dict[str, str], Any]:
        """Names of control tokens that no text from outside can hold, and the encoder that knows them by these.

        Nothing but the names differs, so ordinary text has the ids it always has.
        """
        from tokenizers import Tokenizer

        secret = secrets.token_hex(8)
        names = {token: f"<{secret}:{number}>" for token, number in self.ids.items()}
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


def unused_word(stem: str, *values: Any) -> str:
    """Return the first of ``stem0x``, ``stem1x``, … that does not occur in the values, which JSON can hold.

    It takes time linear in their length, also if they hold thousands of such words.
    """
    text = json.dumps(values, default=str).lower()
    numbers = set(re.findall(rf"(?={re.escape(stem)}([0-9]+)x)", text))
    number = 0
    while str(number) in numbers:
        number += 1
    return f"{stem}{number}x"


def _marked(value: Any, mark: str, begins: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return begins.sub(rf"\g<0>{mark}", value)
    if isinstance(value, Mapping):
        return {
            _marked(key, mark, begins): _marked(item, mark, begins) for key, item in value.items()
        }
    return (
        [_marked(item, mark, begins) for item in value]
        if isinstance(value, list | tuple)
        else value
    )


def _is_control(token: Any) -> bool:
    return bool(token.content) and (token.special or not _ORDINARY.fullmatch(token.content))


def _beginning(tokens: Iterable[str]) -> str:
    """Return the pattern of a character that may begin a control token.

    Alone, so that nothing a template cuts out between it and the rest makes a token of them. Of
    tokens that begin like a word, only whole ones count: their first letters are everywhere.
    """
    tokens = list(tokens)
    signs = {token[0] for token in tokens if not (token[0].isalnum() or token[0].isspace())}
    words = [token for token in tokens if token[0] not in signs]
    patterns = []
    if signs:
        patterns.append(f"[{re.escape(''.join(sorted(signs)))}]")
    if words:
        patterns.append(f"(?={any_of(words)}).")
    return "|".join(patterns) or NEVER


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the model of a ``tokenizer.json``, and remove the merges that would form them."""
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _merged(merge).isdisjoint(names)]


def _merged(merge: str | Sequence[str]) -> set[str]:
    pair = merge.split(" ") if isinstance(merge, str) else list(merge)
    return {*pair, "".join(pair)}


_KINDS = {  # whose placeholders stand in one run per item
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image",),
}


class MediaTokens:
    """Placeholder counts of a Qwen-VL model.

    Args:
        placeholders: id of a patch, by kind.
        image_processor: cuts its images into patches.
    """

    def __init__(self, placeholders: Mapping[str, int], image_processor: ImageProcessor) -> None:
        self.placeholders = placeholders
        self._image_processor = image_processor

    @classmethod
    def read(cls, folder: Path, *, pixels: Pixels | None = None) -> MediaTokens | None:
        """Load from a Hugging Face folder; return None if its model takes no images or is not supported.

        ``pixels`` override the processor's limits.

        Raises:
            ModelError: the files that describe its processors are missing or damaged.
        """
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        kinds = _KINDS.get(config.get("model_type", ""))
        if kinds is None:
            return None
        try:
            placeholders = {kind: config[f"{kind}_token_id"] for kind in kinds}
        except KeyError as error:
            raise ModelError(f"{file} does not say {error}; download the model again") from None
        return cls(placeholders, ImageProcessor.read(folder, pixels=pixels))

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Return ids with each item's placeholder repeated as often as the model reads it; items are in their order.

        Raises:
            TemplateError: an item cannot be counted, or there are more or fewer placeholders than
                items.
        """
        if unread := sorted(media.keys() - self.placeholders.keys()):
            raise TemplateError(
                f"items of kind {unread} cannot be shown to this model, only"
                f" {sorted(self.placeholders)}"
            )
        kinds = {placeholder: kind for kind, placeholder in self.placeholders.items()}
        counts = {kind: self._counts(kind, items) for kind, items in media.items()}
        expanded: list[int] = []
        for i in ids:
            if (kind := kinds.get(i)) is None:
                expanded.append(i)
                continue
            repeat = next(counts[kind], 0) if kind in counts else 0
            if not repeat:
                raise TemplateError(
                    f"the text shows more of kind {kind!r} than the {len(media.get(kind, ()))}"
                    " given"
                )
            expanded += [i] * repeat
        for kind, left in counts.items():
            if (unseen := sum(1 for _ in left)) > 0:
                raise TemplateError(f"the chat template shows {unseen} of kind {kind!r} too few")
        return expanded

    def _counts(self, kind: str, items: Sequence[Any]) -> Iterator[int]:
        for number, item in enumerate(items):
            try:
                yield self._image_processor.count(kind, item)
            except ValueError as error:
                raise TemplateError(
                    f"{kind} {number + 1} of {len(items)} cannot be shown: {error}"
                ) from None
