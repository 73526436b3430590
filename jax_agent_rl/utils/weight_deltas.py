"""Changes from one version of a weight file to the next: which 16-bit words of its data differ, and by how much.

A training step with a small learning rate leaves most bfloat16 numbers as they were and moves the others by a unit in
the last place. A delta is a safetensors file itself::

    header    uint8    header of the new file, as it is
    gaps      uint8    unchanged words before each changed one, as uint32; byte planes, compressed by zlib
    changes   uint8    new minus old word modulo 2^16, as uint16; byte planes, compressed by zlib
    metadata  base: digest of the old file; count: number of changed words

Whoever applies one compares the digest of the result with that of the new file (``weight_checks``).
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_agent_rl.errors import WeightUpdateError

SUFFIX = ".delta.safetensors"
"""Ending of a delta's name, in place of the new file's ``.safetensors``."""
_WORD = np.dtype("<u2")
_GAP = np.dtype("<u4")
_BLOCK = 1 << 25  # words compared at a time
_MAX_SHARE = 0.25  # of the words: where more changed, sending all of them costs less than compressing


def delta_path(file: Path) -> Path:
    """Return where the delta of a weight file is written."""
    return file.with_name(file.name.removesuffix(".safetensors") + SUFFIX)


def result_name(delta: Path) -> str:
    """Return the name of the weight file that a delta makes."""
    return delta.name.removesuffix(SUFFIX) + ".safetensors"


def write_delta(base: Path, base_digest: str, new: Path) -> Path | None:
    """Write what changed to :func:`delta_path`; return it, or None where sending the whole file is better.

    Args:
        base: the old file.
        base_digest: its digest, by which a receiver finds its copy.
        new: the new file.

    Raises:
        OSError: a file cannot be read or written.
    """
    begin, old_begin = _data_begin(new), _data_begin(base)
    size = new.stat().st_size - begin
    if base.stat().st_size - old_begin != size or size % _WORD.itemsize or not size:
        return None
    old_words, words = (np.memmap(file, _WORD, "r", at) for file, at in ((base, old_begin), (new, begin)))
    places, changes = [], []
    for first in range(0, len(words), _BLOCK):
        before, after = old_words[first : first + _BLOCK], words[first : first + _BLOCK]
        changed = np.flatnonzero(before != after)
        places.append(changed + first)
        changes.append(after[changed] - before[changed])  # modulo 2^16
    place = np.concatenate(places)
    gaps = np.diff(place, prepend=-1) - 1
    if len(place) > len(words) * _MAX_SHARE or gaps.max(initial=0) > np.iinfo(_GAP).max:
        return None
    tensors = {
        "header": np.fromfile(new, np.uint8, begin),
        "gaps": _compressed(gaps.astype(_GAP)),
        "changes": _compressed(np.concatenate(changes)),
    }
    out = delta_path(new)
    save_file(tensors, out, metadata={"base": base_digest, "count": str(len(place))})
    return out


def base_of(delta: Path) -> str:
    """Return the digest of the file that a delta changes.

    Raises:
        WeightUpdateError: it is not a delta.
    """
    return _read(delta)[0]["base"]


def apply_delta(base: Path, delta: Path, out: Path) -> None:
    """Write the new file from the old one and its delta.

    Args:
        base: the old file.
        delta: the changes.
        out: where to write; the caller compares its digest.

    Raises:
        WeightUpdateError: the delta is damaged, or of another file.
        OSError: a file cannot be read or written.
    """
    metadata, tensors = _read(delta)
    words = np.fromfile(base, _WORD, offset=_data_begin(base))
    try:
        count = int(metadata["count"])
        if not 0 <= count <= len(words):
            raise ValueError(f"{count} changes of {len(words)} words")
        gaps = _expanded(tensors["gaps"], _GAP, count)
        place = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if count and place[-1] >= len(words):
            raise ValueError(f"a change at word {place[-1]} of {len(words)}")
        words[place] += _expanded(tensors["changes"], _WORD, count)
    except (ValueError, zlib.error) as error:
        raise WeightUpdateError(f"{delta.name} does not fit {base.name}: {error}; send the whole file") from error
    with out.open("xb") as stream:
        stream.write(tensors["header"].tobytes())
        words.tofile(stream)


def _read(delta: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(delta, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("header", "gaps", "changes")}
        return {name: metadata[name] for name in ("base", "count")}, tensors
    except (SafetensorError, KeyError, TypeError) as error:
        raise WeightUpdateError(f"{delta.name} is no weight delta: {error}; send the whole file") from error


def _data_begin(file: Path) -> int:
    """Return where the tensors of a safetensors file begin."""
    with file.open("rb") as stream:
        raw = stream.read(8)
    if len(raw) < 8:
        raise OSError(f"{file} is no safetensors file: it has {len(raw)} bytes")
    return 8 + struct.unpack("<Q", raw)[0]


def _compressed(values: np.ndarray) -> np.ndarray:
    """Compress byte plane by byte plane: the high bytes are almost all zero."""
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)
    return np.frombuffer(zlib.compress(planes.data, level=1), np.uint8)


def _expanded(data: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """Invert :func:`_compressed`; never expand to more than ``count`` values."""
    size = count * dtype.itemsize
    planes = zlib.decompressobj().decompress(data.tobytes(), size + 1)
    if len(planes) != size:
        raise ValueError(f"{size} bytes expected, {len(planes)} found")
    return np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T.copy().view(dtype).reshape(-1)
