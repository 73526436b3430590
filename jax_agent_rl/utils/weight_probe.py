"""Probe sent with new weights: log-probs the learner computed with them, which the engine must reproduce.

An engine in another process can load weights wrongly without an error: a tied matrix stays old, a fused matrix is
partly filled, a cached copy is not rebuilt. Each changes log-probs, so a few sequences suffice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

METADATA_KEY = "logprob_probe"
"""Key of the probe in a safetensors file's metadata."""


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
        return {METADATA_KEY: json.dumps({"ids": self.ids, "log_probs": self.log_probs})}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> LogprobProbe | None:
        """Return the probe in a file's metadata, or None.

        Raises:
            ValueError: the probe is damaged.
        """
        if METADATA_KEY not in metadata:
            return None
        raw = json.loads(metadata[METADATA_KEY])
        return cls(ids=tuple(map(tuple, raw["ids"])), log_probs=tuple(map(tuple, raw["log_probs"])))
