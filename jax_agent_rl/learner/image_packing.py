"""Images of packed rows. Shapes: R rows, T tokens, P patches, N features (P / merge_size²), D hidden.

Trajectories carry images as tools made them; here they are cut into what the tower reads, whoever sampled them (in
verl's words ``return_multi_modal_inputs: false``). A row holds every distinct image once, however many of its
trajectories show it. Its patches lie one after another, padded to one of two sizes, so that there are few programs;
rows without images are those of a model of text.
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
    Layout,
    MultimodalContext,
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
        """Padded numbers of patches: a quarter of a row's most, and all, in whole windows."""
        window = self.vision_processor.vision.window_patches
        return tuple(sorted({-(-self.row_patches // part // window) * window for part in (4, 1)}))


def image_packing(vision_processor: VisionProcessor | None, config: LearnerConfig) -> ImagePacking | None:
    """Return how a learner's rows hold images; None for a text model.

    Raises:
        ConfigError: tokens of a row lie on several devices, and those of an image must not.
    """
    if vision_processor is None:
        return None
    if config.mesh.context > 1:
        raise ConfigError(
            f"learner.mesh.context={config.mesh.context} splits rows within images, which this learner cannot do; "
            "set learner.mesh.context=1 and split over fsdp or tensor"
        )
    most = config.pack_length * vision_processor.vision.merge_size**2  # a token for each feature
    return ImagePacking(vision_processor=vision_processor, row_patches=config.row_patches or most)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImages:
    """The images of R rows.

    Attributes:
        images: of each row.
        feature_index: int32 [R, T], which of its row's features takes a token's place; -1 for text.
        rope_positions: int32 [R, T, 3].
        packing: what they are for.
    """

    images: tuple[tuple[ProcessedImage, ...], ...]
    feature_index: np.ndarray
    rope_positions: np.ndarray
    packing: ImagePacking

    def micro_batch(self, begin: int, rows: int) -> dict[str, np.ndarray]:
        """Return arrays of ``rows`` rows from ``begin`` on, padded with empty ones; none if they hold no image."""
        mine = self.images[begin : begin + rows]
        most = max(sum(len(image.patches) for image in row) for row in mine)
        if not most:
            return {}
        size = next(size for size in self.packing.sizes if size >= most)
        return _arrays(
            self.packing.vision_processor.vision,
            [*mine, *[()] * (rows - len(mine))],
            size,
            feature_index=_padded(self.feature_index[begin : begin + rows], rows, -1),
            rope_positions=_padded(self.rope_positions[begin : begin + rows], rows, 0),
        )


def blanks(micro_batch: Mapping[str, np.ndarray], packing: ImagePacking) -> Iterator[dict[str, np.ndarray]]:
    """Yield a weightless micro-batch without images, in every shape that images give it."""
    weightless = {"term_weight": np.zeros_like(micro_batch["term_weight"])} if "term_weight" in micro_batch else {}
    text = {name: value for name, value in micro_batch.items() if name not in _SHOWN} | weightless
    yield text
    positions = text["positions"]
    for size in packing.sizes:
        yield text | _arrays(
            packing.vision_processor.vision,
            [()] * len(positions),
            size,
            feature_index=np.full_like(positions, -1),
            rope_positions=np.repeat(positions[..., None], 3, axis=2),
        )


_SHOWN = ("patches", "feature_index", "rope_positions", *(f"patch_{name}" for name in Layout._fields))


def _arrays(
    vision: VisionConfig, rows: Sequence[Sequence[ProcessedImage]], size: int, **arrays: np.ndarray
) -> dict[str, np.ndarray]:
    """Add the rows' patches [R, P, patch_dim] and their layout."""
    layouts = [layout(vision, [image.grid for image in row], size) for row in rows]
    stacked = Layout(*map(np.stack, zip(*layouts, strict=True)))
    none = np.zeros((0, vision.patch_dim), np.float32)
    return {
        **arrays,
        "patches": np.stack([_padded(np.concatenate([none, *(x.patches for x in row)]), size, 0.0) for row in rows]),
        **{f"patch_{name}": value for name, value in stacked._asdict().items()},
    }


class ImagePacker:
    """The images of all sequences of a batch while rows are made of them.

    Args:
        packing: what they are for.
        sequences: in order.

    Raises:
        ValueError: an image cannot be processed, or a sequence has more patches than a row may have.
    """

    def __init__(self, packing: ImagePacking, sequences: Sequence[Trajectory]) -> None:
        self._packing = packing
        with ThreadPoolExecutor() as pool:  # scaling an image lets go of the interpreter
            self._shown = list(pool.map(functools.partial(_show, packing.vision_processor), sequences))
        names = ImageKeys()
        self.keys = [names.keys(multimodal) for multimodal in self._shown]
        """For each sequence its ids, int32 [n], in which images have names: see ``ImageKeys.keys``."""
        distinct = {image.digest: image for multimodal in self._shown for image in multimodal.images}
        self._images = list(distinct.values())  # in order of their names
        numbers = {digest: number for number, digest in enumerate(distinct)}
        self._members = [np.array(sorted({numbers[p.digest] for p in s.images}), np.int64) for s in self._shown]
        self._sizes = np.array([len(image.patches) for image in self._images], np.int64)
        self._features = self._sizes // packing.vision_processor.vision.merge_size**2
        self._first = np.cumsum(self._features) - self._features  # name of each image's first feature
        self._there = np.zeros((len(sequences), len(self._images)), bool)  # [rows, images]
        for sequence, members in zip(sequences, self._members, strict=True):
            if (need := int(self._sizes[members].sum())) > packing.row_patches:
                raise ValueError(
                    f"trajectory {sequence.trajectory_id} shows images of {need} patches, a row takes "
                    f"{packing.row_patches}; set learner.row_patches >= {need}, or lower model.max_pixels"
                )

    def has_room(self, which: int, rows: int) -> np.ndarray:
        """Return bool [rows]: where a sequence's images fit beside those already in the row."""
        members = self._members[which]
        there = self._there[:rows]
        new = ~there[:, members] @ self._sizes[members]
        return there @ self._sizes + new <= self._packing.row_patches

    def add(self, which: int, row: int) -> None:
        """Put a sequence into a row."""
        self._there[row, self._members[which]] = True

    def lay_out(
        self, keys: np.ndarray, positions: np.ndarray, located: Iterable[tuple[int, int, np.ndarray]]
    ) -> RowImages:
        """Return the images of finished rows.

        Args:
            keys: int32 [R, T], nodes; names where images stand.
            positions: int32 [R, T], as of text.
            located: row, number and nodes int64 [n] of each sequence.
        """
        index = np.full(keys.shape, -1, np.int32)
        rope = np.repeat(positions[..., None], 3, axis=2)
        images = []
        for row in range(len(keys)):
            there = np.flatnonzero(self._there[row])
            begin = np.zeros(len(self._first), np.int64)  # of each image's features among the row's
            begin[there] = np.cumsum(self._features[there]) - self._features[there]
            multimodal = keys[row] < 0
            names = -1 - keys[row, multimodal]
            image = self._of(names)
            index[row, multimodal] = begin[image] + names - self._first[image]
            images.append(tuple(self._images[number] for number in there))
        for row, which, path in located:
            rope[row, path] = self._shown[which].positions
        return RowImages(images=tuple(images), feature_index=index, rope_positions=rope, packing=self._packing)

    def ids(self, keys: np.ndarray) -> np.ndarray:
        """Return keys as ids, int32, with placeholders where images stand."""
        placeholders = np.array(
            [self._packing.vision_processor.vision.placeholders[p.kind] for p in self._images], np.int32
        )
        ids = keys.copy()
        ids[keys < 0] = placeholders[self._of(-1 - keys[keys < 0])]
        return ids

    def _of(self, names: np.ndarray) -> np.ndarray:
        """Return the number of the image that has a feature of this name."""
        return np.searchsorted(self._first, names, side="right") - 1


def _show(vision_processor: VisionProcessor, sequence: Trajectory) -> MultimodalContext:
    """Process the images of a sequence; a sampled placeholder is text."""
    ids = np.asarray(sequence.prompt_ids + sequence.response_ids, np.int32)
    sampled = np.concatenate([np.zeros(len(sequence.prompt_ids), bool), np.asarray(sequence.response_mask, bool)])
    try:
        multimodal = vision_processor.make_context(
            np.where(sampled, -1, ids), vision_processor.read(sequence.multi_modal)
        )
    except ValueError as error:
        raise ValueError(f"trajectory {sequence.trajectory_id}: {error}") from None
    return replace(multimodal, ids=ids)


def _padded(array: np.ndarray, length: int, value: float) -> np.ndarray:
    """Pad the first axis with ``value`` to ``length``."""
    padding = [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, padding, constant_values=value)


def encode_images(model: Decoder, batch: Arrays, *, remat: str, mesh: Mesh | None) -> ImageInputs | None:
    """Encode a micro-batch's images inside the differentiated program; None if it holds none."""
    if "patches" not in batch:
        return None
    layout = Layout(*(batch[f"patch_{name}"] for name in Layout._fields))
    features = model.vision(batch["patches"], layout, remat=remat, mesh=mesh)
    return ImageInputs(batch["rope_positions"], features, batch["feature_index"])
