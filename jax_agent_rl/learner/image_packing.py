"""Images of packed rows.

Trajectories carry images as tools made them. Here they are cut into what the vision tower reads,
whoever sampled the trajectories (in verl's words ``return_multi_modal_inputs: false``). A row holds
every distinct image once, however many of its trajectories show it. Its patches lie one after
another, padded to one of two sizes, so that there are few programs. Rows without images run the
programs of a text model.

Shapes: R rows, T tokens, P patches, N features (P / merge_size²), D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.optimized_params import Arrays
from jax_agent_rl.models.config import VisionConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.image_processor import ProcessedImage
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    ImageKeys,
    MultimodalContext,
    PatchLayout,
    VisionProcessor,
    layout,
)
from jax_agent_rl.types import Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePacking:
    """The layout of images in packed rows.

    Attributes:
        vision_processor: the model's.
        row_patches: maximum patches of a row.
    """

    vision_processor: VisionProcessor
    row_patches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Padded numbers of patches: a quarter of a row's maximum, and all, in whole windows."""
        window = self.vision_processor.vision.window_patches
        sizes = set()
        for part in (4, 1):
            windows = -(-self.row_patches // part // window)  # rounded up
            sizes.add(windows * window)
        return tuple(sorted(sizes))


def image_packing(
    vision_processor: VisionProcessor | None, config: LearnerConfig
) -> ImagePacking | None:
    """Return how a learner's rows hold images; None for a text model.

    Raises:
        ConfigError: tokens of a row lie on several devices, and an image's must not.
    """
    if vision_processor is None:
        return None
    if config.mesh.context > 1:
        raise ConfigError(
            f"learner.mesh.context={config.mesh.context} splits rows within images, which this"
            " learner cannot do; set learner.mesh.context=1 and split over fsdp or tensor, or, to"
            ' train a Qwen3.5 on texts alone, "language_model_only": true in its config.json'
        )
    row_patches = config.row_patches
    if not row_patches:  # as many as a row has tokens for: one for each feature
        row_patches = config.pack_length * vision_processor.vision.merge_size**2
    return ImagePacking(vision_processor=vision_processor, row_patches=row_patches)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImages:
    """The images of R rows.

    Attributes:
        images: of each row.
        feature_index: int32 [R, T], index of the row's feature that replaces a token; -1 for text.
        rope_positions: int32 [R, T, 3].
        packing: the layout of images in rows.
    """

    images: tuple[tuple[ProcessedImage, ...], ...]
    feature_index: np.ndarray
    rope_positions: np.ndarray
    packing: ImagePacking

    def micro_batch(self, begin: int, rows: int) -> dict[str, np.ndarray]:
        """Return arrays of ``rows`` rows from ``begin`` on, padded with empty rows.

        There are none if the rows hold no image.
        """
        end = begin + rows
        row_images: list[Sequence[ProcessedImage]] = list(self.images[begin:end])
        most_patches = max(sum(len(image.patches) for image in row) for row in row_images)
        if not most_patches:
            return {}

        while len(row_images) < rows:
            row_images.append(())
        size = next(size for size in self.packing.sizes if size >= most_patches)
        return {
            **_patch_arrays(self.packing.vision_processor.vision, row_images, size),
            "feature_index": _padded(self.feature_index[begin:end], rows, -1),
            "rope_positions": _padded(self.rope_positions[begin:end], rows, 0),
        }


def blanks(
    micro_batch: Mapping[str, np.ndarray],
    packing: ImagePacking,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield a weightless micro-batch without images, in every shape that images give it."""
    text = {name: value for name, value in micro_batch.items() if name not in _IMAGE_ARRAYS}
    if "term_weight" in text:
        text["term_weight"] = np.zeros_like(text["term_weight"])
    yield text

    positions = text["positions"]
    no_images: list[Sequence[ProcessedImage]] = [()] * len(positions)
    for size in packing.sizes:
        yield {
            **text,
            **_patch_arrays(packing.vision_processor.vision, no_images, size),
            "feature_index": np.full_like(positions, -1),
            "rope_positions": np.repeat(positions[..., None], 3, axis=2),
        }


_IMAGE_ARRAYS = (
    "patches",
    "feature_index",
    "rope_positions",
    *(f"patch_{name}" for name in PatchLayout._fields),
)
"""Names of the arrays that only micro-batches with images have."""


def _patch_arrays(
    vision: VisionConfig,
    rows: Sequence[Sequence[ProcessedImage]],
    size: int,
) -> dict[str, np.ndarray]:
    """Return the patches of rows, [R, P, patch_dim], and their layout.

    Args:
        rows: the images of each row.
        size: P, to which the patches of a row are padded.
    """
    patches = []
    layouts = []
    no_patches = np.zeros((0, vision.patch_dim), np.float32)
    for row in rows:
        row_patches = np.concatenate([no_patches, *(image.patches for image in row)])
        patches.append(_padded(row_patches, size, 0.0))
        layouts.append(layout(vision, [image.grid for image in row], size))

    arrays = {"patches": np.stack(patches)}
    for name in PatchLayout._fields:
        arrays[f"patch_{name}"] = np.stack([getattr(row_layout, name) for row_layout in layouts])
    return arrays


class ImagePacker:
    """The images of all sequences of a batch while rows are made of them.

    Features of all distinct images are numbered through. In the *keys* of a sequence, its token ids
    for packing, ``-1 - number`` of a feature stands in place of the placeholder: see
    ``ImageKeys.keys``.

    Args:
        sequences: in order.

    Attributes:
        keys: int32 [n] for each sequence.

    Raises:
        ValueError: an image cannot be processed, or a sequence has more patches than a row may
            have.
    """

    def __init__(self, packing: ImagePacking, sequences: Sequence[Trajectory]) -> None:
        self._packing = packing
        process = functools.partial(_process_images, packing.vision_processor)
        with ThreadPoolExecutor() as pool:  # scaling an image releases the interpreter lock
            self._contexts = list(pool.map(process, sequences))

        image_keys = ImageKeys()
        self.keys = [image_keys.keys(context) for context in self._contexts]

        distinct: dict[bytes, ProcessedImage] = {}  # by digest, in the order of their features
        for context in self._contexts:
            for image in context.images:
                distinct[image.digest] = image
        self._images = list(distinct.values())

        number_of = {digest: number for number, digest in enumerate(distinct)}
        self._images_of = []  # numbers of each sequence's images
        for context in self._contexts:
            numbers = {number_of[image.digest] for image in context.images}
            self._images_of.append(np.array(sorted(numbers), np.int64))

        merge_size = packing.vision_processor.vision.merge_size
        self._num_patches = np.array([len(image.patches) for image in self._images], np.int64)
        self._num_features = self._num_patches // merge_size**2
        self._first_feature = np.cumsum(self._num_features) - self._num_features
        self._in_row = np.zeros((len(sequences), len(self._images)), bool)  # [rows, images]

        for sequence, numbers in zip(sequences, self._images_of, strict=True):
            needed = int(self._num_patches[numbers].sum())
            if needed > packing.row_patches:
                raise ValueError(
                    f"trajectory {sequence.trajectory_id} shows images of {needed} patches,"
                    f" a row takes {packing.row_patches}; set learner.row_patches >= {needed},"
                    " or lower model.max_pixels"
                )

    def has_room(self, sequence: int, rows: int) -> np.ndarray:
        """Return bool [rows]: whether the images of a sequence fit beside the row's."""
        numbers = self._images_of[sequence]
        in_row = self._in_row[:rows]
        row_patches = in_row @ self._num_patches
        new_patches = ~in_row[:, numbers] @ self._num_patches[numbers]
        return row_patches + new_patches <= self._packing.row_patches

    def add(self, sequence: int, row: int) -> None:
        """Put a sequence into a row."""
        self._in_row[row, self._images_of[sequence]] = True

    def lay_out(
        self,
        keys: np.ndarray,
        positions: np.ndarray,
        paths: Iterable[tuple[int, int, np.ndarray]],
    ) -> RowImages:
        """Return the images of finished rows.

        Args:
            keys: int32 [R, T], of the nodes.
            positions: int32 [R, T], of text.
            paths: row, number and nodes int64 [n] of each sequence.
        """
        feature_index = np.full(keys.shape, -1, np.int32)
        images = []
        for row in range(len(keys)):
            numbers = np.flatnonzero(self._in_row[row])
            images.append(tuple(self._images[number] for number in numbers))

            # Where the features of each image begin in the row's.
            num_features = self._num_features[numbers]
            begin = np.zeros(len(self._images), np.int64)
            begin[numbers] = np.cumsum(num_features) - num_features

            is_image = keys[row] < 0
            features = -1 - keys[row, is_image]
            image = self._image_of(features)
            feature_index[row, is_image] = begin[image] + features - self._first_feature[image]

        rope_positions = np.repeat(positions[..., None], 3, axis=2)
        for row, number, path in paths:
            rope_positions[row, path] = self._contexts[number].positions
        return RowImages(
            images=tuple(images),
            feature_index=feature_index,
            rope_positions=rope_positions,
            packing=self._packing,
        )

    def ids(self, keys: np.ndarray) -> np.ndarray:
        """Return keys as token ids, int32, with placeholders for images."""
        placeholder_of_kind = self._packing.vision_processor.vision.placeholders
        placeholders = np.array([placeholder_of_kind[p.kind] for p in self._images], np.int32)
        is_image = keys < 0
        ids = keys.copy()
        ids[is_image] = placeholders[self._image_of(-1 - keys[is_image])]
        return ids

    def _image_of(self, features: np.ndarray) -> np.ndarray:
        """Return the number of the image that a feature belongs to."""
        return np.searchsorted(self._first_feature, features, side="right") - 1


def _process_images(
    vision_processor: VisionProcessor,
    sequence: Trajectory,
) -> MultimodalContext:
    """Process the images of a sequence; a placeholder that was sampled is text."""
    ids = np.asarray(sequence.prompt_ids + sequence.response_ids, np.int32)
    in_prompt = np.zeros(len(sequence.prompt_ids), bool)
    is_sampled = np.concatenate([in_prompt, np.asarray(sequence.response_mask, bool)])
    try:
        context = vision_processor.make_context(
            np.where(is_sampled, -1, ids),
            vision_processor.read(sequence.multi_modal),
        )
    except ValueError as error:
        raise ValueError(f"trajectory {sequence.trajectory_id}: {error}") from None
    return replace(context, ids=ids)


def _padded(array: np.ndarray, length: int, value: float) -> np.ndarray:
    """Pad the first axis with ``value`` to ``length``."""
    padding = [(0, 0)] * array.ndim
    padding[0] = (0, length - len(array))
    return np.pad(array, padding, constant_values=value)


def encode_images(
    model: Decoder, batch: Arrays, *, remat: str, mesh: Mesh | None
) -> ImageInputs | None:
    """Encode a micro-batch's images inside the differentiated program; None if it holds none."""
    if "patches" not in batch:
        return None
    layout = PatchLayout(*(batch[f"patch_{name}"] for name in PatchLayout._fields))
    features = model.vision(batch["patches"], layout, remat=remat, mesh=mesh)
    return ImageInputs(batch["rope_positions"], features, batch["feature_index"])
