"""Lengths and latencies with a tail: most are short, a few are long, as those of reasoning models and sandboxes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jax_agent_rl.agents.context import derive_seed


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Log-normal, cut at both ends; a draw depends on its key alone, so that whatever is compared does the same work.

    Attributes:
        median: 0 draws nothing but zeros, before they are cut.
        sigma: deviation of the logarithm.
        least, most: where draws are cut.
    """

    median: float
    sigma: float = 1.0
    least: float = 0.0
    most: float

    def at(self, *key: int | str) -> float:
        """The draw of this key."""
        scale = random.Random(derive_seed(*key)).lognormvariate(0.0, self.sigma)
        return min(self.most, max(self.least, self.median * scale))
