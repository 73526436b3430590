"""What both ends of a weight transfer share: digests, a probe of what was loaded, and deltas.

XXH3-128 digests cost about as much as reading memory, and find damage and mistaken files; against
forgery of both bytes and digest there are tokens and TLS (``rollout.token_env``).

An engine in another process can load weights wrongly without an error: a tied matrix stays old, a
fused matrix is partly filled, a cached copy is not rebuilt. Each changes log-probs, so the learner
sends a probe: a few sequences with its own log-probs.

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
    """Return a NumPy or device array in the dtype of a transfer.

    Args:
        dtype: as ``WeightUpdate.dtype``.

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
        lengths = []
        for ids, log_probs in zip(self.ids, self.log_probs, strict=True):
            lengths.append((len(ids), len(log_probs)))

        is_valid = bool(lengths)
        for num_ids, num_log_probs in lengths:
            if num_ids < 2 or num_log_probs != num_ids - 1:
                is_valid = False
        if not is_valid:
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
            ids=tuple(map(tuple, saved["ids"])),
            log_probs=tuple(map(tuple, saved["log_probs"])),
        )

    def differences(self, measured: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Return the largest and the mean difference of log-probs over all probed ids.

        Args:
            measured: the engine's log-probs, in the shape of ``log_probs``. One that is not finite
                makes the difference infinite.
        """
        differences = []
        for learner_sequence, engine_sequence in zip(self.log_probs, measured, strict=True):
            for learner, engine in zip(learner_sequence, engine_sequence, strict=True):
                if math.isfinite(engine):
                    differences.append(abs(learner - engine))
                else:
                    differences.append(math.inf)
        return max(differences), sum(differences) / len(differences)


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
        name = Path(path).name
        try:
            actual_digest = file_digest(path)
        except OSError as error:
            raise WeightUpdateError(f"weight file {path} cannot be read: {error}") from error
        check_digest(name, actual_digest, digests[name])


def check_digest(name: str, actual_digest: str, sent_digest: str) -> None:
    """Compare the digest of what was read with the update's.

    Args:
        name: of the file, for the message.

    Raises:
        WeightUpdateError: they differ.
    """
    if actual_digest != sent_digest:
        raise WeightUpdateError(
            f"{name} is not what the learner wrote: its digest is {actual_digest}, that of the"
            f" update {sent_digest}; it was damaged, truncated or replaced by another version's"
        )


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


def result_name(delta: Path) -> str:
    """Return the name of the weight file that a delta makes."""
    return delta.name.removesuffix(DELTA_SUFFIX) + ".safetensors"


def write_delta(base: Path, base_digest: str, new: Path) -> Path | None:
    """Write what changed between two files.

    Args:
        base: the old file.
        base_digest: its digest, by which a receiver finds its copy.
        new: the new file.

    Returns:
        The delta, :func:`delta_path`; None where sending the new file is better.

    Raises:
        OSError: a file cannot be read or written.
    """
    import numpy as np
    from safetensors.numpy import save_file

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


def base_of(delta: Path) -> str:
    """Return the digest of the file that a delta changes.

    Raises:
        WeightUpdateError: it is not a delta.
    """
    metadata, _ = _read_delta(delta)
    return metadata["base"]


def apply_delta(base: Path, delta: Path, out: Path) -> None:
    """Write the new file from the old one and its delta.

    Args:
        base: the old file.
        delta: from :func:`write_delta`.
        out: where to write the new file; the caller compares its digest.

    Raises:
        WeightUpdateError: the delta is damaged, or of another file.
        OSError: a file cannot be read or written.
    """
    import numpy as np

    metadata, tensors = _read_delta(delta)
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


def _data_start(file: Path) -> int:
    """Return where the tensors of a safetensors file begin: behind the header and its length."""
    with file.open("rb") as stream:
        length_bytes = stream.read(8)
    if len(length_bytes) < 8:
        raise OSError(f"{file} is no safetensors file: it has {len(length_bytes)} bytes")
    (header_length,) = struct.unpack("<Q", length_bytes)
    return 8 + header_length


def _compress(values: np.ndarray) -> np.ndarray:
    """Compress byte plane by byte plane: the high bytes are almost all zero."""
    import numpy as np

    value_bytes = values.view(np.uint8).reshape(-1, values.itemsize)
    planes = np.ascontiguousarray(value_bytes.T)
    return np.frombuffer(zlib.compress(planes.data, level=1), np.uint8)


def _expand(data: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Invert :func:`_compress`; never expand to more than ``count`` values."""
    import numpy as np

    itemsize = np.dtype(dtype).itemsize
    size = count * itemsize
    content = zlib.decompressobj().decompress(data.tobytes(), size + 1)
    if len(content) != size:
        raise ValueError(f"{size} bytes expected, {len(content)} found")
    planes = np.frombuffer(content, np.uint8).reshape(itemsize, count)
    return planes.T.copy().view(dtype).reshape(-1)
