"""Checks of transferred weights by the receiver: digests of the bytes, and a probe of what was loaded.

XXH3-128 digests cost about as much as reading memory, and find damage and mistaken files; against forgery of both bytes
and digest there are tokens and TLS (``rollout.token_env``).

An engine in another process can load weights wrongly without an error: a tied matrix stays old, a fused matrix is
partly filled, a cached copy is not rebuilt. Each changes log-probs, so the learner sends those of a few sequences.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from jax_agent_rl.errors import WeightUpdateError

AS_THEY_ARE = "float32"
"""``WeightUpdate.dtype`` of weights that were not rounded."""

METADATA_KEY = "logprob_probe"
"""Key of the probe in a safetensors file's metadata."""


def rounded(x: Any, dtype: str) -> Any:
    """Return a NumPy or device array in the dtype of a transfer, see ``WeightUpdate.dtype``."""
    return x if dtype == AS_THEY_ARE else x.astype(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobProbe:
    """Sequences and the learner's log-probs of them.

    Attributes:
        ids: sequences of token ids, each at least two long.
        log_probs: for each sequence, the natural-log probability of ids ``1..`` given those before (temperature 1):
            one fewer than ids.
    """

    ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        lengths = [(len(i), len(p)) for i, p in zip(self.ids, self.log_probs, strict=True)]
        if not lengths or any(n < 2 or m != n - 1 for n, m in lengths):
            raise ValueError(f"a probe needs sequences of n >= 2 ids with n - 1 log-probs each, got {lengths}")

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
        return cls(ids=tuple(map(tuple, saved["ids"])), log_probs=tuple(map(tuple, saved["log_probs"])))

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
            raise WeightUpdateError(f"the log-prob probe in {path} cannot be read: {error}") from error
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
        raise WeightUpdateError(f"the update has digests of {sorted(digests)}, but files {sorted(names)}")
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
            f"{name} is not what the learner wrote: its digest is {found}, that of the update {sent}; it was damaged, "
            "truncated or replaced by another version's"
        )
