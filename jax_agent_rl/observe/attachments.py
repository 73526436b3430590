"""What records have no room for, in files that are named by their content.

::

    run/trajectories.jsonl             {"image": ["5f1c…"], "video": [["90ab…", "77d2…"]]}
    run/attachments/5f1c….png          the image; trajectories that show it share the file
    run/attachments/c03e….safetensors  arrays that the learner read, see ``observe.learner_inputs``

An image is stored as PNG, which loses nothing, a video as its frames. A name is the fingerprint of
the pixels, so that an image that is there already is not encoded again. Arrays are named by the
bytes of their file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.learner_inputs import learner_inputs, with_learner_inputs
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.files import make_folder, read_regular_file, replacing
from jax_agent_rl.utils.fingerprints import PREFIX, digest, fingerprint
from jax_agent_rl.utils.media import as_frames, as_image, png_bytes, read_images

MAX_BYTES = 64_000_000
"""Limit of an image's file: more than one of ``utils.media.MAX_PIXELS`` takes."""

MAX_ARRAY_BYTES = 1 << 30
"""Limit of a file of arrays: 8 experts in each of 60 layers, for two million ids."""

References = dict[str, list[Any]]
"""Names of images, and lists of names of videos' frames, by kind, as a record has them."""


class Attachments:
    """Images, videos and arrays of a run's trajectories; threads may share it.

    What was stored once is known until :meth:`forget`, so that it is neither read nor encoded
    again, however many trajectories show it.

    Args:
        folder: where they are; it is made when there is something to put into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # of the files that are written
        # By id of an object, the object and what names it. It is held, or its id might become
        # another object's.
        self._stored: dict[int, tuple[Any, Any]] = {}

    def forget(self) -> None:
        """Let go of what was stored: its records are written."""
        self._stored.clear()

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
                    names.append(self._once(item, self._add_video))
                else:
                    names.append(self._once(item, self._add_image))
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

    def add_learner_inputs(self, trajectory: Trajectory) -> str | None:
        """Store what the learner reads of a trajectory beside its record.

        Returns:
            what names it; None if there is nothing.

        Raises:
            StorageError: the disk is full.
        """
        return self._once(trajectory, self._add_arrays)

    def read_learner_inputs(self, name: str, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory, restored from its record, with what a name stands for.

        Raises:
            DataError: the file is missing, damaged, not named by its content, or not of this
                trajectory.
        """
        file = self._folder / f"{name}.safetensors"
        try:
            data = read_regular_file(file, MAX_ARRAY_BYTES)
            if _name_of_bytes(data) != name:
                raise ValueError("its content is not what it is named by")
            return with_learner_inputs(trajectory, load(data))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(
                f"{file}, which {trajectory.trajectory_id} was learned from, cannot be read:"
                f" {error}"
            ) from error

    def _once(self, item: Any, add: Callable[[Any], Any]) -> Any:
        """Return what names an item, which is stored if this has not been done."""
        known = self._stored.get(id(item))
        if known is not None:
            return known[1]
        name = add(item)
        self._stored[id(item)] = (item, name)
        return name

    def _add_arrays(self, trajectory: Trajectory) -> str | None:
        arrays = learner_inputs(trajectory)
        if not arrays:
            return None
        data = save(arrays)
        name = _name_of_bytes(data)
        self._write(self._folder / f"{name}.safetensors", lambda: data)
        return name

    def _add_video(self, item: Any) -> list[str]:
        return [self._add_image(frame) for frame in as_frames(item)]

    def _add_image(self, item: Any) -> str:
        image = as_image(item)
        name = _name(image)
        self._write(self._file(name), lambda: png_bytes(image))
        return name

    def _write(self, file: Path, encode: Callable[[], bytes]) -> None:
        """Write a file that is not there yet."""
        with self._lock:
            if not file.exists():
                make_folder(self._folder)
                with replacing(file) as stream:
                    stream.write(encode())

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


def _name_of_bytes(data: bytes) -> str:
    return digest(data).removeprefix(PREFIX)
