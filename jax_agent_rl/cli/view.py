"""``jax-agent-rl view`` and ``report``: the results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jax_agent_rl.cli.options import Panel, command
from jax_agent_rl.observe.selection import Colour, Sort, Split, TrajectoryFilter
from jax_agent_rl.types import FinishReason, StopReason


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        Panel.LOOK,
        "view runs/quickstart --sort worst --limit 3",
        "view runs/quickstart --split heldout --step 8",
        "view runs/quickstart --tool-error any --min-step 10 --text calculator",
        "view runs/tree --tree",
    )(view)
    command(
        app,
        Panel.LOOK,
        "report runs/quickstart",
        "report runs/quickstart --out /tmp/report.html --limit 200",
    )(report)


def view(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[Split | None, typer.Option(help="Only 'train' or 'heldout'.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    min_step: Annotated[int | None, typer.Option(help="First step to show.")] = None,
    max_step: Annotated[int | None, typer.Option(help="Last step to show.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Minimum reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Maximum reward.")] = None,
    tool_error: Annotated[str | None, typer.Option(help="Kind of tool error (timeout, …), 'any' or 'none'.")] = None,
    finish_reason: Annotated[
        FinishReason | None, typer.Option(help="Finish reason of the trajectory (answer, …).")
    ] = None,
    stop_reason: Annotated[
        StopReason | None, typer.Option(help="Stop reason of one of its turns (eos, length, …).")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text in the response or the id, ignoring case.")] = None,
    sort: Annotated[Sort, typer.Option(help="'time', 'best' or 'worst' first.")] = "time",
    limit: Annotated[int, typer.Option(min=1, help="Number of trajectories to show, the last ones.")] = 5,
    whole_prompt: Annotated[bool, typer.Option("--whole-prompt", help="Show prompts in full.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show groups as trees of turns, with rewards.")] = False,
    color: Annotated[Colour, typer.Option(help="Meaning of the colour of sampled tokens.")] = "mask",
) -> None:
    """Show a run's trajectories in the terminal, with sampled and inserted tokens in different styles."""
    from jax_agent_rl.observe.view import view_run

    wanted = TrajectoryFilter(
        split=split,
        step=step,
        min_step=min_step,
        max_step=max_step,
        min_reward=min_reward,
        max_reward=max_reward,
        tool_error=tool_error,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        text=text,
    )
    view_run(run, wanted, sort=sort, limit=limit, whole_prompt=whole_prompt, trees=tree, colour=color)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, also of a run in progress.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default report.html in the run folder.")] = None,
    limit: Annotated[
        int, typer.Option(help="Number of trajectories on the page, fewer if they are long; 0: all.")
    ] = 2000,
) -> None:
    """Write a run as one HTML page: curves, timeline, and every trajectory token by token. It loads nothing."""
    from jax_agent_rl.observe.report.command import write_report

    print(write_report(run, out, limit=limit))
