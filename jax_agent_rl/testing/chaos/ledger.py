"""Invariants watched during a run: one fate for each trajectory, exact tokens of versions that were served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jax_agent_rl.agents import derive_seed
from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.chaos.engine import context_key, hash_policy
from jax_agent_rl.types import DropReason, PauseMode, TokenOutput, Trajectory

TRAINED = "trained"
FREE_TO_LOSE = frozenset(
    {DropReason.CANCELLED, DropReason.TOOL_SERVER_ERROR, DropReason.SINGLE_MEMBER}
)
"""Losses that are no failure: requests in flight at the end, state of a killed tool server, the
rest of its group."""
_MAX_COMPLAINTS = 20  # kept as text; all are counted


def problems(trajectory: Trajectory, *, seed: int) -> Iterator[str]:
    """Recompute a trajectory from weights, seeds and contexts, and yield a description of every difference.

    Its id ends with the step, index and number from which the collector of a run with this seed
    seeded it.
    """
    name = trajectory.trajectory_id
    label, *numbers = name.rsplit("-", 3)
    own_seed = derive_seed(seed, label, *map(int, numbers))
    key, position = context_key(trajectory.prompt_ids), len(trajectory.prompt_ids)
    ids: list[int] = []
    sampled: list[tuple[int, int, float, int]] = []  # place in the response, id, log-prob, version
    for number, turn in enumerate(trajectory.turns):
        output, turn_seed = turn.output, derive_seed(own_seed, number)
        for token, log_prob, version in zip(
            output.token_ids, output.log_probs, output.policy_versions, strict=True
        ):
            expected = hash_policy(seed, version).sample(
                key, seed=turn_seed, position=position + len(ids)
            )
            if expected != (token, log_prob):
                yield (
                    f"{name}: id {len(ids)} is {token, log_prob}; version {version} gives"
                    f" {expected}"
                )
            sampled.append((len(ids), token, log_prob, version))
            ids.append(token)
            key = context_key([token], key)
        ids += turn.appended_ids
        key = context_key(turn.appended_ids, key)
        acted = max((call.reward for call in turn.tool_calls), default=0.0)
        if acted > number + 1:
            yield f"{name}: its tool acted {acted:g} times in {number + 1} turns"
    columns = (trajectory.response_mask, trajectory.rollout_logprobs, trajectory.policy_versions)
    flat = enumerate(zip(trajectory.response_ids, *columns, strict=True))
    if list(trajectory.response_ids) != ids or sampled != [
        (i, t, lp, v) for i, (t, m, lp, v) in flat if m
    ]:
        yield f"{name}: what the learner reads is not what its turns hold"


class Ledger:
    """Findings of one run.

    Args:
        seed: the run's seed.

    Attributes:
        fates: fate of every started trajectory: None while in flight, ``trained``, or the reason it
            was dropped.
        duplicated: trajectories that were started twice or reached the learner twice.
        inexact: trajectories with a wrong token, mask or tool call.
        stale_served: tokens of a version that was not served while they were sampled.
        unbalanced: steps after which the accounting did not balance.
        steps: steps that the learner finished.
        tokens: sampled ids that were trained on.
        warm: end of the first step by ``time.monotonic``, and the number of trajectories trained by
            then.
        complaints: the first failures, as text.
    """

    def __init__(self, seed: int) -> None:
        self.fates: dict[str, str | None] = {}
        self.duplicated = self.inexact = self.stale_served = self.unbalanced = 0
        self.steps = self.tokens = 0
        self.warm: tuple[float, int] | None = None
        self.complaints: list[str] = []
        self._seed = seed
        self._trained_ids: set[str] = set()

    def complain(self, text: str) -> None:
        """Keep the description of a failure."""
        if len(self.complaints) < _MAX_COMPLAINTS:
            self.complaints.append(text)

    def learn(self, trajectories: Iterable[Trajectory]) -> None:
        """Verify trajectories that reached the learner."""
        for trajectory in trajectories:
            name = trajectory.trajectory_id
            if name in self._trained_ids:
                self.duplicated += 1
                self.complain(f"{name} reached the learner twice")
            self._trained_ids.add(name)
            self.tokens += trajectory.num_sampled
            if wrong := next(problems(trajectory, seed=self._seed), None):
                self.inexact += 1
                self.complain(wrong)

    def finish_step(self, accounting: Accounting) -> None:
        """Record the end of a step, and check that accounting and fates agree."""
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
            self.complain(
                f"after step {self.steps} the trajectories in flight are not those without a fate"
            )

    def rate(self, now: float) -> float:
        """Return the trajectories trained per second since the first step; 0 before its end."""
        if self.warm is None:
            return 0.0
        since, trained = self.warm
        return (self.count(TRAINED) - trained) / (now - since)

    def count(self, fate: str) -> int:
        """Return the number of trajectories with this fate."""
        return sum(f == fate for f in self.fates.values())

    def summary(self) -> dict[str, Any]:
        """Return the findings as JSON.

        ``lost`` counts trajectories without a fate and those dropped for a reason not in
        :data:`FREE_TO_LOSE`: an engine's failure, for example, may cost time but no trajectory.
        """
        ends = Counter(fate or "unknown" for fate in self.fates.values())
        return {
            "lost": sum(
                n for fate, n in ends.items() if fate != TRAINED and fate not in FREE_TO_LOSE
            ),
            "duplicated": self.duplicated,
            "inexact": self.inexact,
            "stale_served": self.stale_served,
            "unbalanced_steps": self.unbalanced,
            "started": len(self.fates),
            "trained": ends[TRAINED],
            "dropped": {
                reason: n
                for reason, n in sorted(ends.items())
                if reason not in (TRAINED, "unknown")
            },
            "steps": self.steps,
            "trained_tokens": self.tokens,
        }


class WatchedAccounting(Accounting):
    """Accounting that also records the fate of each trajectory."""

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
    """Client that checks each output's versions against those served while it was sampled.

    Those are all versions from the last one that every engine had loaded when the request was sent
    to the newest one being published when it ended.
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
            self._ledger.complain(
                f"{request_id}: versions {versions}, served were {oldest} to {self._offered}"
            )
        return output

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        self._offered = update.version
        await super().update_weights(update, mode=mode)
        self._published = update.version
