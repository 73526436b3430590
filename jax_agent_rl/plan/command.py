"""The ``plan`` command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.plan.apart import Planned, Task, plan_apart
from jax_agent_rl.plan.picture import check_file, draw


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a user asks for.

    Attributes:
        recipe: configuration file.
        topology: as ``Slice.parse`` takes it.
        utilization: share of the roofline that programs are supposed to reach.
        budget: search meshes and batches until so many fit; None plans what is configured.
        price: of a chip for an hour, if the cost is asked for.
        picture: file to draw the chips' memory to.
        as_json: ends with one JSON object.
    """

    recipe: Path
    overrides: Sequence[str]
    topology: str
    utilization: float
    budget: int | None
    price: float | None
    picture: Path | None
    as_json: bool


def run_command(order: Order, console: Console) -> Planned:
    """Plans a run and prints what came out.

    Raises:
        ConfigError, ModelError: what a user has to fix.
        CompilerError: the compiler fails on it; of a search, on everything.
        OSError: the picture cannot be written.
    """
    if order.picture is not None:
        check_file(order.picture)
    task = Task(
        recipe=str(order.recipe),
        overrides=order.overrides,
        topology=order.topology,
        utilization=order.utilization,
        price=order.price,
        width=console.width,
        colours=console.is_terminal and not console.no_color,
    )
    if order.budget is None:
        planned, searched = plan_apart(task, _sayer(console)), []
    else:
        planned, searched = _searched(task, order.budget, console)
    tell(planned, searched, order, console)
    return planned


def tell(planned: Planned, searched: Sequence[Mapping[str, Any]], order: Order, console: Console) -> None:
    """Prints a plan, and draws it at the end, when all else is said.

    Args:
        searched: a line of JSON for each layout that was tried.

    Raises:
        OSError: the picture cannot be written.
    """
    console.file.write(planned.report)  # as wide, and as colourful, as this console
    console.file.flush()
    if order.picture is not None:
        console.print(f"drawing {order.picture}", highlight=False)
    if order.as_json:  # the last line
        print(json.dumps({**planned.made, "searched": searched}), flush=True)
    if order.picture is not None:
        draw(planned.made, order.picture)


def _sayer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(f"  {text}", highlight=False)


def _searched(task: Task, budget: int, console: Console) -> tuple[Planned, list[dict[str, Any]]]:
    """The best layout's plan, and a line of JSON for each that was tried."""
    from jax_agent_rl.config import build
    from jax_agent_rl.config_tree import read_tree
    from jax_agent_rl.plan.plan import check
    from jax_agent_rl.plan.search import TRIES, Candidate, candidates, search, table, verdict
    from jax_agent_rl.plan.topology import Slice

    def compiled(one: Candidate) -> Planned:
        console.print(f"layout: {' '.join(one.changes) or 'as it is configured'}", highlight=False, soft_wrap=True)
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
