"""What must hold, watched while the run goes on: each trajectory has one fate, each token a version that was served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.chaos.verify import problems
from jax_agent_rl.types import DropReason, PauseMode, TokenOutput, Trajectory

TRAINED = "trained"
FREE_TO_LOSE = frozenset({DropReason.CANCELLED, DropReason.TOOL_SERVER_ERROR, DropReason.SINGLE_MEMBER})
"""What may be lost: what is in flight when the run ends, what a dead tool server knew, the rest of such a group."""
_SHOWN = 20
"""Faults of the system that are kept in words; the rest is counted."""


class Ledger:
    """Findings of one run, good and bad.

    Args:
        seed: the run's.

    Attributes:
        fates: of every trajectory that was started: None while it is open, ``trained``, or the reason of its loss.
        duplicated: trajectories that were started or ended twice, or reached the learner twice.
        inexact: trajectories with a token, mask or tool call that is not what it has to be.
        stale_served: tokens of a version that was not served while they were sampled.
        unbalanced: steps after which the books did not balance.
        steps: that the learner finished.
        tokens: sampled ids that were trained on.
        warm: when the first step was over, by ``time.monotonic``, and how many trajectories it had trained.
        complaints: the first of all these in words.
    """

    def __init__(self, seed: int) -> None:
        self.fates: dict[str, str | None] = {}
        self.duplicated = self.inexact = self.stale_served = self.unbalanced = 0
        self.steps = self.tokens = 0
        self.warm: tuple[float, int] | None = None
        self.complaints: list[str] = []
        self._seed = seed
        self._learnt: set[str] = set()

    def complain(self, text: str) -> None:
        """Keeps a finding in words."""
        if len(self.complaints) < _SHOWN:
            self.complaints.append(text)

    def learn(self, trajectories: Iterable[Trajectory]) -> None:
        """The learner got these."""
        for trajectory in trajectories:
            name = trajectory.trajectory_id
            if name in self._learnt:
                self.duplicated += 1
                self.complain(f"{name} reached the learner twice")
            self._learnt.add(name)
            self.tokens += trajectory.num_sampled
            if wrong := next(problems(trajectory, seed=self._seed), None):
                self.inexact += 1
                self.complain(wrong)

    def finish_step(self, accounting: Accounting) -> None:
        """A step is over; its books and the fates must agree."""
        self.steps += 1
        self.warm = self.warm or (time.monotonic(), self.count(TRAINED))
        try:
            accounting.check()
        except AssertionError as error:
            self.unbalanced += 1
            self.complain(str(error))
        open_ones = {name for name, fate in self.fates.items() if fate is None}
        if open_ones != accounting.in_flight or len(self.fates) != accounting.started:
            self.unbalanced += 1
            self.complain(f"after step {self.steps} the trajectories in flight are not those without a fate")

    def rate(self, now: float) -> float:
        """Trajectories trained per second since it was warm; 0 if it never was."""
        if self.warm is None:
            return 0.0
        since, trained = self.warm
        return (self.count(TRAINED) - trained) / (now - since)

    def count(self, fate: str) -> int:
        """Trajectories with this fate."""
        return sum(f == fate for f in self.fates.values())

    def summary(self) -> dict[str, Any]:
        """The findings as JSON.

        ``lost`` are those whose fate nobody knows, and those dropped for a reason that is not :data:`FREE_TO_LOSE`: an
        engine's failure, say, may cost time, and no trajectory.
        """
        ends = Counter(fate or "unknown" for fate in self.fates.values())
        return {
            "lost": sum(n for fate, n in ends.items() if fate != TRAINED and fate not in FREE_TO_LOSE),
            "duplicated": self.duplicated,
            "inexact": self.inexact,
            "stale_served": self.stale_served,
            "unbalanced_steps": self.unbalanced,
            "started": len(self.fates),
            "trained": ends[TRAINED],
            "dropped": {reason: n for reason, n in sorted(ends.items()) if reason not in (TRAINED, "unknown")},
            "steps": self.steps,
            "trained_tokens": self.tokens,
        }


class WatchedAccounting(Accounting):
    """Keeps, beside the counts, the fate of each trajectory by its id."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def start(self, trajectory_id: str) -> None:
        if trajectory_id in self._ledger.fates:
            self._ledger.duplicated += 1
            self._ledger.complain(f"{trajectory_id} was started twice")
        super().start(trajectory_id)
        self._ledger.fates[trajectory_id] = None

    def train(self, trajectory_ids: Iterable[str]) -> None:
        ids = list(trajectory_ids)
        super().train(ids)
        self._ledger.fates.update(dict.fromkeys(ids, TRAINED))

    def drop(self, trajectory_ids: Iterable[str], reason: DropReason) -> None:
        ids = list(trajectory_ids)
        super().drop(ids, reason)
        self._ledger.fates.update(dict.fromkeys(ids, str(reason)))


class WatchedClient(LLMServerClient):
    """Checks each output's versions against what was served while it was sampled.

    That is, every version from the last one all engines had taken when the request was sent to the newest that was on
    its way when it ended.
    """

    def __init__(self, ledger: Ledger, **options: Any) -> None:
        super().__init__(**options)
        self._ledger = ledger
        self._published = self._offered = 0

    async def generate(self, request_id: str, **request: Any) -> TokenOutput:
        oldest = self._published
        output = await super().generate(request_id, **request)
        versions = output.policy_versions
        wrong = [version for version in versions if not oldest <= version <= self._offered]
        if wrong or list(versions) != sorted(versions):
            self._ledger.stale_served += len(wrong) or 1
            self._ledger.complain(f"{request_id}: versions {versions}, served were {oldest} to {self._offered}")
        return output

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        self._offered = update.version
        await super().update_weights(update, mode=mode)
        self._published = update.version
