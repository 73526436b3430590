"""Watching a run's steps by rules, and the warnings that they raise; ``warnings`` holds the table of rules.

::

    a step's metrics ─► every Rule: value >= begins, `steps` times in a row ─► printed; counted from there on
                                    value <  ends,   `steps` times in a row ─► over; it may begin again
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
"""The value a rule compares; None where a step has none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that should not last.

    Attributes:
        name: key of the warning.
        value: the watched value.
        begins: the condition holds from this value on.
        ends: it is over below this value.
        message: the observation, with ``{value}``, and ``{limit}`` for what cuts most trajectories
            off.
        advice: what to do.
        steps: consecutive steps that it takes to begin, or to end.
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
        name, message, advice: from the rule, the message with the value at which it last began.
        first_step: the step at which it was printed; 0: before the first.
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
        rules: with different names; not shared with another watch, because their values may
            remember earlier steps.
        print_line: takes a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], print_line: Callable[[str], None]) -> None:
        self._rules = rules
        self._streaks: Counter[str] = Counter()
        self._warnings: dict[str, RunWarning] = {}  # by name, in the order of their first steps
        self._print_line = print_line

    def update(self, record: Record, *, silent: bool = False) -> None:
        """Take a record of ``metrics.jsonl``; those of other kinds than ``step`` are ignored.

        ``silent`` is for records from before a restart, whose warnings were printed then.
        """
        if record.get("kind") != "step":
            return
        for rule in self._rules:
            value = rule.value(record)
            if value is not None and self._begins(rule, record, value) and not silent:
                warning = self._warnings[rule.name]
                self._print_line(
                    f"  warning ({warning.name}): {warning.message}. What to do: {warning.advice}"
                )

    def _begins(self, rule: Rule, record: Record, value: float) -> bool:
        """Take one value; return whether the warning begins with it."""
        step = record["step"]
        warning = self._warnings.get(rule.name)
        active = warning if warning and warning.active else None
        changes = value < rule.ends if active else value >= rule.begins
        self._streaks[rule.name] = self._streaks[rule.name] + 1 if changes else 0
        if active and not changes:
            active.last_step, active.steps = step, active.steps + 1
        if self._streaks[rule.name] < rule.steps:
            return False
        self._streaks[rule.name] = 0
        if active:
            active.active = False
            return False
        self._warnings[rule.name] = RunWarning(
            name=rule.name,
            message=rule.message.format(value=value, limit=_commonest_limit(record)),
            advice=rule.advice,
            first_step=(
                warning.first_step if warning else step
            ),  # if it began before, it is one entry
            last_step=step,
            steps=warning.steps + 1 if warning else 1,
        )
        return True

    def add(self, warning: RunWarning) -> None:
        """Add a warning printed before the first step."""
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
    cut = {
        name: n
        for name, n in record.get("finish_reasons", {}).items()
        if FinishReason(name).truncated
    }
    return max(cut, key=lambda name: cut[name], default="")


def _first(record: Record, *names: str) -> float | None:
    """Return the first of these metrics that a record has; those of earlier versions have fewer."""
    return next((record[name] for name in names if name in record), None)


class SinceStart:
    """A metric compared with its mean over the first steps that trained on tokens; a :data:`Value`.

    Args:
        name: name of the metric.
        compare: takes the current value and the mean of the first ones; returns the rule's value.
        steps: number of first steps.
    """

    def __init__(
        self, name: str, compare: Callable[[float, float], float], *, steps: int = 3
    ) -> None:
        self._name, self._compare, self._steps = name, compare, steps
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
    """The share of a metric's best value that is gone, once that was at least 0.1; a :data:`Value`.

    Args:
        names: of the metric; the first one that a record has.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._best = 0.0

    def __call__(self, record: Record) -> float | None:
        value = _first(record, *self._names)
        if value is None:
            return None
        self._best = max(self._best, value)
        return 1 - value / self._best if self._best >= 0.1 else None


class RewardWithoutAccuracy:
    """The share of the best step's accuracy that is gone, 0 unless most of the reward has stayed; a :data:`Value`."""

    def __init__(self) -> None:
        self._reward = SinceBest("score_mean", "reward_mean")
        self._accuracy = SinceBest(*(f"reward/{part}" for part in ACCURACY_PARTS))

    def __call__(self, record: Record) -> float | None:
        reward, accuracy = self._reward(record), self._accuracy(record)
        return 0.0 if accuracy is None or reward is None or reward > 0.5 else accuracy


class SinceLast:
    """The growth of a running total since the step before; a :data:`Value`.

    A total smaller than the one before was restarted by a process that resumed the run.
    """

    def __init__(self, name: str) -> None:
        self._name, self._before = name, 0.0

    def __call__(self, record: Record) -> float | None:
        total = record.get(self._name)
        if total is None:
            return None
        before, self._before = self._before, total
        return total - before if total >= before else total


class NoReward:
    """1 while every score has been 0, then 0; a :data:`Value`. Penalties of a length are no reward."""

    def __init__(self) -> None:
        self._earned = False

    def __call__(self, record: Record) -> float | None:
        largest, least = (
            _first(record, "score_max", "reward_max"),
            _first(record, "score_min", "reward_min"),
        )
        self._earned |= largest is None or bool(largest or least)
        return float(not self._earned)
