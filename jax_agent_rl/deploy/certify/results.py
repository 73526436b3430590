"""What a certification measures, and the claims of the documentation that it compares the measurements with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the documentation: ``text`` stands on ``page`` word for word."""

    page: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured number.

    Attributes:
        name: what was measured.
        value: the number.
        unit: of ``value``, of the limits and of ``beside``; empty for counts and ratios.
        claim: what it is compared with.
        low, high: limits, inclusive; None where there is none.
        beside: other numbers for the same thing, such as the prediction of ``plan``.
        detail: where the worst value was found, or how it was measured.
    """

    name: str
    value: float
    unit: str
    claim: Claim
    low: float | None = None
    high: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def limited(self) -> bool:
        """Whether there are limits."""
        return self.low is not None or self.high is not None

    @property
    def deviates(self) -> bool:
        """Whether it is outside its limits, or no number."""
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return not low <= self.value <= high

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that JSON lacks are null."""
        limits = {name: value for name, value in (("low", self.low), ("high", self.high)) if value is not None}
        return {
            "name": self.name,
            "value": _finite(self.value),
            "unit": self.unit,
            **limits,
            "beside": {name: _finite(value) for name, value in self.beside.items()},
            "detail": self.detail,
            "deviates": self.deviates,
            "claim": vars(self.claim),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class NotRunError(Exception):
    """A check, or a part of one, cannot run on this machine."""


class CheckOutcome(StrEnum):
    """How a check ended."""

    AS_CLAIMED = "as claimed"
    MEASURED = "measured"
    """There are no limits for this machine."""
    DEVIATES = "deviates"
    FAILED = "failed"
    """It raised an error."""
    NOT_RUN = "not run"


class Recorder:
    """Takes the measurements of one check.

    Args:
        seconds: budget of the check; parts that have not begun by then are left out.
        claim: what a measurement is compared with if it names no claim of its own.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, *, seconds: float, claim: Claim, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.claim, self._clock, self._begin = seconds, claim, clock, clock()
        self.measurements: list[Measurement] = []
        self.left_out: list[str] = []

    def __call__(self, name: str, value: float, unit: str = "", *, claim: Claim | None = None, **more: Any) -> None:
        """Add a :class:`Measurement`."""
        self.measurements.append(Measurement(name=name, value=value, unit=unit, claim=claim or self.claim, **more))

    def leave_out(self, part: str, why: str) -> None:
        """Record that a part of the check was not run."""
        self.left_out.append(f"{part}: {why}")

    def has_time(self, part: str) -> bool:
        """Whether a part may begin; if not, record that it was left out."""
        if self._clock() - self._begin < self.seconds:
            return True
        self.leave_out(part, f"the {self.seconds:g} s of this check were used up")
        return False


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check.

    Attributes:
        name, title: of the check.
        outcome: how it ended.
        claim: what it is about.
        reason: the error, or why it was not run.
        seconds: its duration.
        measurements: its numbers, also those before an error.
        left_out: parts that were not run, and why.
    """

    name: str
    title: str
    outcome: CheckOutcome
    claim: Claim
    reason: str = ""
    seconds: float = 0.0
    measurements: Sequence[Measurement] = ()
    left_out: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "name": self.name,
            "title": self.title,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "claim": vars(self.claim),
            "left_out": list(self.left_out),
            "measurements": [one.to_json() for one in self.measurements],
        }


def format_number(value: float, unit: str = "") -> str:
    """Format a measured number for people.

    >>> format_number(1.25e10, "B/s"), format_number(0.00042, "s"), format_number(12.5, "tokens/s")
    ('12.5 GB/s', '0.42 ms', '12.5 tokens/s')
    """
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    if unit == "s" and abs(value) < 1:
        value, unit = value * 1e3, "ms"
    if unit in ("B", "B/s", "FLOP/s"):
        power = min(5, max(0, int(math.log10(abs(value)) // 3))) if value else 0
        value, unit = value / 1000**power, " kMGTP"[power].strip() + unit
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.3g}"
    return f"{number if abs(value) < 1000 else f'{value:,.0f}'} {unit}".strip()
