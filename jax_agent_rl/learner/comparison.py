"""Comparison of engine and learner: which log-probs are comparable, and the check before an update.

The log-probs of engine and learner are *comparable* at a token if the learner scores it with the
very weights it was sampled from. So the parameters of its policy version have to be the learner's
current ones, and so have those of all tokens before it in its turn: a generation that went on
through a weight update may have kept keys and values of the old weights. All other tokens are
off-policy: a gap there is the policy's progress and says nothing about the programs.
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
        """Return the comparison of signed differences.

        NaN is left out: the update itself deals with it.
        """
        sizes = np.minimum(np.abs(gaps[~np.isnan(gaps)]), INFINITE)
        if not len(sizes):
            return cls(tokens=0, mean=0.0, largest=0.0)
        return cls(tokens=len(sizes), mean=float(sizes.mean()), largest=float(sizes.max()))

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Mapping[str, Any]]) -> Comparison:
        """Return the comparison of a policy update's own pass, see ``objective.policy_loss``."""
        tokens = float(statistics["sum"]["compared"])
        total_gap = float(statistics["sum"]["compared_gap"])
        return cls(
            tokens=round(tokens),
            mean=total_gap / tokens if tokens else 0.0,
            largest=float(statistics["max"]["compared_gap"]),
        )


@dataclass(frozen=True, kw_only=True)
class AgreementCheck:
    """A check of the agreement before a step's first optimizer update.

    Attributes:
        since: the first policy version whose parameters are those that the update begins with.
        inspect: takes the comparison, made by the scoring pass or, without one, by the first
            update. What it raises ends the step before anything has changed.
    """

    since: int
    inspect: Callable[[Comparison], None]


UNCHECKED = AgreementCheck(since=0, inspect=lambda comparison: None)


def comparable(trajectory: Trajectory, since: int, before: int | None = None) -> np.ndarray:
    """Return, for each token with loss, whether it can be compared (see the module), bool [S].

    Args:
        trajectory: of S tokens with loss.
        since: the first policy version of the parameters compared with.
        before: the first policy version of later parameters; None: there are none.
    """
    selections = []
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            selections += _turn_selection(turn, since, before)
    return np.array(selections, bool)


def compare(
    old: Iterable[np.ndarray],
    rollout: Iterable[np.ndarray],
    is_compared: Iterable[np.ndarray],
) -> Comparison:
    """Compare log-probs [S] per trajectory, of the learner and of the engine.

    Args:
        old: the learner's.
        rollout: the engine's.
        is_compared: bool [S] per trajectory, the tokens to compare.
    """
    gaps = [np.zeros(0)]
    for old_logprobs, rollout_logprobs, mask in zip(old, rollout, is_compared, strict=True):
        gaps.append((old_logprobs - rollout_logprobs)[mask])
    return Comparison.of(np.concatenate(gaps))


def _turn_selection(turn: Turn, since: int, before: int | None) -> list[bool]:
    """Return for each token of a turn with loss whether it can be compared."""
    versions = np.asarray(turn.output.policy_versions, np.int64)
    loss_mask = np.asarray(turn.output.loss_mask, bool)
    selection = np.zeros(len(versions), bool)
    if len(versions):
        first = versions[0]
        is_current = first >= since and (before is None or first < before)
        if is_current:
            # The tokens up to the first weight update within the turn.
            selection = np.logical_and.accumulate(versions == first)

    selected = selection[loss_mask].tolist()
    if turn.learn_appended:
        selected += [False] * len(turn.appended_ids)  # observations: the engine did not sample them
    return selected


@contextlib.contextmanager
def cancel_on_breach(
    check: AgreementCheck,
    cancellation: StepCancellation,
) -> Iterator[AgreementCheck]:
    """Yield a check that cancels the step instead of raising.

    The error is raised once the learner has given up the step. This is for processes that update
    together: the others would wait for a process that raises by itself.
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
