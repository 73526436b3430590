"""Contexts with images: where their placeholders are, and the keys that prefix caches compare.

::

    ids         5  <img> <img> <img> <img>  6  <img>      the last one was sampled: it is text
    images         |------- a cat --------|
    keys        5   -1    -2    -3    -4    6  <img>      equal keys mean equal KV
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
    """A context with images or videos.

    Attributes:
        ids: int32 [n].
        images: in order of their placeholders.
        spans: placeholders of each.
        positions: int32 [n, 3], rotary positions.
        offset: rotary position of a later id minus its index.
    """

    ids: np.ndarray
    images: tuple[ProcessedImage, ...]
    spans: tuple[ImageSpan, ...]
    positions: np.ndarray
    offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionProcessor:
    """A vision model's tower configuration and image processor."""

    vision: VisionConfig
    patcher: ImageProcessor

    @classmethod
    def of(cls, model: DecoderConfig, folder: str | Path, *, pixels: Pixels | None = None) -> VisionProcessor | None:
        """Load the processor of a Hugging Face folder; None for a text model.

        Args:
            model: the model's configuration.
            folder: a Hugging Face folder or Hub name.
            pixels: ``model.min_pixels`` and ``max_pixels``, see :meth:`ImageProcessor.read`.

        Raises:
            ModelError: the processor files are missing or damaged.
        """
        if model.vision is None:
            return None
        return cls(vision=model.vision, patcher=ImageProcessor.read(model_folder(folder), pixels=pixels))

    def read(self, media: Mapping[str, Sequence[Any]]) -> dict[str, tuple[ProcessedImage, ...]]:
        """Cut images and videos, given by kind, into patches.

        Raises:
            ValueError: one cannot be processed; says which and why.
        """
        return {
            kind: tuple(
                self._process(kind, item, f"{kind} {number} of {len(items)}") for number, item in enumerate(items, 1)
            )
            for kind, items in media.items()
        }

    def make_context(
        self, ids: Sequence[int] | np.ndarray, images: Mapping[str, Sequence[ProcessedImage]]
    ) -> MultimodalContext:
        """Match images with their placeholders.

        Args:
            ids: a context with one placeholder for each feature of an image; other placeholders are text.
            images: by kind, in order of their placeholders.

        Raises:
            ValueError: an image has no placeholders, or too few.
        """
        ids = np.asarray(ids, np.int32)
        grids = {kind: [image.grid for image in items] for kind, items in images.items()}
        spans = locate(self.vision, ids, grids)
        positions, offset = rope_positions(self.vision, len(ids), spans)
        ordered = tuple(images[span.kind][span.number] for span in spans)
        return MultimodalContext(ids=ids, images=ordered, spans=tuple(spans), positions=positions, offset=offset)

    def _process(self, kind: str, item: Any, name: str) -> ProcessedImage:
        try:
            return self.patcher.process(kind, item)
        except ValueError as error:
            raise ValueError(f"{name} cannot be processed: {error}") from None


class ImageKeys:
    """Numbers image features from 0 on; only the same feature of equal images has the same number."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self.count = 0

    def first(self, image: ProcessedImage, features: int) -> int:
        """Return the number of an image's first feature; the others follow it."""
        first = self._first.setdefault(image.digest, self.count)
        if first == self.count:
            self.count += features
        return first

    def keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """Return int32 [n]: the ids, with ``-1 - m`` in place of the placeholder of feature m."""
        keys = multimodal.ids.copy()
        for image, span in zip(multimodal.images, multimodal.spans, strict=True):
            features = span.stop - span.start
            keys[span.start : span.stop] = -1 - self.first(image, features) - np.arange(features)
        return keys
