"""What both ends of a weight transfer share: rounding, checks of files, and a probe of the weights.

Files are checked by their fingerprints (``utils.fingerprints``); against forgery of both bytes and
fingerprint there are tokens and TLS (``rollout.token_env``).

An engine in another process can load weights wrongly without an error: a tied matrix stays old, a
fused matrix is partly filled, a cached copy is not rebuilt. Each changes log-probs, so the learner
sends a probe: a few sequences with its own log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.utils.fingerprints import read_fingerprint

AS_THEY_ARE = "float32"
"""``WeightUpdate.dtype`` of weights that were not rounded."""

_FLOAT16_MAX = 65504.0


FLOAT32_PARAMETERS = frozenset(
    {"delta_decay_bias", "delta_decay_log", "router_correction", "value_head"}
)
"""Names of parameters that have float32 in models of every dtype, and on the way to engines.

Experts' corrections differ by less than bfloat16's steps near 1, a regression needs the precision,
and the decay of a recurrent state multiplies over thousands of tokens.
"""


def rounded(x: Any, dtype: str, name: str) -> Any:
    """Return a NumPy or device array in the dtype of a transfer.

    Args:
        dtype: as ``WeightUpdate.dtype``.
        name: of the parameter; one of ``FLOAT32_PARAMETERS`` stays as it is.

    Raises:
        WeightUpdateError: a number is beyond float16, which would make it infinite. (bfloat16 has
            float32's range.)
    """
    if dtype == AS_THEY_ARE or name in FLOAT32_PARAMETERS:
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
            actual_digest = read_fingerprint(path)
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
