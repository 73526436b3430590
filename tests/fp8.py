"""Matrices in FP8 with scales of blocks, as DeepSeek publishes them, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

_NAMES = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def fp8_of(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers and scales of [out, in] in blocks of 128 x 128, written out as loops."""
    rows, columns = matrix.shape
    numbers = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = matrix[row : row + 128, column : column + 128]
            scale = np.abs(block).max() / 448
            scales[row // 128, column // 128] = scale
            numbers[row : row + 128, column : column + 128] = block / scale
    return numbers, scales


def floats_of(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Invert :func:`fp8_of`, up to what was rounded."""
    floats = numbers.astype(np.float32)
    for row in range(len(floats)):
        for column in range(0, floats.shape[1], 128):
            floats[row, column : column + 128] *= scales[row // 128, column // 128]
    return floats


def save_with_fp8(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file byte by byte: the library's writer for numpy has no 8-bit floats."""
    header = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[str(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end

    encoded = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            stream.write(tensor.tobytes())
