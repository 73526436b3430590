"""The report of a certification: a JSON object, and an HTML page made from it that loads nothing and runs nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jax_agent_rl.deploy.certify.results import CheckOutcome, CheckResult, format_number
from jax_agent_rl.utils.files import write_atomically, writing

VERSION = 1
"""Of the JSON's layout."""
_NOT_WRITTEN = "{file} could not be written ({reason}); choose another folder with --out"
_STYLE = """
html, body { height: auto; } body { display: block; }
main { padding: 16px 20px 40px; max-width: 1150px; }
table { border-collapse: collapse; width: 100%; margin: 8px 0 4px; font-size: 13px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.note { color: var(--soft); }
.card { margin-bottom: 14px; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; } .idle { color: var(--soft); }
h2 .good, h2 .bad, h2 .idle { float: right; font-size: 13px; }
blockquote { margin: 2px 0; padding-left: 10px; border-left: 2px solid var(--rule); color: var(--soft); }
"""
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
        with writing(file, message=_NOT_WRITTEN):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text, message=_NOT_WRITTEN)
    return made


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page of a report."""
    style = (files("jax_agent_rl.observe.report") / "page" / "page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(_title(report))}</title><style>{style}{_STYLE}</style></head><body>",
            *_head(report),
            "<main>",
            *_deviations(report["checks"]),
            *(line for check in report["checks"] for line in _check(check)),
            f"<p class='hint'>{_text(report['command'])}</p></main></body></html>",
        ]
    )


def deviations(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield what deviates, in words, with the claim that it concerns."""
    for check in checks:
        if check["outcome"] == CheckOutcome.FAILED:
            yield f"{check['name']}: {check['reason']}", check["claim"]
        for one in check["measurements"]:
            if one["deviates"]:
                number = format_number(float("nan") if one["value"] is None else one["value"], one["unit"])
                text = f"{check['name']}: {one['name']}: {number} ({_limits(one)})"
                yield f"{text}; {one['detail']}" if one["detail"] else text, one["claim"]


def _text(value: Any) -> str:
    return html.escape(str(value))


def _title(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    return f"{machine['devices']} x {machine['device']} · jax-agent-rl certify"


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    versions = " · ".join(f"{name} {version}" for name, version in machine["versions"].items())
    tiles = {
        "device": f"{machine['devices']} x {machine['device']}",
        "hosts": machine["hosts"],
        "processor": f"{machine['processor']}, {machine['cores']:g} cores",
        "load at the start": f"{machine['load']:g}",
        "memory": format_number(machine["memory_bytes"], "B"),
        "model": machine["model"],
        "took": f"{report['seconds'] / 60:.1f} min",
    }
    style = "good" if report["ok"] else "bad"
    yield "<header id='head'><div class='title'><h1>jax-agent-rl certify</h1>"
    yield f"<span class='{style}'>{_text(report['verdict'])}</span>"
    yield f"<span class='facts'>{_text(report['date'])}</span></div><div class='tiles'>"
    yield from (
        f"<div class='tile'><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in tiles.items()
    )
    software = f"{machine['system']} · Python {machine['python']} · {versions}"
    yield f"</div><p class='hint'>{_text(software)}</p>"
    yield "</header>"


def _deviations(checks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not (found := list(deviations(checks))):
        return
    yield "<section class='card'><h2>Deviations</h2><ul>"
    for text, claim in found:
        yield f"<li><span class='bad'>{_text(text)}</span>{_claim(claim)}</li>"
    yield "</ul></section>"


def _claim(claim: Mapping[str, str]) -> str:
    return f"<blockquote>{_text(claim['page'])}: “{_text(claim['text'])}”</blockquote>"


def _check(check: Mapping[str, Any]) -> Iterator[str]:
    outcome, small = check["outcome"], f"{check['name']}, {check['seconds']:.0f} s"
    yield f"<section class='card'><h2>{_text(check['title'])} <small>{_text(small)}</small>"
    yield f"<span class='{_CLASSES[outcome]}'>{_text(outcome)}</span></h2>"
    limited = [one["claim"] for one in check["measurements"] if "low" in one or "high" in one]
    yield from map(_claim, {claim["text"]: claim for claim in limited}.values())
    yield from (f"<p class='hint'>{_text(line)}</p>" for line in (check["reason"], *_left_out(check)) if line)
    if check["measurements"]:
        yield "<table><tr><th>measured</th><th class='n'>value</th><th class='n'>limits</th><th class='n'>beside</th>"
        yield "<th>detail</th></tr>"
        yield from map(_row, check["measurements"])
        yield "</table>"
    yield "</section>"


def _left_out(check: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"not run: {part}" for part in check["left_out"])


def _row(one: Mapping[str, Any]) -> str:
    limited = "low" in one or "high" in one
    style = "bad" if one["deviates"] else "good" if limited else ""
    value = format_number(float("nan") if one["value"] is None else one["value"], one["unit"])
    beside = "<br>".join(
        f"{_text(name)} {_text(format_number(number, one['unit']))}"
        for name, number in one["beside"].items()
        if number is not None
    )
    cells = (f"<td>{_text(one['name'])}</td>", f"<td class='n {style}'>{_text(value)}</td>")
    cells += (f"<td class='n'>{_text(_limits(one))}</td><td class='n'>{beside}</td>",)
    return f"<tr>{''.join(cells)}<td class='note'>{_text(one['detail'])}</td></tr>"


def _limits(one: Mapping[str, Any]) -> str:
    low, high = (format_number(one[key], one["unit"]) if key in one else "" for key in ("low", "high"))
    if low and high:
        return low if low == high else f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}" if high else ""
