"""Looks at a run's metrics step by step and says what goes wrong once, when it begins.

::

    a step's metrics ─► every Rule: value >= begins, `steps` times in a row ─► said, counted from there on
                                    value <  ends,   `steps` times in a row ─► over; it may begin again

What is looked for stands in :mod:`~jax_agent_rl.observe.warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]
"""A line of ``metrics.jsonl``, kind ``step``."""
Value = Callable[[Record], float | None]
"""What a rule looks at; None where a step says nothing about it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Something that should not be so for long.

    Attributes:
        name: under which it is counted.
        value: what is looked at.
        begins: it is bad from here on.
        ends: and well again below.
        message: what is seen, with ``{value}``.
        advice: what to do.
        steps: in a row that it takes to begin, or to end.
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
    """One warning of a run, as it stands.

    Attributes:
        name, message, advice: of the rule, the message with the value at which it last began.
        first_step: at which it was said; 0: before the first.
        last_step: until which it held.
        steps: on which it held.
        active: it still holds.
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
        """Takes one value; True if the warning begins with it."""
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
        if self.warned:  # not for the first time: one entry, from its first step on
            self.warned.active, self.warned.last_step, self.warned.steps = True, step, self.warned.steps + 1
            self.warned.message = message
            return
        self.warned = Warned(
            name=self.rule.name, message=message, advice=self.rule.advice, first_step=step, last_step=step
        )


class Watch:
    """Looks at every step of a run.

    Args:
        rules: what for; their values may remember earlier steps, so each watch has rules of its own.
        say: takes a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], say: Callable[[str], None]) -> None:
        self._watched = [_Watched(rule=rule) for rule in rules]
        self._noted: list[Warned] = []
        self._say = say

    def see(self, record: Record, *, aloud: bool = True) -> None:
        """Takes a line of metrics; only those of steps matter.

        Args:
            aloud: False for lines of before a restart: what they warned of was said then.
        """
        if record.get("kind") != "step":
            return
        for watched in self._watched:
            value = watched.rule.value(record)
            if value is not None and watched.see(record["step"], value) and aloud and watched.warned:
                self._say(_line(watched.warned))

    def note(self, warned: Warned) -> None:
        """Adds what was seen, and said, before the first step."""
        self._noted.append(warned)

    @property
    def warnings(self) -> list[Warned]:
        """All there were, in the order of their beginning."""
        begun = [watched.warned for watched in self._watched if watched.warned]
        return self._noted + sorted(begun, key=lambda warned: warned.first_step)

    @property
    def active(self) -> list[str]:
        """Names of those that hold now."""
        return [warned.name for warned in self.warnings if warned.active]


class SinceStart:
    """A metric compared with its mean over the first steps in which something was learnt; a :data:`Value`.

    Args:
        name: of the metric.
        compare: value now, mean of the first ones -> what the rule looks at.
        steps: how many are the first.
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
    """What a running total grew by since the step before; a :data:`Value`.

    A total that is smaller than the one before began anew, with a process that resumed the run.

    Args:
        name: of the metric.
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
