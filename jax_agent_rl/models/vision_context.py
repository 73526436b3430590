"""Contexts with images: their placeholders, rotary positions, cache keys, and the tower's indices.

All is computed on the host. An image of 1 x 2 x 2 features::

    ids      … <vision_start> <image> <image> <image> <image> <vision_end> <image> …
    keys              -         -1      -2      -3      -4         -       <image>
    time              7          8       8       8       8        10         11
    row               7          8       8       9       9        10         11
    column            7          8       9       8       9        10         11

Prefix caches compare the keys: equal keys mean equal KV. The last ``<image>`` was sampled: it is
text. Text goes on after the largest number so far, as Qwen-VL models were trained (Wang et al.
2024, Qwen2-VL, arXiv 2409.12191, section 2.1; Bai et al. 2025, Qwen2.5-VL, arXiv 2502.13923,
section 2.1.3, for the time of frames) and as vLLM and transformers before version 5 have it.
(transformers 5 goes on after rows and columns alone, so that the text after a video of more groups
than rows would stand before its end.)

Shapes: T tokens, P patches, N features, N = P / merge_size².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_agent_rl.models.config import DecoderConfig, VisionConfig
from jax_agent_rl.models.image_processor import Grid, ImageProcessor, Pixels, ProcessedImage
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.media import FRAMES_PER_SECOND


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
    def of(
        cls, model: DecoderConfig, folder: str | Path, *, pixels: Pixels | None = None
    ) -> VisionProcessor | None:
        """Load the processor of a Hugging Face folder; None for a text model.

        Args:
            folder: a Hugging Face folder or Hub name.
            pixels: ``model.min_pixels`` and ``max_pixels``, see :meth:`ImageProcessor.read`.

        Raises:
            ModelError: the processor files are missing or damaged.
        """
        if model.vision is None:
            return None
        patcher = ImageProcessor.read(model_folder(folder), pixels=pixels)
        return cls(vision=model.vision, patcher=patcher)

    def read(self, media: Mapping[str, Sequence[Any]]) -> dict[str, tuple[ProcessedImage, ...]]:
        """Cut images and videos, given by kind, into patches.

        Raises:
            ValueError: one cannot be processed; says which and why.
        """
        processed = {}
        for kind, items in media.items():
            images = []
            for number, item in enumerate(items, 1):
                images.append(self._process(kind, item, f"{kind} {number} of {len(items)}"))
            processed[kind] = tuple(images)
        return processed

    def make_context(
        self, ids: Sequence[int] | np.ndarray, images: Mapping[str, Sequence[ProcessedImage]]
    ) -> MultimodalContext:
        """Match images with their placeholders.

        Args:
            ids: a context with one placeholder for each feature of an image; other placeholders are
                text.
            images: by kind, in order of their placeholders.

        Raises:
            ValueError: an image has no placeholders, or too few.
        """
        ids = np.asarray(ids, np.int32)
        grids = {kind: [image.grid for image in items] for kind, items in images.items()}
        spans = locate(self.vision, ids, grids)
        positions, offset = rope_positions(self.vision, len(ids), spans)
        ordered = tuple(images[span.kind][span.number] for span in spans)
        return MultimodalContext(
            ids=ids, images=ordered, spans=tuple(spans), positions=positions, offset=offset
        )

    def _process(self, kind: str, item: Any, name: str) -> ProcessedImage:
        try:
            return self.patcher.process(kind, item)
        except ValueError as error:
            raise ValueError(f"{name} cannot be processed: {error}") from None


class ImageKeys:
    """Numbers image features from 0 on; only the same feature of equal images has one number."""

    def __init__(self) -> None:
        self._first_by_digest: dict[bytes, int] = {}
        self.count = 0

    def first(self, image: ProcessedImage, features: int) -> int:
        """Return the number of an image's first feature; the others follow it."""
        first = self._first_by_digest.setdefault(image.digest, self.count)
        is_new = first == self.count
        if is_new:
            self.count += features
        return first

    def keys(self, multimodal: MultimodalContext) -> np.ndarray:
        """Return int32 [n]: the ids, with ``-1 - m`` in place of the placeholder of feature m."""
        keys = multimodal.ids.copy()
        for image, span in zip(multimodal.images, multimodal.spans, strict=True):
            features = span.stop - span.start
            keys[span.start : span.stop] = -1 - self.first(image, features) - np.arange(features)
        return keys


Array = Any
"""numpy's on the host, jax's within a program."""


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """The placeholders of one item.

    Attributes:
        kind: ``image`` or ``video``.
        number: which of its kind, from 0.
        start: index of the first in the ids.
        stop: index after the last.
        grid: groups, rows and columns of features.
    """

    kind: str
    number: int
    start: int
    stop: int
    grid: Grid


class PatchLayout(NamedTuple):
    """Index arrays of a tower's patches, see :func:`layout`; patches are ordered by window.

    Attributes:
        order: int32 [.., N], the feature at each place of the tower's rows.
        restore: int32 [.., N], the place of each feature.
        windows: int32 [.., P], window of each patch; -1 for padding.
        frames: int32 [.., P], image or group of frames of each patch; -1 for padding.
        coordinates: int32 [.., P, 2], row and column of a patch in its image.
        sizes: int32 [.., P, 2], rows and columns of its image; 1 for padding.
    """

    order: Array
    restore: Array
    windows: Array
    frames: Array
    coordinates: Array
    sizes: Array


class ImageInputs(NamedTuple):
    """Image features for a decoder, beside the ids of B rows.

    Attributes:
        rope_positions: int32 [B, T, 3], time, row and column of every token, text included.
        features: [B, N, feature_size], from ``models.vision_tower``.
        feature_index: int32 [B, T], the feature at each token; -1 for text.
    """

    rope_positions: Array
    features: Array
    feature_index: Array


def merged(vision: VisionConfig, grid: Grid) -> Grid:
    """Return the grid of features of a grid of patches."""
    return grid[0], grid[1] // vision.merge_size, grid[2] // vision.merge_size


def locate(
    vision: VisionConfig, ids: Sequence[int] | np.ndarray, grids: Mapping[str, Sequence[Grid]]
) -> list[ImageSpan]:
    """Return the placeholders of each item, in order of the ids.

    An item takes the first run of its placeholder that is long enough and not taken yet. A
    placeholder in a shorter run, or behind the last item, is text: a model may sample any id.

    Args:
        grids: of patches, by kind, items in order of their placeholders.

    Raises:
        ValueError: an item finds no such run.
    """
    ids = np.asarray(ids)
    spans: list[ImageSpan] = []
    for kind, items in grids.items():
        spans += _spans_of_kind(vision, ids, kind, items)
    return sorted(spans, key=lambda span: span.start)


def _spans_of_kind(
    vision: VisionConfig, ids: np.ndarray, kind: str, items: Sequence[Grid]
) -> list[ImageSpan]:
    """Return the placeholders of each item of one kind, see :func:`locate`."""
    placeholder = vision.placeholders[kind]
    runs = _runs(ids == placeholder)
    spans: list[ImageSpan] = []
    for number, item in enumerate(items):
        grid = merged(vision, item)
        count = int(np.prod(grid))
        while runs and runs[0][1] - runs[0][0] < count:
            runs.pop(0)
        if not runs:
            raise ValueError(
                f"{kind} {number + 1} of {len(items)} takes {count} placeholders (id {placeholder})"
                " in a row, and the ids hold no such run for it; they must be expanded"
                " (ChatCodec.expand_media) with the same model.max_pixels"
            )

        # The next item may follow in the same run.
        begin, end = runs[0]
        stop = begin + count
        spans.append(ImageSpan(kind=kind, number=number, start=begin, stop=stop, grid=grid))
        runs[0] = (stop, end)
    return spans


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return begin and end of each run of true values."""
    padded = np.concatenate([[False], mask, [False]])
    edges = np.flatnonzero(np.diff(padded.astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def rope_positions(
    vision: VisionConfig, length: int, spans: Sequence[ImageSpan]
) -> tuple[np.ndarray, int]:
    """Return the rotary positions of a sequence.

    Args:
        length: T.
        spans: items of the sequence, from :func:`locate`.

    Returns:
        int32 [T, 3]: time, row, column of each token; and the offset of later text, whose token at
        index ``i >= T`` has position ``i + offset`` in all three.
    """
    positions = np.empty((length, 3), np.int32)
    text_begin = 0  # index of the first token that has no position yet
    text_position = 0  # its position
    for span in spans:
        text_length = span.start - text_begin
        positions[text_begin : span.start] = text_position + np.arange(text_length)[:, None]
        text_position += text_length

        span_positions = text_position + _feature_positions(vision, span)
        positions[span.start : span.stop] = span_positions
        text_position = int(span_positions.max()) + 1
        text_begin = span.stop
    positions[text_begin:] = text_position + np.arange(length - text_begin)[:, None]
    return positions, text_position - text_begin


def _feature_positions(vision: VisionConfig, span: ImageSpan) -> np.ndarray:
    """Return positions int [N, 3] of an item's features, from zero."""
    positions = np.indices(span.grid).reshape(3, -1).T
    if span.kind == "video":
        # Without a time step there is no placeholder for a video.
        assert vision.tokens_per_second is not None
        step = vision.tokens_per_second * vision.temporal_patch_size / FRAMES_PER_SECOND
        positions[:, 0] = (positions[:, 0] * step).astype(int)
    return positions


def feature_index(length: int, spans: Sequence[ImageSpan], starts: Sequence[int]) -> np.ndarray:
    """Return int32 [T]: the feature at each token, -1 for text.

    Args:
        length: T.
        spans: items of the sequence.
        starts: index of each one's first feature, in the same order.
    """
    index = np.full(length, -1, np.int32)
    for span, start in zip(spans, starts, strict=True):
        index[span.start : span.stop] = start + np.arange(span.stop - span.start)
    return index


def layout(vision: VisionConfig, grids: Sequence[Grid], patches: int) -> PatchLayout:
    """Return the layout of several items' patches, concatenated and padded at the end.

    Args:
        grids: of patches, one per item.
        patches: P, a multiple of ``vision.window_patches``.

    Raises:
        ValueError: P is not such a multiple, or less than the number of patches.
    """
    total = sum(int(np.prod(grid)) for grid in grids)
    if patches % vision.window_patches or patches < total:
        raise ValueError(
            f"{total} patches cannot be padded to {patches}; it must be a multiple of"
            f" {vision.window_patches} and hold them all"
        )
    unit = vision.merge_size**2  # patches of a feature
    count = patches // unit
    order = np.arange(count, dtype=np.int32)
    windows = np.full((count, unit), -1, np.int32)
    frames = np.full((count, unit), -1, np.int32)
    coordinates = np.zeros((count, unit, 2), np.int32)
    sizes = np.ones((count, unit, 2), np.int32)
    within_feature = np.indices((vision.merge_size, vision.merge_size)).reshape(2, -1).T

    begin = 0  # first feature of the item
    for grid in grids:
        group, row, column = np.indices(merged(vision, grid)).reshape(3, -1)
        window = _number_rows(group, row // vision.window_side, column // vision.window_side)
        by_window = np.argsort(window, kind="stable")
        item = slice(begin, begin + len(by_window))

        order[item] = begin + by_window
        # Windows and frames of all items are numbered one after another.
        windows[item] = window[by_window, None] + windows.max(initial=-1) + 1
        frames[item] = group[by_window, None] + frames.max(initial=-1) + 1
        corners = np.stack([row, column], -1)[by_window, None] * vision.merge_size
        coordinates[item] = corners + within_feature
        sizes[item] = grid[1:]
        begin = item.stop

    return PatchLayout(
        order=order,
        restore=np.argsort(order).astype(np.int32),
        windows=windows.reshape(-1),
        frames=frames.reshape(-1),
        coordinates=coordinates.reshape(-1, 2),
        sizes=sizes.reshape(-1, 2),
    )


def _number_rows(*columns: np.ndarray) -> np.ndarray:
    """Return numbers for the rows of some columns, in sorted order; equal rows share one."""
    rows = np.stack(columns, -1)
    _, numbers = np.unique(rows, axis=0, return_inverse=True)
    return numbers.reshape(-1)
