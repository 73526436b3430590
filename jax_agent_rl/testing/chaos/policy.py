"""A policy whose tokens can be recomputed: each follows from weights, context, seed and position alone.

The weights are a table of logits. A checksum of the whole context selects the row for the next id; seed and position
determine the draw. So a token sampled from stale or half-written weights, from another context, or twice in a row
differs when it is recomputed (:func:`jax_agent_rl.testing.chaos.ledger.problems`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

EOS = 2
FIRST_BYTE = 3
"""Id of byte 0 in :func:`jax_agent_rl.testing.chaos.testbed.codec`; smaller ids are special."""
VOCABULARY = FIRST_BYTE + 256
_ROWS = 64
_PRINTABLE = range(FIRST_BYTE + ord("a"), FIRST_BYTE + ord("z") + 1)
_EOS_LOGIT = 1.2  # turns are 12 ids long on average, so that faults interrupt them


class HashPolicy:
    """One version of the weights.

    Args:
        logits: float32 [rows, vocabulary].
    """

    def __init__(self, logits: np.ndarray) -> None:
        if logits.shape != (_ROWS, VOCABULARY) or logits.dtype != np.float32 or not np.isfinite(logits).all():
            raise ValueError(
                f"weights must be finite float32 [{_ROWS}, {VOCABULARY}], got {logits.dtype} {list(logits.shape)}"
            )
        self.logits = logits

    @cached_property
    def _log_probs(self) -> np.ndarray:
        """Log-probs, float64 [rows, vocabulary]."""
        shifted = self.logits.astype(np.float64) - self.logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @cached_property
    def _cumulative(self) -> np.ndarray:
        return np.exp(self._log_probs).cumsum(-1)

    def sample(self, key: int, *, seed: int, position: int) -> tuple[int, float]:
        """Sample the next id and return it with its log-prob.

        Args:
            key: :func:`context_key` of all ids before it.
            seed: the request's seed.
            position: number of ids before it.
        """
        row = self._cumulative[key % _ROWS]
        draw = zlib.crc32(f"{seed}/{position}".encode()) / 2**32
        token = int(np.searchsorted(row, draw * row[-1], side="right"))
        return token, float(self._log_probs[key % _ROWS, token])

    def save(self, file: Path) -> None:
        """Write the weights as a safetensors file."""
        from safetensors.numpy import save_file

        save_file({"logits": self.logits}, file)

    @classmethod
    def read(cls, file: Path) -> HashPolicy:
        """Read a safetensors file; raise ValueError or OSError if it does not hold a policy."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return cls(load_file(file)["logits"])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{file} holds no policy: {error}") from error


@lru_cache(maxsize=64)
def hash_policy(seed: int, version: int) -> HashPolicy:
    """Return the weights of a version in the run with this seed; engines start with version -1.

    Letters are likely, the end of turn is occasional, other bytes are rare.
    """
    rng = np.random.default_rng([seed, version + 1])
    logits = np.full((_ROWS, VOCABULARY), -20.0, np.float32)
    logits[:, _PRINTABLE] = rng.standard_normal((_ROWS, len(_PRINTABLE)))
    logits[:, EOS] = _EOS_LOGIT
    return HashPolicy(logits)


def context_key(ids: Sequence[int], key: int = 0) -> int:
    """Return a checksum of a context, or of the continuation of a context with checksum ``key``.

    >>> context_key([5, 6, 7]) == context_key([7], context_key([5, 6]))
    True
    """
    return zlib.crc32(np.asarray(ids, "<i4").tobytes(), key)
