"""Tensors in safetensors files, and samples of tensors, to compare two copies of a model.

A file has one tensor for each parameter, or several parameters packed into one tensor, or blocks of
4 or 8 bits. A parameter is read slice by slice, so that no host or device holds more than its part.

Both sides of a comparison sample the same places, which follow from the tensor's shape alone, so
that a copy that was transposed, misnamed, left at zero, rounded or not updated is noticed.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
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
        if self.count == 1:
            return self.name
        return f"{self.name} (part {self.number + 1} of {self.count})"

    def tensor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the tensor's shape from the parameter's."""
        tensor_shape = self._tensor_order(shape)
        tensor_shape[self.axis] *= self.count
        return tuple(tensor_shape)

    def tensor_index(self, index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
        """Return where the tensor holds a slice of the parameter.

        If parameters are interleaved, numbers of the others are also there; see :meth:`unpack`.
        """
        bounds = []
        for part, size in zip(index, shape, strict=True):
            begin, end, _ = part.indices(size)
            bounds.append((begin, end))
        bounds = self._tensor_order(bounds)

        begin, end = bounds[self.axis]
        if self.interleaved:
            bounds[self.axis] = (begin * self.count, end * self.count)
        else:
            offset = self.number * self._tensor_order(shape)[self.axis]
            bounds[self.axis] = (offset + begin, offset + end)
        return tuple(slice(*ends) for ends in bounds)

    def unpack(self, numbers: np.ndarray) -> np.ndarray:
        """Return the parameter's numbers among the ones at :meth:`tensor_index`."""
        if self.interleaved:
            every_nth = slice(self.number, None, self.count)
            numbers = numbers[(*[slice(None)] * self.axis, every_nth)]
        return self._transpose(numbers)

    def pack(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor of all its parameters, in order."""
        stored = [self._transpose(part) for part in parts]
        if not self.interleaved:
            return np.concatenate(stored, axis=self.axis)
        shape = [*stored[0].shape]
        shape[self.axis] *= self.count
        return np.stack(stored, axis=self.axis + 1).reshape(shape)

    def _transpose(self, array: np.ndarray) -> np.ndarray:
        if not self.transposed:
            return array
        return array.swapaxes(-1, -2)

    def _tensor_order(self, axes: Sequence[Any]) -> list[Any]:
        """Return what is known of each of the parameter's axes, in the order of the tensor's."""
        if not self.transposed:
            return [*axes]
        return [*axes[:-2], axes[-1], axes[-2]]


Stored = str | Packed
"""A tensor's name, if it holds one parameter, or a part of it."""
Names = Stored | list[Any]
"""Where one parameter is stored, or (nested) each part of a stack."""
Tensors = dict[str, Callable[[], Any]]
"""By name, what opens a tensor without reading it."""


_JOIN = ".eh_proj.weight"


def of_prediction_layers(names: Collection[str]) -> set[str]:
    """Return the tensors of layers that predict further tokens, which are left out.

    Such a layer stands behind the others and has a matrix that joins a hidden state with the
    embedding of the next token (DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Args:
        names: of all tensors of a model's files.
    """
    layers = []
    for name in names:
        if name.endswith(_JOIN):
            layers.append(name.removesuffix(_JOIN) + ".")
    return {name for name in names if name.startswith(tuple(layers))}


def tensor_name(stored: Stored) -> str:
    """Return the tensor's name."""
    return stored if isinstance(stored, str) else stored.name


def named_tensors(
    parameters: Iterable[tuple[Names, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors under their names from parameters, which may be stacks.

    A packed tensor follows the last of its parameters.
    """
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
                tensor = stored.pack([parts[i] for i in range(stored.count)])
                yield stored.name, np.ascontiguousarray(tensor)


def unstack(names: Names, array: Any) -> Iterator[tuple[Stored, Any]]:
    """Yield where each part of an array is stored, and the part.

    An array that is not a stack is one part.
    """
    if not isinstance(names, list):
        yield names, array
        return
    for part_names, part in zip(names, array, strict=True):
        yield from unstack(part_names, part)


def save_tensors(
    tensors: Mapping[str, np.ndarray], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any new file in its folder.

    The library lets only the owner read its files: a server under another user could not load an
    exported model.

    Args:
        metadata: more fields of its header.
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
    not_finite = tensor.size - int(np.count_nonzero(np.isfinite(tensor)))
    if not_finite:
        limit = _LIMITS.get(str(tensor.dtype), "")
        raise ModelError(
            f"tensor {name!r}: {not_finite} of {tensor.size} numbers are not finite in"
            f" {tensor.dtype}{limit}; write another type (bfloat16, float32), or look at the"
            " weights"
        )


_LIMITS = {"float16": ", which ends at 65504"}

HEAD = "lm_head.weight"
"""The output matrix's name, in every family."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""How the names of embeddings end, with any prefix."""
_ROWS = 4096
"""Rows of two matrices that are compared at a time."""


def has_own_head(files: Sequence[str | Path]) -> bool:
    """Return whether files hold an output matrix that differs from the embeddings.

    transformers and vLLM use such a head although ``tie_word_embeddings`` is true. A head that
    equals the embeddings is tied to them.

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
    """Compare once per content; ``stamps`` tell replaced files apart."""
    tensors = open_tensors(files)
    names = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if HEAD not in tensors or len(names) != 1:
        return False
    head = tensors[HEAD]()
    embeddings = tensors[names[0]]()
    shape = head.get_shape()
    if shape != embeddings.get_shape():
        return True
    for begin in range(0, shape[0], _ROWS):
        rows = slice(begin, min(begin + _ROWS, shape[0]))
        if not np.array_equal(head[rows], embeddings[rows]):
            return True
    return False


def open_tensors(files: Sequence[str | Path]) -> Tensors:
    """Open every tensor of the files, scaled if it has scales.

    A tensor in MXFP4 has its name without ``_blocks``.

    Raises:
        ModelError: a file is missing or damaged, or two files hold a tensor.
    """
    tensors: Tensors = {}
    file_of_tensor: dict[str, str | Path] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} cannot be read ({error}); download or convert the model again"
            ) from error
        names = handle.keys()  # safetensors' file is not a mapping
        for name in names:
            if name in tensors:
                raise ModelError(
                    f"{file} holds tensor {name!r}, which another file of the model also holds;"
                    " remove one"
                )
            tensors[name] = partial(handle.get_slice, name)
            file_of_tensor[name] = file

    block_names = [name for name in tensors if name.endswith("_blocks")]
    for blocks in block_names:
        name = blocks.removesuffix("_blocks")
        scales = f"{name}_scales"
        if scales in tensors:
            tensors[name] = partial(Mxfp4Slice, tensors.pop(blocks), tensors.pop(scales))

    places: dict[str | Path, dict[str, _Place]] = {}  # by file, then tensor
    scale_names = [name for name in tensors if name.endswith("_scale_inv")]
    for scales in scale_names:
        name = scales.removesuffix("_scale_inv")
        if name in tensors:
            file = file_of_tensor[name]
            if file not in places:
                places[file] = _tensor_places(file)
            tensors[name] = partial(Fp8Slice, places[file][name], tensors.pop(scales))
    return tensors


def split_experts(tensors: Tensors) -> Tensors:
    """Give each expert's matrices names of their own, where files have them in one tensor.

    A tensor ``….experts.gate_up_proj`` [E, 2 F, D] has gates, then ups, ``….experts.down_proj``
    [E, D, F] has downs.
    """
    split: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        modules = _EXPERT_MODULES.get(part)
        if modules is None or not prefix.endswith(".experts"):
            split[name] = tensor
            continue
        experts, rows, _ = tensor().get_shape()
        size = rows // len(modules)
        for expert in range(experts):
            for number, module in enumerate(modules):
                matrix = partial(ExpertSlice, tensor, expert, number * size, size)
                split[f"{prefix}.{expert}.{module}.weight"] = matrix
    return split


_EXPERT_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertSlice:
    """A matrix [rows, in] of one expert in a tensor of all of them.

    Args:
        tensor: opens [E, all rows, in].
        expert: its number.
        first_row: of the matrix among the expert's.
        rows: of the matrix.
    """

    def __init__(self, tensor: Callable[[], Any], expert: int, first_row: int, rows: int) -> None:
        self._tensor = tensor()
        self._expert = expert
        self._first_row = first_row
        self._rows = rows

    def get_shape(self) -> list[int]:
        """Return [rows, in]."""
        return [self._rows, self._tensor.get_shape()[2]]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice."""
        rows, columns = index
        begin, end, _ = rows.indices(self._rows)
        tensor_rows = slice(self._first_row + begin, self._first_row + end)
        return self._tensor[self._expert : self._expert + 1, tensor_rows, columns][0]


class Mxfp4Slice:
    """A stack of matrices [E, in, out] in MXFP4, read as float32.

    Numbers have 4 bits, and blocks of 32 numbers along ``in`` share an exponent (Rouhani et al.
    2023, Microscaling data formats for deep learning, arXiv 2310.10537).

    Args:
        blocks: opens uint8 [E, out, in / 32, 16], two numbers in each, the low bits first.
        scales: opens uint8 [E, out, in / 32], exponents plus 127.
    """

    _VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    _BLOCK = 32

    def __init__(self, blocks: Callable[[], Any], scales: Callable[[], Any]) -> None:
        self._blocks = blocks()
        self._scales = scales()

    def get_shape(self) -> list[int]:
        """Return [E, in, out]."""
        experts, out, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * self._BLOCK, out]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice as float32."""
        experts, inputs, out = index
        begin, end, _ = inputs.indices(self.get_shape()[1])
        first_block = begin // self._BLOCK
        end_block = -(-end // self._BLOCK)  # rounded up
        pairs = self._blocks[experts, out, first_block:end_block, :]
        exponents = self._scales[experts, out, first_block:end_block].astype(np.int32) - 127

        values = np.concatenate([self._VALUES, -self._VALUES])  # the high bit is the sign
        numbers = np.stack([values[pairs & 15], values[pairs >> 4]], axis=-1)
        numbers = numbers.reshape(*pairs.shape[:3], self._BLOCK)
        blocks = np.ldexp(numbers, exponents[..., None])

        offset = first_block * self._BLOCK
        rows = blocks.reshape(*pairs.shape[:2], end_block * self._BLOCK - offset)
        return rows[:, :, begin - offset : end - offset].swapaxes(1, 2)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a file holds the bytes of a tensor.

    Attributes:
        file: the safetensors file.
        dtype: as safetensors calls it.
        shape: of the tensor.
        offset: of its first byte in the file.
    """

    file: str | Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _tensor_places(file: str | Path) -> dict[str, _Place]:
    """Return the place of every tensor of a file that safetensors could open.

    A file begins with the length of its header in 8 bytes, then the header in JSON.
    """
    with open(file, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))

    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            places[name] = _Place(
                file=file,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + header_bytes + entry["data_offsets"][0],
            )
    return places


class Fp8Slice:
    """A matrix [out, in] in float8_e4m3fn, read as float32.

    Blocks of 128 x 128 numbers share a scale (DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437,
    section 3.3). The last blocks of a row or column may be smaller. safetensors reads no 8-bit
    floats without torch, so the file's bytes are mapped into memory.

    Args:
        place: of the matrix.
        scales: opens float32 [out / 128, in / 128], rounded up.
    """

    BLOCK = 128

    def __init__(self, place: _Place, scales: Callable[[], Any]) -> None:
        if place.dtype != "F8_E4M3":
            raise TypeError(f"it has scales, but its type is {place.dtype}, not F8_E4M3")
        self._place = place
        self._scales = scales()
        expected_shape = [-(-size // self.BLOCK) for size in place.shape]  # rounded up
        if self._scales.get_shape() != expected_shape:
            raise TypeError(f"its scales are {self._scales.get_shape()}, not {expected_shape}")

    def get_shape(self) -> list[int]:
        """Return [out, in]."""
        return list(self._place.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice as float32."""
        matrix = np.memmap(
            self._place.file, np.uint8, "r", offset=self._place.offset, shape=self._place.shape
        )
        numbers = np.ascontiguousarray(matrix[index]).view(ml_dtypes.float8_e4m3fn)
        if numbers.size == 0:  # it may lie behind the last block
            return numbers.astype(np.float32)

        block_index = []
        block_of_number = []  # by axis, counted from the first block of the slice
        for part, size in zip(index, self._place.shape, strict=True):
            begin, end, _ = part.indices(size)
            first_block = begin // self.BLOCK
            end_block = -(-end // self.BLOCK)  # rounded up
            block_index.append(slice(first_block, end_block))
            block_of_number.append(np.arange(begin, end) // self.BLOCK - first_block)
        scales = self._scales[tuple(block_index)].astype(np.float32)
        return numbers.astype(np.float32) * scales[np.ix_(*block_of_number)]


def read_slice(
    tensors: Tensors, stored: Stored, index: tuple[slice, ...], shape: tuple[int, ...], folder: str
) -> np.ndarray:
    """Read a slice of one parameter.

    Args:
        stored: where the parameter is.
        index: of the slice, in the parameter.
        shape: of the whole parameter.
        folder: for messages.

    Raises:
        ModelError: the tensor is missing, unreadable or of another shape.
    """
    name = tensor_name(stored)
    if name not in tensors:
        raise ModelError(
            f"{folder}: tensor {name!r} is missing from the safetensors files; download or convert"
            " the model again"
        )

    expected_shape = shape
    tensor_index = index
    if isinstance(stored, Packed):
        expected_shape = stored.tensor_shape(shape)
        tensor_index = stored.tensor_index(index, shape)
    try:
        tensor = tensors[name]()
        tensor_shape = tuple(tensor.get_shape())
        if tensor_shape == expected_shape:
            numbers = tensor[tensor_index]
            return stored.unpack(numbers) if isinstance(stored, Packed) else numbers
    # The last two: numpy has no such type.
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder}: tensor {name!r} cannot be read ({error}); use float weights"
        ) from error
    raise ModelError(
        f"{folder}: {name} has shape {tensor_shape}, config.json says {expected_shape}; they are of"
        " different models"
    )


ELEMENTS = 128
"""Sampled elements of a tensor.

A tensor with 2 % of its elements wrong is found with a probability above 0.9.
"""


@dataclass(frozen=True, kw_only=True)
class TensorSample:
    """A sample of one tensor.

    Attributes:
        shape: as Hugging Face stores the tensor.
        dtype: of the copy, by name.
        rms: root of the mean square of all elements of the tensor.
        values: float32 [n], the elements at :func:`places`.
    """

    shape: tuple[int, ...]
    dtype: str
    rms: float
    values: np.ndarray

    @classmethod
    def of(cls, array: Any) -> TensorSample:
        """Sample a whole numpy array."""
        elements = np.asarray(array, np.float32)
        values = elements.reshape(-1)[places(elements.shape)]
        rms = 0.0
        if elements.size:
            mean_square = np.mean(np.square(elements, dtype=np.float64))
            rms = float(np.sqrt(mean_square))
        return cls(shape=tuple(elements.shape), dtype=str(array.dtype), rms=rms, values=values)

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
    """Output of one layer for a context of T token ids.

    The embeddings, which come first, and layers without keys and values have ``hidden`` only.

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


class Inspectable(Protocol):
    """A backend that allows inspection of the model it really runs."""

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Sample every tensor served, by its published name; empty if they cannot be read back."""
        ...

    async def replica_samples(self) -> Sequence[Mapping[str, TensorSample]]:
        """Sample the tensors of further engines of this backend, which serve the same weights."""
        ...

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Return the layer outputs that the engine computes for a context, the embeddings first.

        They are empty if unavailable.
        """
        ...
