"""Notices a run that loses everything, batch after batch, and would go on for ever without learning anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jax_agent_rl.errors import NothingToTrainError
from jax_agent_rl.types import DropReason, Group


class LostBatchGuard:
    """Counts batches in a row of which no trajectory survived: rewards that fail or hang, a dead engine, …

    Args:
        max_failed_batches: the count at which the run stops, >= 1.
        lost_batches: where to go on counting.

    Attributes:
        lost_batches: batches in a row of which no trajectory survived.
    """

    def __init__(self, max_failed_batches: int, lost_batches: int = 0):
        self._max_lost_batches = max_failed_batches
        self.lost_batches = lost_batches

    def check(self, groups: Sequence[Group], latest_losses: Mapping[DropReason, str]) -> None:
        """Looks at one collected batch.

        Args:
            groups: before any filter; a batch without groups does not count.
            latest_losses: for each reason, what the newest loss said.

        Raises:
            NothingToTrainError: the limit is reached; says the reasons and an example of the most frequent one.
        """
        if not groups:
            return
        if any(group.trajectories for group in groups):
            self.lost_batches = 0
            return
        self.lost_batches += 1
        if self.lost_batches < self._max_lost_batches:
            return
        reasons = sum((Counter(group.dropped) for group in groups), Counter())
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        worst = reasons.most_common(1)[0][0]
        raise NothingToTrainError(
            f"every trajectory of {self.lost_batches} batches in a row was lost ({counts}). The newest {worst}: "
            f"{latest_losses.get(worst, 'see the log')}. Repair that, or raise trainer.max_failed_batches"
        )
