"""Images and videos of recorded trajectories, in files that are named by their content.

::

    run/trajectories.jsonl     {"image": ["5f1c…"], "video": [["90ab…", "77d2…"]]}
    run/attachments/5f1c….png  the image; trajectories that show it share the file

An image is stored as PNG, which loses nothing, a video as its frames. A name is the fingerprint of
the pixels, so that an image that is there already is not encoded again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.files import make_folder, read_regular_file, replacing
from jax_agent_rl.utils.fingerprints import PREFIX, fingerprint
from jax_agent_rl.utils.media import as_frames, as_image, png_bytes, read_images

MAX_BYTES = 64_000_000
"""Limit of a file: more than an image of ``utils.media.MAX_PIXELS`` takes."""

References = dict[str, list[Any]]
"""Names of images, and lists of names of videos' frames, by kind, as a record has them."""


class Attachments:
    """The images and videos of a run's trajectories; threads may share it.

    Args:
        folder: where they are; it is made when there is something to put into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # of the files that are written

    def add(self, media: Mapping[str, Sequence[Any]]) -> References:
        """Store images and videos that are not there yet, and return what names them.

        Args:
            media: by kind, as in :class:`~jax_agent_rl.types.Trajectory`.

        Raises:
            StorageError: the disk is full.
        """
        references: References = {}
        for kind, items in media.items():
            names: list[Any] = []
            for item in items:
                if kind == "video":
                    names.append([self._add_image(frame) for frame in as_frames(item)])
                else:
                    names.append(self._add_image(item))
            references[kind] = names
        return references

    def read(self, references: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
        """Return what :meth:`add` stored: images, and videos as uint8 [T, H, W, 3].

        Raises:
            DataError: a file is missing, damaged, or not named by its content.
        """
        media: dict[str, tuple[Any, ...]] = {}
        for kind, names in references.items():
            items: list[Any] = []
            for name in names:
                if kind == "video":
                    items.append(self._read_video(name))
                else:
                    items.append(self._read_image(name))
            media[kind] = tuple(items)
        return media

    def _add_image(self, item: Any) -> str:
        image = as_image(item)
        name = _name(image)
        file = self._file(name)
        with self._lock:
            if not file.exists():
                make_folder(self._folder)
                with replacing(file) as stream:
                    stream.write(png_bytes(image))
        return name

    def _read_image(self, name: str) -> Any:
        file = self._file(name)
        try:
            (image,) = read_images([read_regular_file(file, MAX_BYTES)])
            if _name(image) != name:
                raise ValueError("its pixels are not what it is named by")
            return image
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error

    def _read_video(self, names: Sequence[str]) -> Any:
        frames = [self._read_image(name) for name in names]
        try:
            return as_frames(frames)
        except ValueError as error:
            raise DataError(f"a video of {self._folder} cannot be read: {error}") from error

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.png"


def _name(image: Any) -> str:
    """Return what names an upright RGB image: the fingerprint of its pixels."""
    return fingerprint(np.asarray(image)).removeprefix(PREFIX)
