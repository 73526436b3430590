"""Evaluation of a run's warnings, step by step: each is printed once, when it begins.

::

    a step's metrics ─► every Rule: value >= begins, `steps` times in a row ─► printed; counted from there on
                                    value <  ends,   `steps` times in a row ─► over; it may begin again

The rules are in :mod:`~jax_agent_rl.observe.warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        message: the observation, with ``{value}``.
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


@dataclass(kw_only=True)
class _WatchedRule:
    rule: Rule
    streak: int = 0
    warning: RunWarning | None = None

    def update(self, step: int, value: float) -> bool:
        """Take one value; return whether the warning begins with it."""
        rule, warning = self.rule, self.warning
        active = warning if warning and warning.active else None
        changes = value < rule.ends if active else value >= rule.begins
        self.streak = self.streak + 1 if changes else 0
        if active and not changes:
            active.last_step, active.steps = step, active.steps + 1
        if self.streak < rule.steps:
            return False
        self.streak = 0
        if active:
            active.active = False
            return False
        message = rule.message.format(value=value)
        if warning is None:
            self.warning = RunWarning(
                name=rule.name, message=message, advice=rule.advice, first_step=step, last_step=step
            )
        else:  # it began before: one entry, from its first step on
            warning.active, warning.last_step, warning.steps = True, step, warning.steps + 1
            warning.message = message
        return True


class Watch:
    """Evaluates rules on every step of a run.

    Args:
        rules: not shared with another watch, because their values may remember earlier steps.
        print_line: takes a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], print_line: Callable[[str], None]) -> None:
        self._rules = [_WatchedRule(rule=rule) for rule in rules]
        self._added: list[RunWarning] = []
        self._print_line = print_line

    def update(self, record: Record, *, silent: bool = False) -> None:
        """Take a record of ``metrics.jsonl``; those of other kinds than ``step`` are ignored.

        ``silent`` is for records from before a restart, whose warnings were printed then.
        """
        if record.get("kind") != "step":
            return
        for watched in self._rules:
            value = watched.rule.value(record)
            if value is not None and watched.update(record["step"], value) and not silent and watched.warning:
                warning = watched.warning
                self._print_line(f"  warning ({warning.name}): {warning.message}. What to do: {warning.advice}")

    def add(self, warning: RunWarning) -> None:
        """Add a warning printed before the first step."""
        self._added.append(warning)

    @property
    def warnings(self) -> list[RunWarning]:
        """All warnings so far, in the order of their first steps."""
        begun = [watched.warning for watched in self._rules if watched.warning]
        return self._added + sorted(begun, key=lambda warning: warning.first_step)

    @property
    def active(self) -> list[str]:
        """Names of the warnings that hold now."""
        return [warning.name for warning in self.warnings if warning.active]


class SinceStart:
    """A metric compared with its mean over the first steps that trained on tokens; a :data:`Value`.

    Args:
        name: name of the metric.
        compare: takes the current value and the mean of the first ones; returns the rule's value.
        steps: number of first steps.
    """

    def __init__(self, name: str, compare: Callable[[float, float], float], *, steps: int = 3) -> None:
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
