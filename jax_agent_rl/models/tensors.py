"""Tensors in safetensors files, and samples of tensors, by which two copies of a model are compared.

A file has one tensor for each parameter, or several packed into one, or blocks of 4 bits. A
parameter is read slice by slice, so that no host or device holds more than its part.

Both sides of a comparison sample the same places, which follow from the tensor's shape alone, so
that a copy that was transposed, misnamed, left at zero, rounded or not updated is noticed.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.utils.files import Stamp, file_stamp


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A parameter's part of a tensor.

    Attributes:
        name: of the tensor.
        number: which of its parameters this is, from 0.
        count: parameters in the tensor.
        axis: of the tensor, along which they are packed.
        interleaved: they alternate along the axis, instead of following each other.
        transposed: the tensor's last two axes are the parameter's in the other order.
    """

    name: str
    number: int = 0
    count: int = 1
    axis: int = 0
    interleaved: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        return (
            self.name
            if self.count == 1
            else f"{self.name} (part {self.number + 1} of {self.count})"
        )

    def tensor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the tensor's shape from the parameter's."""
        stored = self._turned(shape)
        stored[self.axis] *= self.count
        return tuple(stored)

    def tensor_index(self, index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
        """Return where the tensor holds a slice of the parameter, perhaps among others' numbers."""
        bounds = self._turned([at.indices(size)[:2] for at, size in zip(index, shape, strict=True)])
        begin, end = bounds[self.axis]
        if self.interleaved:
            bounds[self.axis] = begin * self.count, end * self.count
        else:
            before = self.number * self._turned(shape)[self.axis]
            bounds[self.axis] = before + begin, before + end
        return tuple(slice(*ends) for ends in bounds)

    def unpack(self, found: np.ndarray) -> np.ndarray:
        """Return the parameter's numbers among those at :meth:`tensor_index`."""
        if self.interleaved:
            found = found[(slice(None),) * self.axis + (slice(self.number, None, self.count),)]
        return found.swapaxes(-1, -2) if self.transposed else found

    def pack(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor of all its parameters, in order."""
        stored = [part.swapaxes(-1, -2) if self.transposed else part for part in parts]
        if not self.interleaved:
            return np.concatenate(stored, axis=self.axis)
        shape = [*stored[0].shape]
        shape[self.axis] *= self.count
        return np.stack(stored, axis=self.axis + 1).reshape(shape)

    def _turned(self, sizes: Sequence[Any]) -> list[Any]:
        return [*sizes[:-2], sizes[-1], sizes[-2]] if self.transposed else [*sizes]


Stored = str | Packed
"""A tensor's name, if it holds one parameter, or a part of it."""
Names = Stored | list[Any]
"""Where one parameter is stored, or (nested) each part of a stack."""
Tensors = dict[str, Callable[[], Any]]
"""By name, what opens a tensor without reading it."""


def tensor_name(stored: Stored) -> str:
    """Return the tensor's name."""
    return stored if isinstance(stored, str) else stored.name


def named_tensors(
    parameters: Iterable[tuple[Names, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors under their names from parameters, which may be stacks; packed ones when all parts were there."""
    packed: dict[str, dict[int, np.ndarray]] = {}
    for names, value in parameters:
        for stored, array in unstack(names, value):
            if isinstance(stored, str):
                yield stored, np.ascontiguousarray(array)
                continue
            parts = packed.setdefault(stored.name, {})
            parts[stored.number] = array
            if len(parts) == stored.count:
                del packed[stored.name]
                yield (
                    stored.name,
                    np.ascontiguousarray(stored.pack([parts[i] for i in range(stored.count)])),
                )


def unstack(names: Names, array: Any) -> Iterator[tuple[Stored, Any]]:
    """Yield where each part of an array is stored, and the part; the whole array unless it is a stack."""
    if not isinstance(names, list):
        yield names, array
    else:
        for inner, part in zip(names, array, strict=True):
            yield from unstack(inner, part)


def save_tensors(
    tensors: Mapping[str, np.ndarray], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that whoever may read the folder's other files can read.

    The library lets only the owner read its files: a server under another user could not load an
        exported model.

    Args:
        tensors: by name.
        file: the file.
        metadata: kept in its header; None: nothing.
    """
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(mode)


def require_finite(name: str, tensor: np.ndarray) -> None:
    """Check the numbers of a tensor that is written for others.

    Raises:
        ModelError: some are infinite or no numbers: the tensor's type cannot hold them, or training
            has diverged.
    """
    wrong = tensor.size - int(np.count_nonzero(np.isfinite(tensor)))
    if wrong:
        raise ModelError(
            f"tensor {name!r}: {wrong} of {tensor.size} numbers are not finite in"
            f" {tensor.dtype}{_LIMITS.get(str(tensor.dtype), '')}; write another type (bfloat16,"
            " float32), or look at the weights"
        )


_LIMITS = {"float16": ", which ends at 65504"}

HEAD = "lm_head.weight"
"""The output matrix's name, in every family."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""How the names of embeddings end, with any prefix."""
_ROWS = 4096


def has_own_head(files: Sequence[str | Path]) -> bool:
    """Return whether files hold an output matrix that is not the embeddings, whatever ``tie_word_embeddings`` says.

    transformers and vLLM use such a head although the configuration says tied; equal ones are tied.

    Raises:
        ModelError: a file is missing or damaged.
    """
    paths = [Path(file) for file in files]
    try:
        stamps = [file_stamp(path) for path in paths]
    except OSError as error:
        raise ModelError(
            f"{error.filename} cannot be read ({error}); download or convert the model again"
        ) from error
    return _has_own_head(tuple(paths), tuple(stamps))


@functools.lru_cache(64)
def _has_own_head(files: tuple[Path, ...], stamps: tuple[Stamp, ...]) -> bool:
    """Compare once per content; ``stamps`` tell files apart that were replaced."""
    tensors = open_tensors(files)
    names = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if HEAD not in tensors or len(names) != 1:
        return False
    head, embeddings = tensors[HEAD](), tensors[names[0]]()
    shape = head.get_shape()
    if shape != embeddings.get_shape():
        return True
    for begin in range(0, shape[0], _ROWS):
        rows = slice(begin, min(begin + _ROWS, shape[0]))
        if not np.array_equal(head[rows], embeddings[rows]):
            return True
    return False


def open_tensors(files: Sequence[str | Path]) -> Tensors:
    """Open every tensor of the files; those in MXFP4 under the name of the whole tensor.

    Raises:
        ModelError: a file is missing or damaged, or two files hold a tensor.
    """
    found: Tensors = {}
    for file in files:
        try:
            handle = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} cannot be read ({error}); download or convert the model again"
            ) from error
        for name in handle.keys():
            if name in found:
                raise ModelError(
                    f"{file} holds tensor {name!r}, which another file of the model holds, too;"
                    " remove one"
                )
            found[name] = partial(handle.get_slice, name)
    for name in [name for name in found if name.endswith("_blocks")]:
        if (scales := name.removesuffix("blocks") + "scales") in found:
            found[name.removesuffix("_blocks")] = partial(
                Mxfp4Slice, found.pop(name), found.pop(scales)
            )
    return found


class Mxfp4Slice:
    """A stack of matrices [E, in, out] in MXFP4: blocks of 32 numbers of 4 bits along ``in``, each with an exponent.

    Rouhani et al. 2023, Microscaling data formats for deep learning, arXiv 2310.10537. Read as
    float32.

    Args:
        blocks: opens uint8 [E, out, in / 32, 16], two numbers in each, the low bits first.
        scales: opens uint8 [E, out, in / 32], exponents plus 127.
    """

    _VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    _BLOCK = 32

    def __init__(self, blocks: Callable[[], Any], scales: Callable[[], Any]) -> None:
        self._blocks, self._scales = blocks(), scales()

    def get_shape(self) -> list[int]:
        """Return [E, in, out]."""
        experts, out, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * self._BLOCK, out]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice as float32."""
        experts, (begin, end, _), out = index[0], index[1].indices(self.get_shape()[1]), index[2]
        first, last = begin // self._BLOCK, -(-end // self._BLOCK)
        pairs = self._blocks[experts, out, first:last, :]
        exponents = self._scales[experts, out, first:last].astype(np.int32) - 127
        values = np.concatenate([self._VALUES, -self._VALUES])
        numbers = np.stack([values[pairs & 15], values[pairs >> 4]], axis=-1).reshape(
            *pairs.shape[:3], self._BLOCK
        )
        whole = np.ldexp(numbers, exponents[..., None]).reshape(
            *pairs.shape[:2], (last - first) * self._BLOCK
        )
        return whole[:, :, begin - first * self._BLOCK : end - first * self._BLOCK].swapaxes(1, 2)


def read_slice(
    tensors: Tensors, stored: Stored, index: tuple[slice, ...], shape: tuple[int, ...], where: str
) -> np.ndarray:
    """Read a slice of one parameter.

    Args:
        tensors: opened ones.
        stored: where the parameter is.
        index: of the slice.
        shape: of the parameter.
        where: folder, for messages.

    Raises:
        ModelError: the tensor is missing, unreadable or of another shape.
    """
    name, packed = tensor_name(stored), None if isinstance(stored, str) else stored
    if name not in tensors:
        raise ModelError(
            f"{where}: tensor {name!r} is missing from the safetensors files; download or convert"
            " the model again"
        )
    expected = shape if packed is None else packed.tensor_shape(shape)
    try:
        tensor = tensors[name]()
        found = tuple(tensor.get_shape())
        if found == expected:
            return (
                tensor[index]
                if packed is None
                else packed.unpack(tensor[packed.tensor_index(index, shape)])
            )
    except (
        SafetensorError,
        OSError,
        TypeError,
        AttributeError,
    ) as error:  # the latter: a type numpy lacks
        raise ModelError(
            f"{where}: tensor {name!r} cannot be read ({error}); use float weights"
        ) from error
    raise ModelError(
        f"{where}: {name} has shape {found}, config.json says {expected}; they are of different"
        " models"
    )


ELEMENTS = 128
"""Elements per tensor; a tensor with 2 % of its elements wrong is found with a probability above
0.9."""


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
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            "rms": self.rms,
            "values": self.values.tolist(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TensorSample:
        """Invert :meth:`to_json`."""
        values = np.asarray(saved["values"], np.float32)
        return cls(
            shape=tuple(saved["shape"]), dtype=saved["dtype"], rms=saved["rms"], values=values
        )


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

    async def replica_samples(self) -> Sequence[Mapping[str, TensorSample]]:
        """Sample the tensors of further engines behind this backend, which serve the same weights."""
        ...

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Return the engine's own layer outputs for a context, from the embeddings on; empty if unavailable."""
        ...
