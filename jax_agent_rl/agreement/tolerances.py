"""Tolerances for the difference of engine's and learner's log-probs of the same weights.

Rounding is all that may separate them, so the tolerance follows from the coarsest precision on either side. What is
called float32 is less on accelerators: by default a TPU multiplies float32 matrices in bfloat16 and an NVIDIA GPU in
TF32. docs/agreement.md has the table, with what was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax

from jax_agent_rl.config import Config
from jax_agent_rl.learner.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Nats: ``token`` for the largest gap of a single token, ``mean`` for the mean |gap|."""

    token: float
    mean: float

    def holds(self, comparison: Comparison) -> bool:
        """Whether the gaps are within it; nothing compared is no breach."""
        return not comparison.tokens or (comparison.largest <= self.token and comparison.mean <= self.mean)


JAX_ENGINE: dict[str, Tolerance] = {
    "float32": Tolerance(token=5e-4, mean=5e-5),
    "tf32": Tolerance(token=0.1, mean=0.01),
    "float16": Tolerance(token=0.1, mean=0.01),
    "bfloat16": Tolerance(token=1.0, mean=0.06),
    "int8": Tolerance(token=2.0, mean=0.15),
    "fp8": Tolerance(token=3.0, mean=0.3),
}
"""By precision, from fine to coarse. The JAX engine shares the learner's functions, down to the norms."""

OTHER_ENGINE: dict[str, Tolerance] = {**JAX_ENGINE, "float32": Tolerance(token=1e-3, mean=1e-4)}
"""vLLM, and engines behind a rollout server: their kernels add in another order."""


def coarsest(precisions: Collection[str]) -> str:
    """Return the coarsest precision; unknown ones count as bfloat16, which most models are served in.

    >>> coarsest(["float32", "int8", "bfloat16"])
    'int8'
    """
    known = list(JAX_ENGINE)
    return max((p if p in known else "bfloat16" for p in precisions), key=known.index, default="float32")


def product_precision(dtype: str, platform: str) -> str:
    """Return the precision in which products of a dtype are really computed.

    Args:
        dtype: as configured.
        platform: JAX's name of the platform.
    """
    if dtype != "float32":
        return dtype
    return {"tpu": "bfloat16", "gpu": "tf32", "cuda": "tf32"}.get(platform, dtype)


def tolerance(precisions: Collection[str], *, jax_engine: bool, platform: str) -> Tolerance:
    """Return the tolerance between engines and learner.

    Args:
        precisions: of the engines and of the learner.
        jax_engine: the engines are this package's.
        platform: JAX's name of the learner's platform.
    """
    table = JAX_ENGINE if jax_engine else OTHER_ENGINE
    return table[coarsest([product_precision(p, platform) for p in precisions])]


def run_tolerance(config: Config, precisions: Sequence[str]) -> Tolerance:
    """Return the tolerance of a run.

    Args:
        config: of the run.
        precisions: of its engines.
    """
    if (own := config.trainer.agreement_tolerance) is not None:
        return Tolerance(token=own[0], mean=own[1])
    jax_engine = config.rollout.backend == "jetstream" and config.rollout.jetstream.engine_factory is None
    both = [*precisions, config.learner.compute_dtype]
    return tolerance(both, jax_engine=jax_engine, platform=jax.default_backend())
