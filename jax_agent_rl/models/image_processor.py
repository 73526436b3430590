"""How an image or a video becomes the patches a vision model reads.

Counting an image's ids (``chat.special_tokens``) and computing on its pixels share one
implementation: transformers' image processor of the model's folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.utils.hub import read_pretrained
from jax_agent_rl.utils.media import as_frames, as_image

if TYPE_CHECKING:
    import numpy as np

Pixels = tuple[int, int]
"""(fewest, most) pixels an image is scaled to."""
Grid = tuple[int, int, int]
"""Patches of an item: groups of frames, rows, columns."""

_VIDEO_PIXELS: Pixels = (
    128 * 28 * 28,
    768 * 28 * 28,
)  # of transformers' video processor, where no file says
_VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_FRAME_SETTINGS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedImage:
    """An image or a video as a vision model reads it.

    Attributes:
        kind: ``image`` or ``video``.
        patches: float32 [P, C · frames · p · p], P the product of ``grid``; patches that become one
            feature are adjacent.
        grid: groups, rows and columns of patches.
    """

    kind: str
    patches: np.ndarray
    grid: Grid

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal patches."""
        head = f"{self.kind} {self.grid}".encode()
        return hashlib.blake2b(head + self.patches.tobytes(), digest_size=16).digest()


class ImageProcessor:
    """Cuts images and videos into patches.

    Args:
        images: transformers' image processor of the model.
        videos: the same with the settings for frames.
    """

    def __init__(self, *, images: Any, videos: Any) -> None:
        self._processors = {"image": images, "video": videos}

    @classmethod
    def read(cls, folder: Path, *, pixels: Pixels | None = None) -> ImageProcessor:
        """Load the processors of a Hugging Face folder.

        Args:
            folder: with ``preprocessor_config.json``.
            pixels: overrides the folder's limits.

        Raises:
            ModelError: the processor files are missing or damaged.
        """
        from transformers import AutoImageProcessor

        override = dict(zip(("min_pixels", "max_pixels"), pixels, strict=True)) if pixels else {}
        try:
            images = read_pretrained(AutoImageProcessor, folder, **override)
            frames = _video_settings(folder)
            own = {name: frames[name] for name in _FRAME_SETTINGS if name in frames}
            return cls(images=images, videos=type(images)(size=_size(pixels, frames), **own))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the image processor at {folder} cannot be read: {error}") from error

    def count(self, kind: str, item: Any) -> int:
        """Return the features, and so placeholder ids, of one image or video, from its size alone.

        Raises:
            ValueError: it is none, or of a shape the model cannot take.
        """
        processor = self._processors[kind]
        if kind == "video":
            frames, height, width, _ = as_frames(item).shape
            groups = -(-frames // processor.temporal_patch_size)
        else:
            width, height = as_image(item).size
            groups = 1
        return (
            groups
            * processor.get_number_of_image_patches(height, width, {})
            // processor.merge_size**2
        )

    def process(self, kind: str, item: Any) -> ProcessedImage:
        """Cut one image or video into patches.

        Raises:
            ValueError: it is none, or of a shape the model cannot take.
        """
        import numpy as np

        processor = self._processors[kind]
        frames = list(as_frames(item)) if kind == "video" else [np.asarray(as_image(item))]
        # Explicit, or an image of three rows would be taken for one of three channels.
        cut = processor(images=frames, input_data_format="channels_last", return_tensors="np")
        _, rows, columns = cut["image_grid_thw"][0].tolist()
        patches = cut["pixel_values"]
        if kind == "image":
            return ProcessedImage(kind=kind, patches=patches, grid=(1, rows, columns))
        patches = _grouped(
            patches, len(frames), processor.temporal_patch_size, processor.patch_size**2
        )
        return ProcessedImage(
            kind=kind, patches=patches, grid=(len(patches) // (rows * columns), rows, columns)
        )


def _grouped(patches: np.ndarray, frames: int, group: int, pixels: int) -> np.ndarray:
    """Turn patches of still images, where one frame fills a group, into patches of a video; repeat the last frame.

    Args:
        patches: [frames · M, C · group · pixels].
        frames: number of frames.
        group: frames of one patch.
        pixels: pixels of one frame of a patch.

    Returns:
        [groups · M, C · group · pixels].
    """
    import numpy as np

    stills = patches.reshape(frames, -1, patches.shape[1] // (group * pixels), group, pixels)[
        :, :, :, 0
    ]
    stills = np.concatenate([stills, *[stills[-1:]] * (-frames % group)])
    grouped = stills.reshape(-1, group, *stills.shape[1:]).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(grouped.reshape(-1, patches.shape[1]))


def _size(pixels: Pixels | None, frames: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the pixel limits of frames, which files give in one of two ways."""
    if pixels is None and frames.get("size"):
        return frames["size"]
    fewest, most = pixels or (
        frames.get("min_pixels", _VIDEO_PIXELS[0]),
        frames.get("max_pixels", _VIDEO_PIXELS[1]),
    )
    return {"shortest_edge": fewest, "longest_edge": most}


def _video_settings(folder: Path) -> dict[str, Any]:
    """Read video settings from where transformers looks for them, in its order."""
    if (whole := _read(folder / "processor_config.json")).get("video_processor"):
        return whole["video_processor"]
    return next((settings for name in _VIDEO_FILES if (settings := _read(folder / name))), {})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
