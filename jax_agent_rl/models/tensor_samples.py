"""Samples of tensors, to compare two copies of a model without moving either.

Both sides sample the same places, which follow from the tensor's shape alone, so that a copy that was transposed,
misnamed, left at zero, rounded or not updated is noticed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

ELEMENTS = 128
"""Elements per tensor; a tensor with 2 % of its elements wrong is found with a probability above 0.9."""


@dataclass(frozen=True, kw_only=True)
class TensorSample:
    """A sample of one tensor.

    Attributes:
        shape: as Hugging Face stores it.
        dtype: of the copy, by name.
        rms: root of the mean square of all its elements.
        values: float32 [n], the elements at :func:`places`.
    """

    shape: tuple[int, ...]
    dtype: str
    rms: float
    values: np.ndarray

    @classmethod
    def of(cls, array: Any) -> TensorSample:
        """Sample a whole numpy array."""
        wide = np.asarray(array, np.float32)
        values = wide.reshape(-1)[places(wide.shape)]
        rms = float(np.sqrt(np.mean(np.square(wide, dtype=np.float64)))) if wide.size else 0.0
        return cls(shape=tuple(wide.shape), dtype=str(array.dtype), rms=rms, values=values)

    def to_json(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": self.dtype, "rms": self.rms, "values": self.values.tolist()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TensorSample:
        """Invert :meth:`to_json`."""
        values = np.asarray(saved["values"], np.float32)
        return cls(shape=tuple(saved["shape"]), dtype=saved["dtype"], rms=saved["rms"], values=values)


@dataclass(frozen=True, kw_only=True)
class LayerOutput:
    """Output of one layer for a context of T ids; embeddings, which come first, have ``hidden`` only.

    Attributes:
        hidden: float32 [T, D], the residual stream after the layer.
        keys: float32 [T, K, h], rotated.
        values: float32 [T, K, h].
    """

    hidden: np.ndarray
    keys: np.ndarray | None = None
    values: np.ndarray | None = None


def places(shape: Sequence[int]) -> np.ndarray:
    """Return flat indices int64 [n] of the sampled elements; all of a small tensor."""
    size = math.prod(shape)
    if size <= ELEMENTS:
        return np.arange(size)
    seed = zlib.crc32(repr(tuple(map(int, shape))).encode())
    return np.sort(np.random.default_rng(seed).integers(0, size, ELEMENTS))


@runtime_checkable
class Inspectable(Protocol):
    """A backend that allows inspection of the model it really runs."""

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Sample every tensor served, by its published name; empty if they cannot be read back."""
        ...

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Return the engine's own layer outputs for a context, from the embeddings on; empty if unavailable."""
        ...
