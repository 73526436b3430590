"""The log-prob gap between engine and learner, on the tokens where both use the same weights.

A token can be compared if the learner scores it with the very weights it was sampled from: its policy version is one
whose parameters are the learner's now, and so are those of all tokens before it in its turn (a generation that went on
through a weight update may have kept keys and values of the old weights). Everything else is off-policy: a gap there is
the policy's progress and says nothing about the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.types import Trajectory, Turn

INFINITE = 1e4
"""Nats that stand for an infinite gap, in sums that have to stay finite."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """|engine's log-prob - learner's| over the tokens that can be compared.

    Attributes:
        tokens: how many there are.
        mean: nats; 0 without tokens.
        largest: nats, of a single token.
    """

    tokens: int
    mean: float
    largest: float

    @classmethod
    def of(cls, gaps: np.ndarray) -> Comparison:
        """Return the comparison of signed differences; NaN is left out, the update itself deals with it."""
        sizes = np.minimum(np.abs(gaps[~np.isnan(gaps)]), INFINITE)
        if not len(sizes):
            return cls(tokens=0, mean=0.0, largest=0.0)
        return cls(tokens=len(sizes), mean=float(sizes.mean()), largest=float(sizes.max()))

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Mapping[str, Any]]) -> Comparison:
        """Return what a policy update's own pass found, see ``learner.objective.policy_loss``."""
        tokens, total = (float(statistics["sum"][name]) for name in ("compared", "compared_gap"))
        mean = total / tokens if tokens else 0.0
        return cls(tokens=round(tokens), mean=mean, largest=float(statistics["max"]["compared_gap"]))


@dataclass(frozen=True, kw_only=True)
class AgreementCheck:
    """A check of the agreement before a step's first optimizer update.

    Attributes:
        since: the first policy version whose parameters are those that the update begins with.
        inspect: takes the comparison, of the scoring pass or, without one, of the first update's; what it
            raises ends the update before anything has changed.
    """

    since: int
    inspect: Callable[[Comparison], None]


UNCHECKED = AgreementCheck(since=0, inspect=lambda comparison: None)


def comparable(trajectory: Trajectory, since: int) -> np.ndarray:
    """Return, for each token with loss, whether it can be compared (see the module), bool [S].

    Args:
        trajectory: of S tokens with loss.
        since: the first policy version of the parameters compared with.
    """
    return np.array(
        [mine for s in trajectory.sequences for turn in s.turns for mine in _turn_selection(turn, since)], bool
    )


def compare(old: Iterable[np.ndarray], rollout: Iterable[np.ndarray], tokens: Iterable[np.ndarray]) -> Comparison:
    """Compare log-probs [S] per trajectory of the learner and of the engine, over the given tokens."""
    gaps = [(o - r)[mine] for o, r, mine in zip(old, rollout, tokens, strict=True)]
    return Comparison.of(np.concatenate(gaps) if gaps else np.zeros(0))


def _turn_selection(turn: Turn, since: int) -> list[bool]:
    versions = turn.output.policy_versions
    first = versions[0] if versions else -1
    same = np.cumprod([version == first >= since for version in versions]).astype(bool)
    sampled = same[np.asarray(turn.output.loss_mask, bool)].tolist()
    return sampled + [False] * (len(turn.appended_ids) * turn.learn_appended)


@contextlib.contextmanager
def cancel_on_breach(check: AgreementCheck, cancellation: StepCancellation) -> Iterator[AgreementCheck]:
    """Yield a check that cancels the step instead of raising, and raise once the learner has given it up.

    For processes that update together: the others would wait for a process that raises by itself.
    """
    refusals: list[JaxAgentRLError] = []

    def inspect(comparison: Comparison) -> None:
        try:
            check.inspect(comparison)
        except JaxAgentRLError as error:
            refusals.append(error)
            cancellation.cancel()

    try:
        yield replace(check, inspect=inspect)
    except StepCancelled:
        if refusals:
            raise refusals[0] from None
        raise
