"""The ``plan`` command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.deploy.plan.compile_subprocess import Planned, Task, plan_apart
from jax_agent_rl.deploy.plan.plot import check_file, draw
from jax_agent_rl.observe.progress import say


def run_command(task: Task, console: Console, *, budget: int | None, picture: Path | None, as_json: bool) -> Planned:
    """Plans a run and prints what came out.

    Args:
        budget: search meshes and batches until so many fit; None plans what is configured.
        picture: file to draw the chips' memory to.
        as_json: ends with one JSON object.

    Raises:
        ConfigError, ModelError: what a user has to fix.
        CompilerError: the compiler fails on it; of a search, on everything.
        OSError: the picture cannot be written.
    """
    if picture is not None:
        check_file(picture)
    if budget is None:
        planned, searched = plan_apart(task, _sayer(console)), []
    else:
        planned, searched = _searched(task, budget, console)
    tell(planned, searched, console, picture=picture, as_json=as_json)
    return planned


def tell(
    planned: Planned,
    searched: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Prints a plan, and draws it at the end, when all else is said.

    Args:
        searched: a line of JSON for each layout that was tried.

    Raises:
        OSError: the picture cannot be written.
    """
    console.file.write(planned.report)  # as wide, and as colourful, as this console
    console.file.flush()
    if picture is not None:
        say(console, f"drawing {picture}")
    if as_json:  # the last line
        print(json.dumps({**planned.made, "searched": searched}), flush=True)
    if picture is not None:
        draw(planned.made, picture)


def _sayer(console: Console) -> Callable[[str], None]:
    return lambda text: say(console, f"  {text}")


def _searched(task: Task, budget: int, console: Console) -> tuple[Planned, list[dict[str, Any]]]:
    """The best layout's plan, and a line of JSON for each that was tried."""
    from jax_agent_rl.config import build
    from jax_agent_rl.config.loading import read_tree
    from jax_agent_rl.deploy.plan.plan import check
    from jax_agent_rl.deploy.plan.search import TRIES, Candidate, candidates, search, table, verdict
    from jax_agent_rl.deploy.plan.topology import Slice

    def compiled(one: Candidate) -> Planned:
        say(console, f"layout: {' '.join(one.changes) or 'as it is configured'}")
        return plan_apart(replace(task, overrides=[*task.overrides, *one.changes]), _sayer(console))

    tree, slice = read_tree(Path(task.recipe)), Slice.parse(task.topology)
    model = check(build(tree, task.overrides))
    found = candidates(lambda more: build(tree, [*task.overrides, *more]), model, slice, slice.devices())
    most = min(TRIES * budget, len(found))
    console.print(
        f"{len(found)} layouts could do; compiling until {min(budget, most)} fit, {most} at most", highlight=False
    )
    tried = search(found, compiled, capacity=slice.chip.hbm_bytes, budget=budget)
    console.print(table(tried), "")
    console.print(verdict(tried), "", highlight=False, soft_wrap=True, sep="\n")
    assert tried[0].plan is not None  # else the search has failed
    return tried[0].plan, [one.as_json() for one in tried]
