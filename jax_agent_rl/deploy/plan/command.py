"""The ``plan`` command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from jax_agent_rl.deploy.plan.compile_subprocess import PlanResult, Task, plan_in_subprocess
from jax_agent_rl.deploy.plan.topology import GIB
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.progress import print_line


def check_file(file: Path) -> None:
    """Check that an image can be written, before anything is compiled.

    Raises:
        ConfigError: its name ends in no format, or its folder is not there.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if (kind := file.suffix.removeprefix(".").lower()) not in kinds:
        raise ConfigError(f"--plot {file}: no picture is of the kind {kind!r}; end it with .png, .pdf or .svg")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}; make it, or name one that is there")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--plot {file} cannot be written; name a file in a folder of yours")


def draw(made: Mapping[str, Any], file: Path) -> None:
    """Draw a plan; the file's suffix names the format.

    Args:
        made: a plan, see :func:`~jax_agent_rl.deploy.plan.report.as_json`.
        file: as :func:`check_file` lets it pass.

    Raises:
        OSError: it cannot be written.
    """
    memory = {program["name"]: program["memory"] for program in made["programs"]}
    names = list(dict.fromkeys(name for parts in memory.values() for name in parts))
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(memory)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(memory)
    for name in names:
        sizes = [parts.get(name, 0) / GIB for parts in memory.values()]
        axes.barh(list(memory), sizes, left=left, label=name)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    axes.axvline(made["capacity"] / GIB, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest chip")
    axes.set_title(f"{made['topology']}: {'fits' if made['fits'] else 'does not fit'}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")
    figure.savefig(file)


def run_command(task: Task, console: Console, *, budget: int | None, picture: Path | None, as_json: bool) -> PlanResult:
    """Plan a run and print the result.

    Args:
        task: what to plan.
        console: where to print.
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
        planned, searched = plan_in_subprocess(task, _sayer(console)), []
    else:
        planned, searched = _searched(task, budget, console)
    print_plan(planned, searched, console, picture=picture, as_json=as_json)
    return planned


def print_plan(
    planned: PlanResult,
    searched: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print a plan, and draw it at the end.

    Args:
        planned: the plan.
        searched: a line of JSON for each layout that was tried.
        console: where to print.
        picture: image file to draw to, if any.
        as_json: prints one JSON object, as the last line.

    Raises:
        OSError: the picture cannot be written.
    """
    console.file.write(planned.report)  # as wide, and as colourful, as this console
    console.file.flush()
    if picture is not None:
        print_line(console, f"drawing {picture}")
    if as_json:  # the last line
        print(json.dumps({**planned.made, "searched": searched}), flush=True)
    if picture is not None:
        draw(planned.made, picture)


def _sayer(console: Console) -> Callable[[str], None]:
    return lambda text: print_line(console, f"  {text}")


def _searched(task: Task, budget: int, console: Console) -> tuple[PlanResult, list[dict[str, Any]]]:
    """Return the best layout's plan, and a JSON object for each layout tried."""
    from jax_agent_rl.config import build
    from jax_agent_rl.config.loading import read_tree
    from jax_agent_rl.deploy.plan.plan import check
    from jax_agent_rl.deploy.plan.search import TRIES, Candidate, candidates, search, table, verdict
    from jax_agent_rl.deploy.plan.topology import Slice

    def compiled(one: Candidate) -> PlanResult:
        print_line(console, f"layout: {' '.join(one.changes) or 'as it is configured'}")
        return plan_in_subprocess(replace(task, overrides=[*task.overrides, *one.changes]), _sayer(console))

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
