"""Independent chains: every trajectory starts from the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jax_agent_rl.collect.strategies.base import Growth, Start, Strategy


class Chains(Strategy):
    """``group_size`` of them."""

    branches = False

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        return [] if growth.waves else [Start()] * growth.group_size
