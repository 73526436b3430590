"""How many ids an image or a video takes, so that a trajectory holds the very ids its model conditions on.

A chat template writes one placeholder for each::

    … <|vision_start|> <|image_pad|> <|vision_end|> …                                    what the template writes
    … <|vision_start|> <|image_pad|> <|image_pad|> … <|image_pad|> <|vision_end|> …      what the model reads

The model reads one for each of its patches. They are written out here, once, before any engine sees the ids: budgets
count them, and an engine that would read another number of them refuses the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ModelError, TemplateError
from jax_agent_rl.models.vision.image_processor import ImageProcessor, Pixels

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
            TemplateError: an item cannot be counted, or there are more or fewer placeholders than items.
        """
        if unread := sorted(media.keys() - self.placeholders.keys()):
            raise TemplateError(
                f"items of kind {unread} cannot be shown to this model, only {sorted(self.placeholders)}"
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
                raise TemplateError(f"the text shows more of kind {kind!r} than the {len(media.get(kind, ()))} given")
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
                raise TemplateError(f"{kind} {number + 1} of {len(items)} cannot be shown: {error}") from None
