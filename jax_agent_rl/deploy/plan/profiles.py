"""Profiles of compiled programs: where the predicted time of each goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_agent_rl.deploy.plan.compiled import Compiled, format_seconds, ideal_seconds
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.utils.text import counted

ROWS = 25
"""Places that are shown; the others count together."""


def show_profiles(compiled: Sequence[Compiled], chip: Chip, console: Console) -> None:
    """Print the profile of each program."""
    for result in compiled:
        name = result.program.name
        if result.prediction is None:
            console.print(
                f"{name} does not fit: {result.problem}",
                "",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
            continue

        steps = result.program.loops
        unit = "step" if steps > 1 else "call"
        predicted = result.prediction.seconds
        ideal = ideal_seconds(result, chip)
        console.print(
            f"[bold]{name}[/bold]: {format_seconds(predicted / steps)} a {unit},"
            f" {ideal.total / predicted:.0%} of the ideal"
            f" ({format_seconds(ideal.total / steps)}, bound by {ideal.bound})",
            highlight=False,
            soft_wrap=True,
        )
        console.print(profile_table(result), "")


def profile_table(compiled: Compiled) -> Table:
    """Return a table of the parts of a program that the compiler took, longest first."""
    assert compiled.prediction is not None
    total = compiled.prediction.seconds
    steps = compiled.program.loops

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("time", "share", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("what", "operation"):
        table.add_column(heading, overflow="fold")
    # Wide enough for a path and its line to stay on one line.
    table.add_column("where, and from where", overflow="fold", min_width=30)

    for part in compiled.prediction.parts[:ROWS]:
        table.add_row(
            format_seconds(part.seconds / steps),
            f"{part.seconds / total:.1%}",
            f"{part.runs / steps:.4g}",
            part.what,
            part.operation,
            "\n".join(part.source[:2]) or "(the compiler)",
        )
    shorter = compiled.prediction.parts[ROWS:]
    seconds = sum(part.seconds for part in shorter)
    if seconds:
        table.add_row(
            format_seconds(seconds / steps),
            f"{seconds / total:.1%}",
            "",
            counted(len(shorter), "other"),
        )
    return table


def profiles_as_json(compiled: Sequence[Compiled], chip: Chip) -> dict[str, Any]:
    """Return the profiles by program, in seconds of a call, and whether all programs fit."""
    profiles = {}
    for result in compiled:
        if result.prediction is None:
            continue
        profiles[result.program.name] = {
            "ideal": ideal_seconds(result, chip).total,
            "predicted": result.prediction.seconds,
            "steps": result.program.loops,
            "parts": [part._asdict() for part in result.prediction.parts],
        }
    return {
        "fits": all(result.memory is not None for result in compiled),
        "profiles": profiles,
    }
