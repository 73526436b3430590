"""Deltas of weight files: what a training step changed, in a fraction of the bytes.

A training step with a small learning rate leaves most bfloat16 numbers as they were and moves the
others by a unit in the last place. A delta says which 16-bit words of a file's data differ from the
previous version, and by how much. It is a safetensors file itself::

    header    uint8    header of the new file, as it is
    gaps      uint8    unchanged words before each changed one, as uint32
    changes   uint8    new minus old word modulo 2^16, as uint16
    metadata  base: digest of the old file; count: number of changed words

Gaps and changes are byte planes, compressed by zlib. Whoever applies a delta compares the digest of
the result with the new file's.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_agent_rl.errors import WeightUpdateError

DELTA_SUFFIX = ".delta.safetensors"
"""Ending of a delta's name, in place of the new file's ``.safetensors``."""
_WORD = "<u2"
_GAP = "<u4"
_BLOCK = 1 << 25  # words compared at a time
_MAX_SHARE = 0.25
"""Where a larger share of the words changed, sending all of them costs less than compressing."""


def delta_path(file: Path) -> Path:
    """Return where the delta of a weight file is written."""
    return file.with_name(file.name.removesuffix(".safetensors") + DELTA_SUFFIX)


def new_path(delta: Path) -> Path:
    """Return where the file is made that a delta belongs to; inverse of :func:`delta_path`."""
    return delta.with_name(delta.name.removesuffix(DELTA_SUFFIX) + ".safetensors")


def write_delta(base: Path, base_digest: str, new: Path) -> Path | None:
    """Write what changed between two files.

    Args:
        base: the old file.
        base_digest: its digest, by which a receiver finds its copy.

    Returns:
        The delta, :func:`delta_path`; None where sending the new file is better.

    Raises:
        OSError: a file cannot be read or written.
    """
    old_start = _data_start(base)
    new_start = _data_start(new)
    old_size = base.stat().st_size - old_start
    new_size = new.stat().st_size - new_start
    if old_size != new_size or not new_size or new_size % np.dtype(_WORD).itemsize:
        return None

    old_words = np.memmap(base, _WORD, "r", old_start)
    new_words = np.memmap(new, _WORD, "r", new_start)
    position_blocks = []
    change_blocks = []
    for start in range(0, len(new_words), _BLOCK):
        old_block = old_words[start : start + _BLOCK]
        new_block = new_words[start : start + _BLOCK]
        changed = np.flatnonzero(old_block != new_block)
        position_blocks.append(changed + start)
        change_blocks.append(new_block[changed] - old_block[changed])  # modulo 2^16

    positions = np.concatenate(position_blocks)
    gaps = np.diff(positions, prepend=-1) - 1
    if len(positions) > len(new_words) * _MAX_SHARE or gaps.max(initial=0) > np.iinfo(_GAP).max:
        return None

    tensors = {
        "header": np.fromfile(new, np.uint8, new_start),
        "gaps": _compress(gaps.astype(_GAP)),
        "changes": _compress(np.concatenate(change_blocks)),
    }
    delta = delta_path(new)
    save_file(tensors, delta, metadata={"base": base_digest, "count": str(len(positions))})
    return delta


def apply_delta(delta: Path, bases: dict[str, Path]) -> None:
    """Replace a delta and the old file by the new file, whose digest the caller compares.

    It is beside the delta: :func:`new_path`.

    Args:
        bases: old files by their digests; the one that is replaced leaves them.

    Raises:
        WeightUpdateError: the delta is damaged, or of another file.
        OSError: a file cannot be read or written.
    """
    metadata, tensors = _read_delta(delta)
    digest = metadata["base"]
    if digest not in bases:
        raise WeightUpdateError(
            f"{delta.name} changes a file with the digest {digest}, which is not there; send the"
            " whole file"
        )
    base = bases[digest]
    words = np.fromfile(base, _WORD, offset=_data_start(base))
    try:
        count = int(metadata["count"])
        if not 0 <= count <= len(words):
            raise ValueError(f"{count} changes of {len(words)} words")
        gaps = _expand(tensors["gaps"], _GAP, count)
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if count and positions[-1] >= len(words):
            raise ValueError(f"a change at word {positions[-1]} of {len(words)}")
        words[positions] += _expand(tensors["changes"], _WORD, count)
    except (ValueError, zlib.error) as error:
        raise WeightUpdateError(
            f"{delta.name} does not fit {base.name}: {error}; send the whole file"
        ) from error

    with new_path(delta).open("xb") as stream:
        stream.write(tensors["header"].tobytes())
        words.tofile(stream)
    bases.pop(digest).unlink()
    delta.unlink()


def _read_delta(delta: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(delta, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("header", "gaps", "changes")}
        return {name: metadata[name] for name in ("base", "count")}, tensors
    except (SafetensorError, KeyError, TypeError) as error:
        raise WeightUpdateError(
            f"{delta.name} is not a weight delta: {error}; send the whole file"
        ) from error


def _data_start(file: Path) -> int:
    """Return where the tensors of a safetensors file begin: behind the header and its length."""
    with file.open("rb") as stream:
        length_bytes = stream.read(8)
    if len(length_bytes) < 8:
        raise OSError(f"{file} is not a safetensors file: it has {len(length_bytes)} bytes")
    (header_length,) = struct.unpack("<Q", length_bytes)
    return 8 + header_length


def _compress(values: np.ndarray) -> np.ndarray:
    """Compress byte plane by byte plane: the high bytes are almost all zero."""
    value_bytes = values.view(np.uint8).reshape(-1, values.itemsize)
    planes = np.ascontiguousarray(value_bytes.T)
    return np.frombuffer(zlib.compress(planes.data, level=1), np.uint8)


def _expand(data: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Invert :func:`_compress`; never expand to more than ``count`` values."""
    itemsize = np.dtype(dtype).itemsize
    size = count * itemsize
    content = zlib.decompressobj().decompress(data.tobytes(), size + 1)
    if len(content) != size:
        raise ValueError(f"{size} bytes expected, {len(content)} found")
    planes = np.frombuffer(content, np.uint8).reshape(itemsize, count)
    return planes.T.copy().view(dtype).reshape(-1)
