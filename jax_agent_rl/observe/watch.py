"""Watching a run's steps by rules, and the warnings that they raise.

``warnings`` holds the table of rules. Every step's metrics are compared with each of them::

    value >= begins, `steps` times in a row ─► the warning is printed, and counted from there on
    value <  ends,   `steps` times in a row ─► the warning is over; it may begin again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.outcomes import ACCURACY_PARTS
from jax_agent_rl.types import FinishReason

Record = Mapping[str, Any]
"""A line of ``metrics.jsonl``, kind ``step``."""
Value = Callable[[Record], float | None]
"""Returns the value that a rule compares; None where a step has none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that should not last.

    Attributes:
        name: key of the warning.
        value: returns the watched value.
        begins: the condition holds from this value on.
        ends: the condition is over below this value.
        message: the observation, with ``{value}``, and ``{limit}`` for what cuts most trajectories
            off.
        advice: what the user can do.
        steps: consecutive steps that the warning takes to begin, or to end.
    """

    name: str
    value: Value
    begins: float
    ends: float
    message: str
    advice: str
    steps: int = 3


@dataclass(kw_only=True)
class RunWarning:
    """The state of one warning of a run.

    Attributes:
        message: the rule's message, with the value at which the warning last began.
        first_step: the step at which it was first printed; 0 means before the first step.
        last_step: the last step on which it held.
        steps: number of steps on which it held.
        active: whether it still holds.
    """

    name: str
    message: str
    advice: str
    first_step: int
    last_step: int
    steps: int = 1
    active: bool = True


class Watch:
    """Evaluates rules on every step of a run.

    Args:
        rules: rules with different names; not shared with another watch, because their values may
            remember earlier steps.
        print_line: called with the text of a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], print_line: Callable[[str], None]) -> None:
        self._rules = rules
        self._streaks: Counter[str] = Counter()
        self._warnings: dict[str, RunWarning] = {}  # by name, in the order of their first steps
        self._print_line = print_line

    def update(self, record: Record, *, silent: bool = False) -> None:
        """Take a record of ``metrics.jsonl``; records of other kinds than ``step`` are ignored.

        Args:
            silent: print nothing: the record is from before a restart, and its warnings were
                printed then.
        """
        if record.get("kind") != "step":
            return
        for rule in self._rules:
            value = rule.value(record)
            if value is None:
                continue
            begins = self._begins(rule, record, value)
            if begins and not silent:
                warning = self._warnings[rule.name]
                self._print_line(
                    f"  warning ({warning.name}): {warning.message}. What to do: {warning.advice}"
                )

    def _begins(self, rule: Rule, record: Record, value: float) -> bool:
        """Take one value; return whether the warning begins with it."""
        step = record["step"]
        warning = self._warnings.get(rule.name)

        if warning is not None and warning.active:
            is_below = value < rule.ends
            if not is_below:
                warning.last_step = step
                warning.steps += 1
            if self._completes_streak(rule, is_below):
                warning.active = False
            return False

        if not self._completes_streak(rule, value >= rule.begins):
            return False
        # A warning that begins again stays one entry.
        first_step = step
        earlier_steps = 0
        if warning is not None:
            first_step = warning.first_step
            earlier_steps = warning.steps
        self._warnings[rule.name] = RunWarning(
            name=rule.name,
            message=rule.message.format(value=value, limit=_commonest_limit(record)),
            advice=rule.advice,
            first_step=first_step,
            last_step=step,
            steps=earlier_steps + 1,
        )
        return True

    def _completes_streak(self, rule: Rule, continues: bool) -> bool:
        """Count a step in the rule's streak, or end the streak; return whether it is complete."""
        if not continues:
            self._streaks[rule.name] = 0
            return False
        self._streaks[rule.name] += 1
        if self._streaks[rule.name] < rule.steps:
            return False
        self._streaks[rule.name] = 0
        return True

    def add(self, warning: RunWarning) -> None:
        """Add a warning that was printed before the first step."""
        self._warnings[warning.name] = warning

    @property
    def warnings(self) -> list[RunWarning]:
        """All warnings so far, in the order of their first steps."""
        return list(self._warnings.values())

    @property
    def active(self) -> list[str]:
        """Names of the warnings that hold now."""
        return [warning.name for warning in self.warnings if warning.active]


def _commonest_limit(record: Record) -> str:
    """Return the finish reason of most trajectories that were cut off; empty if none was."""
    limits = {}
    for name, count in record.get("finish_reasons", {}).items():
        if FinishReason(name).truncated:
            limits[name] = count
    return max(limits, key=lambda name: limits[name], default="")


def _first(record: Record, *names: str) -> float | None:
    """Return the first of these metrics that a record has; earlier versions' records have fewer."""
    for name in names:
        if name in record:
            return record[name]
    return None


class SinceStart:
    """A metric compared with its mean over the first steps that trained on tokens; a :data:`Value`.

    Args:
        compare: takes the current value and the mean of the first ones; returns the rule's value.
        steps: number of first steps.
    """

    def __init__(
        self, name: str, compare: Callable[[float, float], float], *, steps: int = 3
    ) -> None:
        self._name = name
        self._compare = compare
        self._steps = steps
        self._first: list[float] = []

    def __call__(self, record: Record) -> float | None:
        value = record.get(self._name)
        if value is None or not record.get("trained_tokens"):
            return None
        if len(self._first) < self._steps:
            self._first.append(value)
            return None
        return self._compare(value, sum(self._first) / self._steps)


class SinceBest:
    """The share of a metric's best value that is gone; a :data:`Value`.

    It is None until the best value is at least 0.1.

    Args:
        names: names of the metric; the first one that a record has counts.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._best = 0.0

    def __call__(self, record: Record) -> float | None:
        value = _first(record, *self._names)
        if value is None:
            return None
        self._best = max(self._best, value)
        if self._best < 0.1:
            return None
        return 1 - value / self._best


class RewardWithoutAccuracy:
    """The share of the best step's accuracy that is gone; a :data:`Value`.

    It is 0 unless most of the reward has stayed.
    """

    def __init__(self) -> None:
        self._reward = SinceBest("score_mean", "reward_mean")
        self._accuracy = SinceBest(*(f"reward/{part}" for part in ACCURACY_PARTS))

    def __call__(self, record: Record) -> float | None:
        lost_reward = self._reward(record)
        lost_accuracy = self._accuracy(record)
        if lost_accuracy is None or lost_reward is None or lost_reward > 0.5:
            return 0.0
        return lost_accuracy


class SinceLast:
    """The growth of a running total since the previous step; a :data:`Value`.

    A total that is smaller than the previous one was restarted by a process that resumed the run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._previous_total = 0.0

    def __call__(self, record: Record) -> float | None:
        total = record.get(self._name)
        if total is None:
            return None
        previous_total = self._previous_total
        self._previous_total = total
        if total >= previous_total:
            return total - previous_total
        return total


class NoReward:
    """1 while every score has been 0, then 0; a :data:`Value`.

    Penalties for length are not rewards.
    """

    def __init__(self) -> None:
        self._has_reward = False

    def __call__(self, record: Record) -> float | None:
        largest = _first(record, "score_max", "reward_max")
        smallest = _first(record, "score_min", "reward_min")
        if largest is None or largest or smallest:
            self._has_reward = True
        return 0.0 if self._has_reward else 1.0
