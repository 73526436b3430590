"""The ``plan`` command."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.config import build, load
from jax_agent_rl.config_tree import read_tree
from jax_agent_rl.plan.picture import check_file, draw
from jax_agent_rl.plan.plan import Plan, check, make_plan
from jax_agent_rl.plan.report import as_json as plan_as_json
from jax_agent_rl.plan.report import show
from jax_agent_rl.plan.search import TRIES, Candidate, candidates, search, table, verdict
from jax_agent_rl.plan.topology import Slice


def run_command(
    recipe: Path,
    overrides: Sequence[str],
    topology: str,
    *,
    utilization: float,
    budget: int | None,
    price: float | None,
    picture: Path | None,
    as_json: bool,
    console: Console,
) -> Plan:
    """Plans a run and prints what came out.

    Args:
        recipe: configuration file.
        topology: as :meth:`Slice.parse` takes it.
        utilization: share of the roofline that programs are supposed to reach.
        budget: search meshes and batches until so many fit; None plans what is configured.
        price: of a chip for an hour, if the cost is asked for.
        picture: file to draw the chips' memory to.
        as_json: ends with one JSON object.

    Raises:
        ConfigError, ModelError: what a user has to fix.
    """
    if picture is not None:
        check_file(picture)
    slice = Slice.parse(topology)
    config = load(recipe, overrides)
    model, devices = check(config), slice.devices()
    say = lambda text: console.print(f"  {text}", highlight=False)  # noqa: E731
    compiled = functools.partial(make_plan, model=model, slice=slice, devices=devices, utilization=utilization, say=say)
    searched: list[Candidate] = []
    if budget is None:
        plan = compiled(config)
    else:
        tree = read_tree(recipe)
        found = candidates(lambda more: build(tree, [*overrides, *more]), model, slice, devices)
        most = min(TRIES * budget, len(found))
        console.print(
            f"{len(found)} layouts could do; compiling until {min(budget, most)} fit, {most} at most", highlight=False
        )
        searched = search(found, compiled, capacity=slice.chip.hbm_bytes, budget=budget)
        assert searched[0].plan is not None  # all of them were compiled
        plan = searched[0].plan
        console.print(table(searched), "")
        console.print(verdict(searched), "", highlight=False, soft_wrap=True, sep="\n")
    tell(plan, searched, price=price, picture=picture, as_json=as_json, console=console)
    return plan


def tell(
    plan: Plan,
    searched: Sequence[Candidate],
    *,
    price: float | None,
    picture: Path | None,
    as_json: bool,
    console: Console,
) -> None:
    """Prints a plan, and draws it at the end, when all else is said.

    Raises:
        OSError: the picture cannot be written.
    """
    show(plan, console, price=price)
    if picture is not None:
        console.print(f"drawing {picture}", highlight=False)
    if as_json:  # the last line
        made = {**plan_as_json(plan, price=price), "searched": [_line(one) for one in searched]}
        print(json.dumps(made), flush=True)
    if picture is not None:
        draw(plan, picture)


def _line(one: Candidate) -> dict[str, Any]:
    assert one.plan is not None
    return {
        "overrides": one.changes,
        "fits": one.plan.fits,
        "memory": one.plan.fullest.total,
        "seconds": one.plan.step.seconds,
    }
