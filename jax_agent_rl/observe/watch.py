"""Watching a run's metrics step by step: each warning is printed once, when it begins.

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
        message: what is observed, with ``{value}``.
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
class Warned:
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
class _Watched:
    rule: Rule
    streak: int = 0
    warned: Warned | None = None

    def see(self, step: int, value: float) -> bool:
        """Take one value; return whether the warning begins with it."""
        warned = self.warned if self.warned and self.warned.active else None
        turns = value < self.rule.ends if warned else value >= self.rule.begins
        self.streak = self.streak + 1 if turns else 0
        if warned and not turns:
            warned.last_step, warned.steps = step, warned.steps + 1
        if self.streak < self.rule.steps:
            return False
        self.streak = 0
        if warned:
            warned.active = False
            return False
        self._begin(step, value)
        return True

    def _begin(self, step: int, value: float) -> None:
        message = self.rule.message.format(value=value)
        if self.warned:  # it began before: one entry, from its first step on
            self.warned.active, self.warned.last_step, self.warned.steps = True, step, self.warned.steps + 1
            self.warned.message = message
            return
        self.warned = Warned(
            name=self.rule.name, message=message, advice=self.rule.advice, first_step=step, last_step=step
        )


class Watch:
    """Evaluates rules on every step of a run.

    Args:
        rules: not shared with another watch, because their values may remember earlier steps.
        print_line: takes a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], print_line: Callable[[str], None]) -> None:
        self._watched = [_Watched(rule=rule) for rule in rules]
        self._noted: list[Warned] = []
        self._print_line = print_line

    def see(self, record: Record, *, aloud: bool = True) -> None:
        """Take a metrics record; those of other kinds than ``step`` are ignored.

        Args:
            record: a record of ``metrics.jsonl``.
            aloud: False for records from before a restart, whose warnings were printed then.
        """
        if record.get("kind") != "step":
            return
        for watched in self._watched:
            value = watched.rule.value(record)
            if value is not None and watched.see(record["step"], value) and aloud and watched.warned:
                self._print_line(_line(watched.warned))

    def note(self, warned: Warned) -> None:
        """Add a warning printed before the first step."""
        self._noted.append(warned)

    @property
    def warnings(self) -> list[Warned]:
        """All warnings so far, in the order of their first steps."""
        begun = [watched.warned for watched in self._watched if watched.warned]
        return self._noted + sorted(begun, key=lambda warned: warned.first_step)

    @property
    def active(self) -> list[str]:
        """Names of the warnings that hold now."""
        return [warned.name for warned in self.warnings if warned.active]


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

    A total smaller than the one before was restarted, by a process that resumed the run.

    Args:
        name: name of the metric.
    """

    def __init__(self, name: str) -> None:
        self._name, self._before = name, 0.0

    def __call__(self, record: Record) -> float | None:
        total = record.get(self._name)
        if total is None:
            return None
        before, self._before = self._before, total
        return total - before if total >= before else total


def _line(warned: Warned) -> str:
    return f"  warning ({warned.name}): {warned.message}. What to do: {warned.advice}"
