"""Invariants watched during a run: each trajectory has one fate, each token can be recomputed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jax_agent_rl.agents import derive_seed
from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.merge_outputs import DecodeText
from jax_agent_rl.rollout.pool import ServerPool
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import DropReason, PauseMode, TokenOutput, Trajectory
from tests.chaos.engine import context_key, hash_policy

TRAINED = "trained"
FREE_TO_LOSE = frozenset(
    {DropReason.CANCELLED, DropReason.TOOL_SERVER_ERROR, DropReason.SINGLE_MEMBER}
)
"""Losses that are no failure.

They are requests in flight at the end, trajectories whose tool server was killed, and the last
member of such a group.
"""
_MAX_COMPLAINTS = 20
"""Complaints that are stored as text; all are counted."""


def problems(trajectory: Trajectory, *, seed: int) -> Iterator[str]:
    """Recompute a trajectory from weights, seeds and contexts; describe every difference.

    Its id ends with the step, index and number from which the collector of a run with this seed
    seeded it.
    """
    name = trajectory.trajectory_id
    label, *numbers = name.rsplit("-", 3)
    trajectory_seed = derive_seed(seed, label, *map(int, numbers))
    key = context_key(trajectory.prompt_ids)
    prompt_len = len(trajectory.prompt_ids)
    ids: list[int] = []
    sampled: list[tuple[int, int, float, int]] = []  # index in the response, id, log-prob, version
    for number, turn in enumerate(trajectory.turns):
        output = turn.output
        turn_seed = derive_seed(trajectory_seed, number)
        for token, log_prob, version in zip(
            output.token_ids, output.log_probs, output.policy_versions, strict=True
        ):
            policy = hash_policy(seed, version)
            expected = policy.sample(key, seed=turn_seed, position=prompt_len + len(ids))
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

        # The reward of a tool call is its number within the trajectory.
        action_count = max((call.reward for call in turn.tool_calls), default=0.0)
        if action_count > number + 1:
            yield f"{name}: its tool acted {action_count:g} times in {number + 1} turns"

    if list(trajectory.response_ids) != ids or _sampled_columns(trajectory) != sampled:
        yield f"{name}: what the learner reads is not what its turns hold"


def _sampled_columns(trajectory: Trajectory) -> list[tuple[int, int, float, int]]:
    """Return index, id, log-prob and version of each sampled id, as the learner reads them."""
    columns = zip(
        trajectory.response_ids,
        trajectory.response_mask,
        trajectory.rollout_logprobs,
        trajectory.policy_versions,
        strict=True,
    )
    sampled = []
    for index, (token, is_sampled, log_prob, version) in enumerate(columns):
        if is_sampled:
            sampled.append((index, token, log_prob, version))
    return sampled


class Ledger:
    """Findings of one run.

    Attributes:
        fates: fate of every started trajectory: None while in flight, ``trained``, or the reason it
            was dropped.
        duplicated: number of trajectories that were started twice or reached the learner twice.
        inexact: number of trajectories with a wrong token, mask or tool call.
        stale_served: number of tokens of a version that was not served while they were sampled.
        unbalanced: number of steps after which the accounting did not balance.
        steps: number of steps that the learner finished.
        tokens: number of sampled ids that were trained on.
        warm: end of the first step by ``time.monotonic``, and the number of trajectories trained by
            then.
        complaints: the first failures, as text.
    """

    def __init__(self, seed: int) -> None:
        self.fates: dict[str, str | None] = {}
        self.duplicated = 0
        self.inexact = 0
        self.stale_served = 0
        self.unbalanced = 0
        self.steps = 0
        self.tokens = 0
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
            problem = next(problems(trajectory, seed=self._seed), None)
            if problem is not None:
                self.inexact += 1
                self.complain(problem)

    def finish_step(self, accounting: Accounting) -> None:
        """Record the end of a step, and check that accounting and fates agree."""
        self.steps += 1
        if self.warm is None:
            self.warm = (time.monotonic(), self.count(TRAINED))
        try:
            accounting.check()
        except AssertionError as error:
            self.unbalanced += 1
            self.complain(str(error))
        without_fate = {name for name, fate in self.fates.items() if fate is None}
        if without_fate != accounting.in_flight or len(self.fates) != accounting.started:
            self.unbalanced += 1
            self.complain(
                f"after step {self.steps} the trajectories in flight are not those without a fate"
            )

    def rate(self, now: float) -> float:
        """Return the trajectories trained per second since the first step; 0 before its end."""
        if self.warm is None:
            return 0.0
        warm_time, warm_count = self.warm
        return (self.count(TRAINED) - warm_count) / (now - warm_time)

    def count(self, fate: str) -> int:
        """Return the number of trajectories with this fate."""
        return list(self.fates.values()).count(fate)

    def summary(self) -> dict[str, Any]:
        """Return the findings as JSON.

        ``lost`` counts trajectories without a fate and those dropped for a reason not in
        :data:`FREE_TO_LOSE`: an engine's failure, for example, may cost time but no trajectory.
        """
        counts = Counter(fate or "unknown" for fate in self.fates.values())
        lost = 0
        dropped = {}
        for fate, count in sorted(counts.items()):
            if fate == TRAINED:
                continue
            if fate not in FREE_TO_LOSE:
                lost += count
            if fate != "unknown":
                dropped[fate] = count
        return {
            "lost": lost,
            "duplicated": self.duplicated,
            "inexact": self.inexact,
            "stale_served": self.stale_served,
            "unbalanced_steps": self.unbalanced,
            "started": len(self.fates),
            "trained": counts[TRAINED],
            "dropped": dropped,
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


class WatchedPool(ServerPool):
    """Remembers the newest versions that were offered to the servers, and that all had loaded."""

    offered = 0
    published = 0

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        self.offered = update.version
        await super().update_weights(update, mode=mode)
        self.published = update.version


class WatchedClient(LLMServerClient):
    """Client that checks each output's versions against those served while it was sampled.

    Served are all versions from the last one that every engine had loaded when the request was
    sent, to the newest one that was being published when it ended.
    """

    def __init__(
        self, ledger: Ledger, *, decode_text: DecodeText | None = None, **pool_options: Any
    ) -> None:
        super().__init__(decode_text=decode_text)
        self._ledger = ledger
        self._watched_pool = WatchedPool(**pool_options)
        self.pool = self._watched_pool

    async def generate(self, request_id: str, **request: Any) -> TokenOutput:
        oldest = self._watched_pool.published
        output = await super().generate(request_id, **request)
        newest = self._watched_pool.offered
        versions = output.policy_versions
        wrong = [version for version in versions if not oldest <= version <= newest]
        if wrong or list(versions) != sorted(versions):
            self._ledger.stale_served += len(wrong) or 1
            self._ledger.complain(
                f"{request_id}: versions {versions}, served were {oldest} to {newest}"
            )
        return output
