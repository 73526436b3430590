"""Contexts with pictures: which ids stand for which, and by what names ids are compared that may show different ones.

::

    ids         5  <img> <img> <img> <img>  6  <img>      the last one was sampled: it is text
    pictures       |------- a cat --------|
    keys        5   -1    -2    -3    -4    6  <img>      what a cache, or a tree of shared prefixes, compares
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_agent_rl.models.config import DecoderConfig, VisionConfig
from jax_agent_rl.models.vision.image_processor import ImageProcessor, Pixels, ProcessedImage
from jax_agent_rl.models.vision.layout import ImageSpan, locate, rope_positions
from jax_agent_rl.utils.hub import model_folder


@dataclass(frozen=True, kw_only=True, eq=False)
class MultimodalContext:
    """A context with pictures.

    Attributes:
        ids: int32 [n].
        pictures: in order of their places.
        spans: their places.
        positions: int32 [n, 3], rotary positions.
        offset: rotary position of a later id, less its index.
    """

    ids: np.ndarray
    pictures: tuple[ProcessedImage, ...]
    spans: tuple[ImageSpan, ...]
    positions: np.ndarray
    offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionProcessor:
    """How a model sees: its tower, and what cuts the tower's pictures into patches."""

    vision: VisionConfig
    patcher: ImageProcessor

    @classmethod
    def of(cls, model: DecoderConfig, folder: str | Path, *, pixels: Pixels | None = None) -> VisionProcessor | None:
        """That of a Hugging Face folder; None for a model of text.

        Args:
            pixels: ``model.min_pixels`` and ``max_pixels``, see :meth:`ImageProcessor.read`.

        Raises:
            ModelError: the files that describe its processors are missing or damaged.
        """
        if model.vision is None:
            return None
        return cls(vision=model.vision, patcher=ImageProcessor.read(model_folder(folder), pixels=pixels))

    def read(self, media: Mapping[str, Sequence[Any]]) -> dict[str, tuple[ProcessedImage, ...]]:
        """Images and videos by kind, cut into patches.

        Raises:
            ValueError: one cannot be shown; says which and why.
        """
        return {
            kind: tuple(
                self._cut(kind, item, f"{kind} {number} of {len(items)}") for number, item in enumerate(items, 1)
            )
            for kind, items in media.items()
        }

    def show(
        self, ids: Sequence[int] | np.ndarray, pictures: Mapping[str, Sequence[ProcessedImage]]
    ) -> MultimodalContext:
        """Finds the places of pictures.

        Args:
            ids: a context. Each placeholder stands as often as the model reads its picture; placeholders of no picture
                are text.
            pictures: by kind, in order of their placeholders.

        Raises:
            ValueError: a picture has no placeholders, or too few.
        """
        ids = np.asarray(ids, np.int32)
        spans = locate(
            self.vision, ids, {kind: [picture.grid for picture in items] for kind, items in pictures.items()}
        )
        positions, offset = rope_positions(self.vision, len(ids), spans)
        multimodal = tuple(pictures[span.kind][span.number] for span in spans)
        return MultimodalContext(ids=ids, pictures=multimodal, spans=tuple(spans), positions=positions, offset=offset)

    def _cut(self, kind: str, item: Any, name: str) -> ProcessedImage:
        try:
            return self.patcher.picture(kind, item)
        except ValueError as error:
            raise ValueError(f"{name} cannot be shown: {error}") from None


class ImageKeys:
    """Numbers for features, from 0 on: features at one place of equal pictures have one number, all others differ."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self.count = 0

    def first(self, picture: ProcessedImage, features: int) -> int:
        """Number of the first of a picture's features; the others follow it."""
        first = self._first.setdefault(picture.digest, self.count)
        if first == self.count:
            self.count += features
        return first

    def keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """int32 [n]: the ids, but where a picture's feature number m takes a place, ``-1 - m``."""
        keys = multimodal.ids.copy()
        for picture, span in zip(multimodal.pictures, multimodal.spans, strict=True):
            features = span.stop - span.start
            keys[span.start : span.stop] = -1 - self.first(picture, features) - np.arange(features)
        return keys
