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
from jax_agent_rl.media import as_frames, as_picture

Pixels = tuple[int, int]
"""(fewest, most) pixels a picture is scaled to."""

_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")  # whose placeholders stand in one run per item
_VIDEO_PIXELS: Pixels = (128 * 28 * 28, 768 * 28 * 28)  # of transformers' video processor, where no file says
_VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")


class MediaTokens:
    """Counts of a Qwen-VL model.

    Args:
        placeholders: id that stands for a patch, by kind.
        images: transformers' image processor of the model.
        videos: the same with the settings for frames.
        temporal_patch_size: frames that share their patches.
    """

    def __init__(self, placeholders: Mapping[str, int], *, images: Any, videos: Any, temporal_patch_size: int) -> None:
        self.placeholders = placeholders
        self._images = images
        self._videos = videos
        self._temporal_patch_size = temporal_patch_size

    @classmethod
    def read(cls, folder: Path, *, pixels: Pixels | None = None) -> MediaTokens | None:
        """Those of a Hugging Face folder; None if its model takes no images, or in a way that is not known here.

        Args:
            pixels: instead of the processors' own.

        Raises:
            ModelError: the files that describe its processors are missing or damaged.
        """
        config = _read(folder / "config.json")
        if config.get("model_type") not in _MODEL_TYPES:
            return None
        from transformers import AutoImageProcessor

        override = dict(zip(("min_pixels", "max_pixels"), pixels, strict=True)) if pixels else {}
        try:
            images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, **override)
            frames = _video_settings(folder)
            own = {name: frames[name] for name in ("patch_size", "merge_size") if name in frames}
            return cls(
                {kind: config[f"{kind}_token_id"] for kind in ("image", "video")},
                images=images,
                videos=type(images)(size=_size(pixels, frames), **own),
                temporal_patch_size=frames.get("temporal_patch_size", 2),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the image processor at {folder} cannot be read: {error}") from error

    def count(self, kind: str, item: Any) -> int:
        """Ids of one image or video.

        Raises:
            ValueError: it is none, or of a shape the model cannot take.
        """
        if kind == "video":
            frames, height, width, _ = as_frames(item).shape
            groups, processor = -(-frames // self._temporal_patch_size), self._videos
        else:
            width, height = as_picture(item).size
            groups, processor = 1, self._images
        patches = processor.get_number_of_image_patches(height, width, {})
        return groups * patches // processor.merge_size**2

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Ids in which each item's one placeholder stands as often as the model reads it.

        Args:
            media: items by kind, in order of their placeholders.

        Raises:
            TemplateError: an item cannot be counted, or there are more or fewer placeholders than items.
        """
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
                yield self.count(kind, item)
            except ValueError as error:
                raise TemplateError(f"{kind} {number + 1} of {len(items)} cannot be shown: {error}") from None


def _size(pixels: Pixels | None, frames: Mapping[str, Any]) -> Mapping[str, int]:
    """Between how many pixels frames are scaled; a file may say so in either of two ways."""
    if pixels is None and frames.get("size"):
        return frames["size"]
    fewest, most = pixels or (frames.get("min_pixels", _VIDEO_PIXELS[0]), frames.get("max_pixels", _VIDEO_PIXELS[1]))
    return {"shortest_edge": fewest, "longest_edge": most}


def _video_settings(folder: Path) -> dict[str, Any]:
    """Where transformers looks for them, in its order."""
    if (whole := _read(folder / "processor_config.json")).get("video_processor"):
        return whole["video_processor"]
    return next((settings for name in _VIDEO_FILES if (settings := _read(folder / name))), {})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
