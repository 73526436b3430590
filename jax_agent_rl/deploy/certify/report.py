"""What a certification measures, the claims that it is compared with, and the report.

The report is JSON, and an HTML page of it. The page loads nothing and runs nothing.
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
from jax_agent_rl.utils.text import counted

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
        unit: unit of ``value``, of the limits and of ``references``; empty for counts and ratios.
        claim: the sentence that it is compared with.
        low, high: limits, inclusive; None where there is none.
        references: other numbers for the same thing, such as the prediction of ``plan``.
        detail: where the worst value was found, or how it was measured.
    """

    name: str
    value: float
    unit: str
    claim: Claim
    low: float | None = None
    high: float | None = None
    references: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def limited(self) -> bool:
        """Whether there are limits."""
        return self.low is not None or self.high is not None

    @property
    def deviates(self) -> bool:
        """Whether it is outside its limits, or no number."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return not low <= self.value <= high  # which holds for NaN

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that JSON lacks are null."""
        limits = {}
        if self.low is not None:
            limits["low"] = self.low
        if self.high is not None:
            limits["high"] = self.high
        return {
            "name": self.name,
            "value": _finite(self.value),
            "unit": self.unit,
            **limits,
            "beside": {name: _finite(value) for name, value in self.references.items()},
            "detail": self.detail,
            "deviates": self.deviates,
            "claim": vars(self.claim),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
        name: what ``--only`` calls it.
        title: what people call it.
        run: records measurements, or raises.
        claim: a sentence of the documentation; measurements may name others.
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
        clock: seconds of a monotonic clock.
        begin: when the check began, by the clock.
        reason: the error, or why it was not run.
        seconds: how long the check took.
        measurements: its numbers, also if an error followed.
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
        self, name: str, value: float, unit: str = "", *, claim: Claim | None = None, **fields: Any
    ) -> None:
        """Add a :class:`Measurement`, compared with the check's claim if it names none."""
        claim = claim or self.check.claim
        measurement = Measurement(name=name, value=value, unit=unit, claim=claim, **fields)
        self.measurements.append(measurement)

    def leave_out(self, part: str, reason: str) -> None:
        """Record that a part of the check was not run."""
        self.left_out.append(f"{part}: {reason}")

    def has_time(self, part: str) -> bool:
        """Return whether a part may begin; if not, record that it was left out."""
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
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }


def format_number(value: float, unit: str = "") -> str:
    """Format a measured number for people.

    >>> format_number(1.25e10, "B/s"), format_number(0.00042, "s"), format_number(12.5, "tokens/s")
    ('12.5 GB/s', '0.42 ms', '12.5 tokens/s')
    """
    if not math.isfinite(value):
        return f"{value} {unit}".strip()

    if unit == "s" and abs(value) < 1:
        value *= 1e3
        unit = "ms"
    if unit in ("B", "B/s", "FLOP/s") and value:
        power = int(math.log10(abs(value)) // 3)
        power = min(5, max(0, power))
        value /= 1000**power
        unit = " kMGTP"[power].strip() + unit

    is_whole = value == int(value) and abs(value) < 1e9
    if is_whole or abs(value) >= 1000:
        number = f"{value:,.0f}"
    else:
        number = f"{value:.3g}"
    return f"{number} {unit}".strip()


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
        results: results of the checks so far.
        unfinished: names of the checks that are still to end.
        machine: see ``Machine.describe``.
        command: the command line.
        date: when the certification began, ISO 8601.
        seconds: how long it took.
    """
    checks = [result.to_json() for result in results]
    deviating = len(list(deviations(checks)))
    verdict = counted(deviating, "deviation") if deviating else "as claimed"
    if unfinished:
        verdict += f", ended before {', '.join(unfinished)}"
    return {
        "certify": VERSION,
        "date": date,
        "command": command,
        "seconds": round(seconds, 1),
        "ok": not deviating and not unfinished,
        "verdict": verdict,
        "machine": dict(machine),
        "checks": checks,
    }


def write(report: Mapping[str, Any], folder: Path, *, name: str = "certify") -> tuple[Path, Path]:
    """Write the report as JSON and HTML; return the files.

    Raises:
        StorageError: they cannot be written.
    """
    json_file = folder / f"{name}.json"
    html_file = folder / f"{name}.html"
    json_text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    html_text = page(report)

    make_folder(folder, message=_NOT_WRITTEN)
    write_atomically(json_file, json_text, message=_NOT_WRITTEN)
    write_atomically(html_file, html_text, message=_NOT_WRITTEN)
    return json_file, html_file


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page of a report."""
    with_limits = {**report, "checks": [_with_limits(check) for check in report["checks"]]}
    template = files("jax_agent_rl.deploy.certify") / "page.html"
    style = files("jax_agent_rl.observe.report") / "page" / "page.css"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _format_or_nan
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=with_limits,
        deviations=list(deviations(report["checks"])),
        style=style.read_text(encoding="utf-8"),
        styles=_CLASSES,
    )


def deviations(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield what deviates, in words, with the claim that it concerns."""
    for check in checks:
        if check["outcome"] == CheckOutcome.FAILED:
            yield f"{check['name']}: {check['reason']}", check["claim"]
        for measurement in check["measurements"]:
            if not measurement["deviates"]:
                continue
            value = _format_or_nan(measurement["value"], measurement["unit"])
            text = f"{check['name']}: {measurement['name']}: {value} ({_limits(measurement)})"
            if measurement["detail"]:
                text += f"; {measurement['detail']}"
            yield text, measurement["claim"]


def _format_or_nan(value: float | None, unit: str) -> str:
    """Format a number of the report, in which JSON's null stands for NaN and infinities."""
    return format_number(math.nan if value is None else value, unit)


def _with_limits(check: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check whose measurements have ``limits`` in words, empty without any."""
    measurements = []
    for measurement in check["measurements"]:
        measurements.append({**measurement, "limits": _limits(measurement)})
    return {**check, "measurements": measurements}


def _limits(measurement: Mapping[str, Any]) -> str:
    """Return a measurement's limits in words, empty without any."""
    unit = measurement["unit"]
    low = ""
    high = ""
    if "low" in measurement:
        low = format_number(measurement["low"], unit)
    if "high" in measurement:
        high = format_number(measurement["high"], unit)

    if low and low == high:
        return low
    if low and high:
        return f"{low} to {high}"
    if low:
        return f"at least {low}"
    if high:
        return f"at most {high}"
    return ""
