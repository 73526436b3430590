"""``jax-agent-rl diagnose``: why engine and learner of a run disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jax_agent_rl.commandline import Panel, command


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, Panel.CHECK, "diagnose runs/quickstart", "diagnose runs/quickstart --version 8 --json")(diagnose)


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    version: Annotated[
        int | None,
        typer.Option(help="Compare trajectories of this version of the weights; default the one that was diagnosed."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Compare engine and learner of a run again, from its folder, and say why they disagree if they do.

    It needs the checkpoint of that version and no engine. Exits with 1 if they disagree.
    """
    import json as encoder
    from dataclasses import asdict

    from rich.console import Console

    from jax_agent_rl.agreement.report import as_json, breach_line, table
    from jax_agent_rl.observe.lines import say
    from jax_agent_rl.runtime.diagnosis import diagnose_run

    console = Console()
    found = diagnose_run(run, version=version)
    say(console, f"comparing {found.contexts} contexts of {found.source}")
    if found.diagnosis is None:
        comparison, allowed = found.comparison, found.allowed
        say(
            console,
            f"engine and learner agree about the weights of version {found.version}: over {comparison.tokens} tokens "
            f"{comparison.mean:.1e} nats on average (allowed {allowed.mean:.1e}), {comparison.largest:.1e} at most "
            f"(allowed {allowed.token:.1e})",
        )
    else:
        say(console, breach_line(found.comparison, found.allowed, found.version))
        for line in table(found.diagnosis):
            say(console, line)
        if found.then is not None and found.then["cause"] != str(found.diagnosis.cause):
            say(console, f"while it ran, with the engine to look into: {found.then['line']}")
    if json:
        diagnosis = None if found.diagnosis is None else as_json(found.diagnosis)
        print(encoder.dumps({"version": found.version, "comparison": asdict(found.comparison), "diagnosis": diagnosis}))
    if found.diagnosis is not None:
        raise typer.Exit(1)
