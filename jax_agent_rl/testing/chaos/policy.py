"""A policy whose every token can be proven: what was sampled follows from weights, context, seed and position alone.

The weights are a table of logits. The row for the next id is chosen by a checksum of the whole context, and the draw by
seed and position, so a token that was sampled from stale or half-written weights, from another context or twice in a
row does not come out again when it is recomputed (:func:`jax_agent_rl.testing.chaos.verify.problems`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

EOS = 2
FIRST_BYTE = 3
"""Id of byte 0 in :func:`jax_agent_rl.testing.chaos.text.codec`; the ids before it are special."""
VOCABULARY = FIRST_BYTE + 256
_ROWS = 64
_PRINTABLE = range(FIRST_BYTE + ord("a"), FIRST_BYTE + ord("z") + 1)
_EOS_LOGIT = 1.2  # a turn is 12 ids long on average: interruptions hit it in the middle


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
        """float64 [rows, vocabulary]."""
        shifted = self.logits.astype(np.float64) - self.logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @cached_property
    def _cumulative(self) -> np.ndarray:
        return np.exp(self._log_probs).cumsum(-1)

    def sample(self, key: int, *, seed: int, position: int) -> tuple[int, float]:
        """The next id and its log-prob.

        Args:
            key: :func:`context_key` of all ids before it.
            seed: of the request.
            position: how many ids are before it.
        """
        row = self._cumulative[key % _ROWS]
        draw = zlib.crc32(f"{seed}/{position}".encode()) / 2**32
        token = int(np.searchsorted(row, draw * row[-1], side="right"))
        return token, float(self._log_probs[key % _ROWS, token])

    def save(self, file: Path) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save_file

        save_file({"logits": self.logits}, file)

    @classmethod
    def read(cls, file: Path) -> HashPolicy:
        """Reads a safetensors file; ValueError or OSError if it is none, or not of a policy."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return cls(load_file(file)["logits"])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{file} holds no policy: {error}") from error


@lru_cache(maxsize=64)
def hash_policy(seed: int, version: int) -> HashPolicy:
    """The weights of a version in the run of a seed; -1 are those that engines are started with.

    Letters are likely, an end of turn comes now and then, other bytes hardly ever.
    """
    rng = np.random.default_rng([seed, version + 1])
    logits = np.full((_ROWS, VOCABULARY), -20.0, np.float32)
    logits[:, _PRINTABLE] = rng.standard_normal((_ROWS, len(_PRINTABLE)))
    logits[:, EOS] = _EOS_LOGIT
    return HashPolicy(logits)


def context_key(ids: Sequence[int], key: int = 0) -> int:
    """A checksum of a context, or of one that goes on after another whose ``key`` is given.

    >>> context_key([5, 6, 7]) == context_key([7], context_key([5, 6]))
    True
    """
    return zlib.crc32(np.asarray(ids, "<i4").tobytes(), key)
