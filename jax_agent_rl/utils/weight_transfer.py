"""What both ends of a weight transfer share: digests, a probe of what was loaded, and deltas between versions.

XXH3-128 digests cost about as much as reading memory, and find damage and mistaken files; against
forgery of both bytes and digest there are tokens and TLS (``rollout.token_env``).

An engine in another process can load weights wrongly without an error: a tied matrix stays old, a
fused matrix is partly filled, a cached copy is not rebuilt. Each changes log-probs, so the learner
sends those of a few sequences.

A training step with a small learning rate leaves most bfloat16 numbers as they were and moves the
others by a unit in the last place. A delta says which 16-bit words of a file's data differ from
those of the version before, and by how much. It is a safetensors file itself::

    header    uint8    header of the new file, as it is
    gaps      uint8    unchanged words before each changed one, as uint32; byte planes, compressed by zlib
    changes   uint8    new minus old word modulo 2^16, as uint16; byte planes, compressed by zlib
    metadata  base: digest of the old file; count: number of changed words

Whoever applies one compares the digest of the result with that of the new file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from jax_agent_rl.errors import WeightUpdateError

if TYPE_CHECKING:
    import numpy as np

AS_THEY_ARE = "float32"
"""``WeightUpdate.dtype`` of weights that were not rounded."""

METADATA_KEY = "logprob_probe"
"""Key of the probe in a safetensors file's metadata."""


_FLOAT16_MAX = 65504.0


def rounded(x: Any, dtype: str) -> Any:
    """Return a NumPy or device array in the dtype of a transfer, see ``WeightUpdate.dtype``.

    Raises:
        WeightUpdateError: a number is beyond float16, which would make it infinite. (bfloat16 has
            float32's range.)
    """
    if dtype == AS_THEY_ARE:
        return x
    if dtype == "float16" and x.size:
        largest = float(abs(x).max())
        if _FLOAT16_MAX < largest < math.inf:
            raise WeightUpdateError(
                f"a weight of {largest:g} is beyond float16, which ends at {_FLOAT16_MAX:g}; serve"
                " the model in another type, e.g. rollout.vllm.dtype=bfloat16"
            )
    return x.astype(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobProbe:
    """Sequences and the learner's log-probs of them.

    Attributes:
        ids: sequences of token ids, each at least two long.
        log_probs: for each sequence, the natural-log probability of ids ``1..`` given those before
            (temperature 1): one fewer than ids.
    """

    ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        lengths = [(len(i), len(p)) for i, p in zip(self.ids, self.log_probs, strict=True)]
        if not lengths or any(n < 2 or m != n - 1 for n, m in lengths):
            raise ValueError(
                f"a probe needs sequences of n >= 2 ids with n - 1 log-probs each, got {lengths}"
            )

    def to_metadata(self) -> dict[str, str]:
        """Return metadata for a safetensors file (strings only)."""
        return {METADATA_KEY: json.dumps(self.to_json())}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> LogprobProbe | None:
        """Return the probe in a file's metadata, or None.

        Raises:
            ValueError: the probe is damaged.
        """
        if METADATA_KEY not in metadata:
            return None
        return cls.from_json(json.loads(metadata[METADATA_KEY]))

    def to_json(self) -> dict[str, Any]:
        return {"ids": self.ids, "log_probs": self.log_probs}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> LogprobProbe:
        """Invert :meth:`to_json`.

        Raises:
            ValueError: the probe is damaged.
        """
        return cls(
            ids=tuple(map(tuple, saved["ids"])), log_probs=tuple(map(tuple, saved["log_probs"]))
        )

    def differences(self, measured: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Return (largest, mean) |learner - engine| over all probed ids; infinity when a value is not finite."""
        gaps = [
            abs(a - b) if math.isfinite(b) else math.inf
            for expected, got in zip(self.log_probs, measured, strict=True)
            for a, b in zip(expected, got, strict=True)
        ]
        return max(gaps), sum(gaps) / len(gaps)


def read_probe(paths: Sequence[str]) -> LogprobProbe | None:
    """Return the probe in the metadata of safetensors files, if one has any.

    Raises:
        WeightUpdateError: a file cannot be read, or the probe is damaged.
    """
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                probe = LogprobProbe.from_metadata(file.metadata() or {})
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(
                f"the log-prob probe in {path} cannot be read: {error}"
            ) from error
        if probe is not None:
            return probe
    return None


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of ``data``."""
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def file_digest(file: str | Path) -> str:
    """Return the XXH3-128 digest of a file."""
    with open(file, "rb") as stream:
        return f"xxh3_128:{hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()}"


def check_files(paths: Sequence[str], digests: Mapping[str, str]) -> None:
    """Check files against digests by file name; without digests, do nothing.

    Raises:
        WeightUpdateError: a file is missing, damaged, truncated or another, or has no digest.
    """
    if not digests:
        return
    names = {Path(path).name for path in paths}
    if names != digests.keys():
        raise WeightUpdateError(
            f"the update has digests of {sorted(digests)}, but files {sorted(names)}"
        )
    for path in paths:
        try:
            found = file_digest(path)
        except OSError as error:
            raise WeightUpdateError(f"weight file {path} cannot be read: {error}") from error
        check(Path(path).name, found, digests[Path(path).name])


def check(name: str, found: str, sent: str) -> None:
    """Compare two digests.

    Raises:
        WeightUpdateError: they differ.
    """
    if found != sent:
        raise WeightUpdateError(
            f"{name} is not what the learner wrote: its digest is {found}, that of the update"
            f" {sent}; it was damaged, truncated or replaced by another version's"
        )


DELTA_SUFFIX = ".delta.safetensors"
"""Ending of a delta's name, in place of the new file's ``.safetensors``."""
_WORD, _GAP = "<u2", "<u4"
_BLOCK = 1 << 25  # words compared at a time
# Of the words: where more changed, sending all of them costs less than compressing.
_MAX_SHARE = 0.25


def delta_path(file: Path) -> Path:
    """Return where the delta of a weight file is written."""
    return file.with_name(file.name.removesuffix(".safetensors") + DELTA_SUFFIX)


def result_name(delta: Path) -> str:
    """Return the name of the weight file that a delta makes."""
    return delta.name.removesuffix(DELTA_SUFFIX) + ".safetensors"


def write_delta(base: Path, base_digest: str, new: Path) -> Path | None:
    """Write what changed to :func:`delta_path`; return it, or None where sending the whole file is better.

    Args:
        base: the old file.
        base_digest: its digest, by which a receiver finds its copy.
        new: the new file.

    Raises:
        OSError: a file cannot be read or written.
    """
    import numpy as np
    from safetensors.numpy import save_file

    begin, old_begin = _data_begin(new), _data_begin(base)
    size = new.stat().st_size - begin
    if base.stat().st_size - old_begin != size or size % np.dtype(_WORD).itemsize or not size:
        return None
    old_words, words = (
        np.memmap(file, _WORD, "r", at) for file, at in ((base, old_begin), (new, begin))
    )
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
    return _read_delta(delta)[0]["base"]


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
    import numpy as np

    metadata, tensors = _read_delta(delta)
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
        raise WeightUpdateError(
            f"{delta.name} does not fit {base.name}: {error}; send the whole file"
        ) from error
    with out.open("xb") as stream:
        stream.write(tensors["header"].tobytes())
        words.tofile(stream)


def _read_delta(delta: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(delta, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("header", "gaps", "changes")}
        return {name: metadata[name] for name in ("base", "count")}, tensors
    except (SafetensorError, KeyError, TypeError) as error:
        raise WeightUpdateError(
            f"{delta.name} is no weight delta: {error}; send the whole file"
        ) from error


def _data_begin(file: Path) -> int:
    """Return where the tensors of a safetensors file begin."""
    with file.open("rb") as stream:
        raw = stream.read(8)
    if len(raw) < 8:
        raise OSError(f"{file} is no safetensors file: it has {len(raw)} bytes")
    return 8 + struct.unpack("<Q", raw)[0]


def _compressed(values: np.ndarray) -> np.ndarray:
    """Compress byte plane by byte plane: the high bytes are almost all zero."""
    import numpy as np

    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)
    return np.frombuffer(zlib.compress(planes.data, level=1), np.uint8)


def _expanded(data: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Invert :func:`_compressed`; never expand to more than ``count`` values."""
    import numpy as np

    itemsize = np.dtype(dtype).itemsize
    size = count * itemsize
    planes = zlib.decompressobj().decompress(data.tobytes(), size + 1)
    if len(planes) != size:
        raise ValueError(f"{size} bytes expected, {len(planes)} found")
    return np.frombuffer(planes, np.uint8).reshape(itemsize, count).T.copy().view(dtype).reshape(-1)
