"""Results for people: a table, then each failure in full."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_agent_rl.testing.conformance.check import CHECKS
from jax_agent_rl.testing.conformance.runner import Report

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """One row per check; failures follow with what was expected, what came, and the likely cause."""
    table = Table(title=f"conformance of {report.backend}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("rule, or why it was skipped")
    for result in report.results:
        note = result.detail if result.outcome == "skipped" else CHECKS[result.check].claim
        style = _STYLES[result.outcome]
        table.add_row(result.check, f"[{style}]{result.outcome}[/]", f"{result.seconds:.1f}", escape(note))
    console.print(table)
    for result in report.results:
        if result.outcome == "failed":
            console.print(f"[bold red]{result.check}[/]: {escape(result.detail)}\n", highlight=False)
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in _STYLES)
    console.print(f"{report.backend}: {counts}", highlight=False)
