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

# Of transformers' video processor, where no file says.
_VIDEO_PIXELS: Pixels = (128 * 28 * 28, 768 * 28 * 28)
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
        prefix = f"{self.kind} {self.grid}".encode()
        return hashlib.blake2b(prefix + self.patches.tobytes(), digest_size=16).digest()


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

        override = {}
        if pixels:
            override = {"min_pixels": pixels[0], "max_pixels": pixels[1]}
        try:
            images = read_pretrained(AutoImageProcessor, folder, **override)
            settings = _video_settings(folder)
            frame_settings = {name: settings[name] for name in _FRAME_SETTINGS if name in settings}
            videos = type(images)(size=_size(pixels, settings), **frame_settings)
            return cls(images=images, videos=videos)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the image processor at {folder} cannot be read: {error}") from error

    def count(self, kind: str, item: Any) -> int:
        """Return how many features, and so placeholder ids, an image or video of this size has.

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
        patches = groups * processor.get_number_of_image_patches(height, width, {})
        return patches // processor.merge_size**2

    def process(self, kind: str, item: Any) -> ProcessedImage:
        """Cut one image or video into patches.

        Raises:
            ValueError: it is none, or of a shape the model cannot take.
        """
        import numpy as np

        processor = self._processors[kind]
        if kind == "video":
            frames = list(as_frames(item))
        else:
            frames = [np.asarray(as_image(item))]
        # Explicit, or an image of three rows would be taken for one of three channels.
        processed = processor(images=frames, input_data_format="channels_last", return_tensors="np")
        _, rows, columns = processed["image_grid_thw"][0].tolist()
        patches = processed["pixel_values"]
        if kind == "image":
            return ProcessedImage(kind=kind, patches=patches, grid=(1, rows, columns))

        patches = _group_frames(
            patches, len(frames), processor.temporal_patch_size, processor.patch_size**2
        )
        groups = len(patches) // (rows * columns)
        return ProcessedImage(kind=kind, patches=patches, grid=(groups, rows, columns))


def _group_frames(patches: np.ndarray, frames: int, group: int, pixels: int) -> np.ndarray:
    """Turn patches of still images, where one frame fills a group, into patches of a video.

    The last frame is repeated until its group is full.

    Args:
        patches: [frames · M, C · group · pixels].
        group: frames of one patch.
        pixels: pixels of one frame of a patch.

    Returns:
        [groups · M, C · group · pixels].
    """
    import numpy as np

    channels = patches.shape[1] // (group * pixels)
    stills = patches.reshape(frames, -1, channels, group, pixels)[:, :, :, 0]
    repeats = -frames % group
    stills = np.concatenate([stills, *[stills[-1:]] * repeats])
    grouped = stills.reshape(-1, group, *stills.shape[1:]).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(grouped.reshape(-1, patches.shape[1]))


def _size(pixels: Pixels | None, settings: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the pixel limits of frames, which files give in one of two ways."""
    if pixels is None and settings.get("size"):
        return settings["size"]

    if pixels:
        min_pixels, max_pixels = pixels
    else:
        min_pixels = settings.get("min_pixels", _VIDEO_PIXELS[0])
        max_pixels = settings.get("max_pixels", _VIDEO_PIXELS[1])
    # The image processor calls its pixel limits so, although they are not edges.
    return {"shortest_edge": min_pixels, "longest_edge": max_pixels}


def _video_settings(folder: Path) -> dict[str, Any]:
    """Read video settings from where transformers looks for them, in its order."""
    processor = _read(folder / "processor_config.json")
    if processor.get("video_processor"):
        return processor["video_processor"]
    for name in _VIDEO_FILES:
        settings = _read(folder / name)
        if settings:
            return settings
    return {}


def _read(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))
