"""What a certification measures, the claims that it compares it with, and the report: JSON, and an HTML page of it.

The page loads nothing and runs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from jax_agent_rl.utils.files import make_folder, write_atomically

if TYPE_CHECKING:
    from jax_agent_rl.deploy.certify.machine import Machine

VERSION = 1
"""Version of the JSON's layout."""
_NOT_WRITTEN = "{file} could not be written ({reason}); choose another folder with --out"


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
        low, high = (
            (-math.inf if self.low is None else self.low),
            (math.inf if self.high is None else self.high),
        )
        return not low <= self.value <= high

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that JSON lacks are null."""
        limits = {
            name: value
            for name, value in (("low", self.low), ("high", self.high))
            if value is not None
        }
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


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name, title: for ``--only``, and for people.
        run: records measurements, or raises.
        claim: of the documentation; measurements may name others.
        seconds: budget; parts that have not begun by then are left out.
    """

    name: str
    title: str
    run: Callable[[Machine, CheckResult], None]
    claim: Claim
    seconds: float


@dataclass(kw_only=True)
class CheckResult:
    """The result of a check, which records its measurements here.

    Attributes:
        check: the check.
        clock: seconds of a monotonic clock.
        begin: when the check began, by the clock.
        outcome: how it ended.
        reason: the error, or why it was not run.
        seconds: its duration.
        measurements: its numbers, also those before an error.
        left_out: parts that were not run, and why.
    """

    check: Check
    clock: Callable[[], float]
    begin: float = field(init=False)
    outcome: CheckOutcome = CheckOutcome.NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = self.clock()

    def __call__(
        self, name: str, value: float, unit: str = "", *, claim: Claim | None = None, **more: Any
    ) -> None:
        """Add a :class:`Measurement`, compared with the check's claim if it names none."""
        claim = claim or self.check.claim
        self.measurements.append(
            Measurement(name=name, value=value, unit=unit, claim=claim, **more)
        )

    def leave_out(self, part: str, why: str) -> None:
        """Record that a part of the check was not run."""
        self.left_out.append(f"{part}: {why}")

    def has_time(self, part: str) -> bool:
        """Whether a part may begin; if not, record that it was left out."""
        if self.clock() - self.begin < self.check.seconds:
            return True
        self.leave_out(part, f"the {self.check.seconds:g} s of this check were used up")
        return False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "name": self.check.name,
            "title": self.check.title,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "claim": vars(self.check.claim),
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


# --- the report -----------------------------------------------------------------------------------

_CLASSES = {
    CheckOutcome.AS_CLAIMED: "good",
    CheckOutcome.MEASURED: "idle",
    CheckOutcome.DEVIATES: "bad",
    CheckOutcome.FAILED: "bad",
    CheckOutcome.NOT_RUN: "idle",
}


def as_json(
    results: Sequence[CheckResult],
    *,
    unfinished: Sequence[str] = (),
    machine: Mapping[str, Any],
    command: str,
    date: str,
    seconds: float,
) -> dict[str, Any]:
    """Return the report.

    Args:
        results: of the checks so far.
        unfinished: names of those that are still to end.
        machine: what describes it.
        command: the command line.
        date: when it began, ISO 8601.
        seconds: how long it took.
    """
    checks = [result.to_json() for result in results]
    found = len(list(deviations(checks)))
    verdict = f"{found} deviation{'s' * (found != 1)}" if found else "as claimed"
    return {
        "certify": VERSION,
        "date": date,
        "command": command,
        "seconds": round(seconds, 1),
        "ok": not found and not unfinished,
        "verdict": f"{verdict}, ended before {', '.join(unfinished)}" if unfinished else verdict,
        "machine": dict(machine),
        "checks": checks,
    }


def write(report: Mapping[str, Any], folder: Path, *, name: str = "certify") -> tuple[Path, Path]:
    """Write the report as JSON and HTML; return the files.

    Raises:
        StorageError: they cannot be written.
    """
    made = (folder / f"{name}.json", folder / f"{name}.html")
    texts = (json.dumps(report, indent=1, allow_nan=False) + "\n", page(report))
    for file, text in zip(made, texts, strict=True):
        make_folder(file.parent, message=_NOT_WRITTEN)
        write_atomically(file, text, message=_NOT_WRITTEN)
    return made


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page of a report."""
    shown = {**report, "checks": [_with_limits(check) for check in report["checks"]]}
    template = files("jax_agent_rl.deploy.certify") / "page.html"
    style = files("jax_agent_rl.observe.report") / "page" / "page.css"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _format_or_nan
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=shown,
        deviations=list(deviations(report["checks"])),
        style=style.read_text(encoding="utf-8"),
        styles=_CLASSES,
    )


def deviations(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield what deviates, in words, with the claim that it concerns."""
    for check in checks:
        if check["outcome"] == CheckOutcome.FAILED:
            yield f"{check['name']}: {check['reason']}", check["claim"]
        for one in check["measurements"]:
            if one["deviates"]:
                text = (
                    f"{check['name']}: {one['name']}: {_format_or_nan(one['value'], one['unit'])}"
                    f" ({_limits(one)})"
                )
                yield f"{text}; {one['detail']}" if one["detail"] else text, one["claim"]


def _format_or_nan(value: float | None, unit: str) -> str:
    """Format a number of the report, in which JSON's null stands for NaN and infinities."""
    return format_number(math.nan if value is None else value, unit)


def _with_limits(check: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check whose measurements have ``limits`` in words, empty without any."""
    return {
        **check,
        "measurements": [{**one, "limits": _limits(one)} for one in check["measurements"]],
    }


def _limits(one: Mapping[str, Any]) -> str:
    low, high = (
        format_number(one[key], one["unit"]) if key in one else "" for key in ("low", "high")
    )
    if low and high:
        return low if low == high else f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}" if high else ""
