"""A few numbers of each tensor, by which two copies of a model are compared without moving either.

Both sides take the elements at the same places, which follow from the tensor's shape alone, so a copy that was
transposed, put under another name, left at zero, rounded or not updated is told apart from one that is right.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

ELEMENTS = 128
"""Of a tensor; one with a 50th of its elements wrong is found with a probability of over nine tenths."""


@dataclass(frozen=True, kw_only=True)
class TensorSample:
    """What is compared of one tensor.

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
        """Of a whole array of numpy."""
        wide = np.asarray(array, np.float32)
        values = wide.reshape(-1)[places(wide.shape)]
        rms = float(np.sqrt(np.mean(np.square(wide, dtype=np.float64)))) if wide.size else 0.0
        return cls(shape=tuple(wide.shape), dtype=str(array.dtype), rms=rms, values=values)

    def to_json(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": self.dtype, "rms": self.rms, "values": self.values.tolist()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TensorSample:
        """The inverse of :meth:`to_json`."""
        values = np.asarray(saved["values"], np.float32)
        return cls(shape=tuple(saved["shape"]), dtype=saved["dtype"], rms=saved["rms"], values=values)


@dataclass(frozen=True, kw_only=True)
class LayerOutput:
    """What one layer makes of a context of T ids. Of the embeddings, which come first, there is ``hidden`` only.

    Attributes:
        hidden: float32 [T, D], the residual stream behind the layer.
        keys, values: float32 [T, K, h], as attention reads them: keys are rotated.
    """

    hidden: np.ndarray
    keys: np.ndarray | None = None
    values: np.ndarray | None = None


def places(shape: Sequence[int]) -> np.ndarray:
    """Flat indices int64 [n] of the elements that are compared of a tensor; all of a small one."""
    size = math.prod(shape)
    if size <= ELEMENTS:
        return np.arange(size)
    seed = zlib.crc32(repr(tuple(map(int, shape))).encode())
    return np.sort(np.random.default_rng(seed).integers(0, size, ELEMENTS))


@runtime_checkable
class Inspectable(Protocol):
    """What a backend may offer besides: a look at the model that it really runs, for a diagnosis."""

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """A sample of every tensor served, by its published name; empty where they cannot be read back."""
        ...

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """What the engine's own layers make of a context, from the embeddings on; empty where nobody can look."""
        ...
