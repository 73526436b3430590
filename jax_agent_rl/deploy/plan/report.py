"""Reports of a plan: tables and conclusions for people, one JSON object for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jax_agent_rl.deploy.plan.advice import Adviser
from jax_agent_rl.deploy.plan.compiled import Compiled
from jax_agent_rl.deploy.plan.inventory import Phase
from jax_agent_rl.deploy.plan.plan import Load, ResourcePlan
from jax_agent_rl.deploy.plan.roofline import RING, moved, seconds_of
from jax_agent_rl.observe.progress import duration

COLUMNS = {
    "program": "what a run compiles, the largest of each kind",
    "chips": "it runs on",
    "memory": "of the fullest of these chips while it runs, with what stays there between programs; ! is too much",
    "TFLOP": "of its products, on all chips together",
    "bytes": "that pass through memory for these products, on all chips together; without products, all it is given",
    "sent": "by each chip to others in one call; - where the compiler refused the program and it is not known",
    "least": "time of a call, if nothing is lost; >= without what is sent; - where it hardly counts or is not known",
    "bound": "by products, memory, or links between chips",
    "compiled": "in so many seconds, here",
}

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PROGRAM = 10  # letters of a column for each program: its name is broken at blanks
_WRAPPED = ("program", "exchanges in", "kinds")


def show(plan: ResourcePlan, console: Console, *, price: float | None = None) -> None:
    """Print the plan.

    Args:
        plan: what to print.
        console: where to print.
        price: of a chip for an hour.
    """
    for made in (programs_table(plan), exchanges_table(plan), *memory_tables(plan, width=console.width)):
        if made.row_count:
            console.print(made, "")
    for name, meaning in COLUMNS.items():
        console.print(f"  [bold]{name}[/bold]: {meaning}", highlight=False, soft_wrap=True)
    console.print()
    for line in (*_verdict(plan), *_speed(plan, price)):
        console.print(line, highlight=False, soft_wrap=True)


def programs_table(plan: ResourcePlan) -> Table:
    """Return a table with a row for each program."""
    made = _table({name: "left" if name in ("program", "bound") else "right" for name in COLUMNS})
    for one, load in zip(plan.compiled, plan.loads, strict=True):
        seconds, known = seconds_of(one, plan.slice.chip), one.exchanges_known
        least = (_time(seconds.total), seconds.bound) if known else (f">={_time(seconds.total)}", "")
        counts = one.program.calls and seconds.total
        made.add_row(
            one.program.name,
            str(one.program.mesh.size),
            amount(load.total) + ("" if load.fits else " !"),
            f"{one.work.flops / 1e12:.3g}",
            amount(moved(one)) if moved(one) else "-",
            amount(sum(exchange.bytes for exchange in one.exchanges)) if known else "-",
            *(least if counts else ("-", "")),
            f"{one.seconds:.1f}",
        )
    return made


def exchanges_table(plan: ResourcePlan) -> Table:
    """Return a table of what chips send in each program, by axes of the mesh."""
    made = _table({"exchanges in": "left", "over": "left", "sent": "right", "kinds": "left"})
    for one in plan.compiled:
        for axes, size in exchanged(one).items():
            kinds = sorted({e.kind for e in one.exchanges if _axes(e.axes) == axes})
            made.add_row(one.program.name, axes, amount(size), ", ".join(kinds))
    return made


def memory_tables(plan: ResourcePlan, *, width: int) -> Iterator[Table]:
    """Yield tables of the memory on each program's fullest chip, by kind, all in one unit.

    Args:
        plan: what to show.
        width: of the screen, in letters: what has no place beside the others goes into a table below.
    """
    power = _power(plan.fullest.total)
    kinds = list(dict.fromkeys(name for load in plan.loads for name in load.parts))
    heading = f"{_UNITS[power]} of a chip's {plan.fullest.capacity / 1024**power:.4g}"
    beside = max(1, (width - max(map(len, (heading, *kinds))) - 1) // _PROGRAM)
    beside = math.ceil(len(plan.loads) / math.ceil(len(plan.loads) / beside))
    for begin in range(0, len(plan.loads), beside):
        loads = plan.loads[begin : begin + beside]
        made = Table(box=None, padding=(0, 1, 0, 0))
        made.add_column(heading, no_wrap=True, vertical="bottom")
        for load in loads:
            made.add_column(load.program.name, justify="right", vertical="bottom", max_width=_PROGRAM - 1)
        for kind in kinds:
            made.add_row(
                kind, *(f"{load.parts[kind] / 1024**power:.2f}" if kind in load.parts else "-" for load in loads)
            )
        made.add_row("[bold]together[/bold]", *(f"[bold]{load.total / 1024**power:.2f}[/bold]" for load in loads))
        yield made


def _table(columns: dict[str, Any]) -> Table:
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify, no_wrap=heading not in _WRAPPED)
    return made


def amount(size: float) -> str:
    """Format bytes in a readable unit."""
    return f"{size / 1024 ** _power(size):.3g} {_UNITS[_power(size)]}"


def _power(size: float) -> int:
    """Return the power of 1024 of that unit."""
    return next((power for power in range(len(_UNITS) - 1) if size < 1000 * 1024**power), len(_UNITS) - 1)


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def exchanged(one: Compiled) -> dict[str, float]:
    """Return the bytes that each chip sends, by axes."""
    sums: dict[str, float] = {}
    for exchange in one.exchanges:
        sums[_axes(exchange.axes)] = sums.get(_axes(exchange.axes), 0.0) + exchange.bytes
    return sums


def _axes(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "?"


def _verdict(plan: ResourcePlan) -> Iterator[str]:
    full = [load for load in plan.loads if not load.fits]
    if not full:
        free = plan.fullest.capacity - plan.fullest.total
        yield f"[green]It fits[/green]: of {amount(plan.fullest.capacity)} a chip at least {amount(free)} are free."
    for keys, those in _by_advice(plan, full).items():
        names, over = ", ".join(load.program.name for load in those), max(load.total - load.capacity for load in those)
        verb, most = ("does not fit", "") if len(those) == 1 else ("do not fit", "up to ")
        yield f"[red]{names} {verb}[/red]: {most}{amount(max(0, over))} too much on a chip; try {' or '.join(keys)}."
    used = set(plan.placement.learner.devices.flat).union(*(mesh.devices.flat for mesh in plan.placement.engines))
    if unused := plan.slice.chips - len(used):
        yield f"[yellow]{unused} of {plan.slice.chips} chips do nothing[/yellow]: raise learner.mesh, or add --search."


def _by_advice(plan: ResourcePlan, full: Sequence[Load]) -> dict[tuple[str, ...], list[Load]]:
    """Group programs that do not fit by what to change."""
    found: dict[tuple[str, ...], list[Load]] = {}
    for load in full:
        found.setdefault(tuple(_adviser(plan).advice(load)), []).append(load)
    return found


def _adviser(plan: ResourcePlan) -> Adviser:
    return Adviser(config=plan.config, model=plan.model, slice=plan.slice, devices=plan.devices)


def _speed(plan: ResourcePlan, price: float | None) -> Iterator[str]:
    step = plan.step
    phases: tuple[tuple[Phase, int, float], ...] = (
        ("rollout", step.sampled, step.rollout),
        ("learner", step.trained, step.learner),
    )
    for name, tokens, seconds in phases:
        if seconds:
            least, most = ("at least ", "at most ") if name in step.bounds else ("", "")
            yield f"{name}: {tokens:,} tokens in {least}{_time(seconds)}, {most}{tokens / seconds:,.0f} a second"
    least = "at least " if step.bounds else ""
    if plan.placement.engines:
        who, share = step.waits
        yield f"step: {least}{_time(step.seconds)}; who waits: {who}, {share:.0%} of it"
    else:
        yield f"rollout.backend={plan.config.rollout.backend}: how fast its engines are is not planned here"
    if (external := plan.config.rollout.jetstream.engine_factory) is not None:
        yield f"rollout.jetstream.engine_factory={external}: planned as if it were the built-in engine"
    if price is not None:
        of = "cost" if plan.placement.engines else "cost of the learner"
        yield f"{of}: {least}{cost(plan, price):.3g} a step, {plan.slice.chips} chips at {price:g} an hour"
    yield (
        f"Assumed: {plan.utilization:.0%} of what chips can do at most (--utilization); products, memory and links at "
        f"the same time, links in {RING} directions of a ring; trajectories of full length, slots and rows full; tools "
        "that take no time."
    )


def cost(plan: ResourcePlan, price: float) -> float:
    """Return the cost of a step at ``price`` a chip-hour; of the learner alone if engines run elsewhere."""
    return plan.step.seconds / 3600 * price * plan.slice.chips


def as_json(plan: ResourcePlan, *, price: float | None = None) -> dict[str, Any]:
    """Return the whole plan, in bytes, seconds and floating point operations."""
    return {
        "topology": plan.slice.name,
        "chips": plan.slice.chips,
        "capacity": plan.slice.chip.hbm_bytes,
        "fits": plan.fits,
        "meshes": {
            "learner": _shape(plan.placement.learner),
            "engines": [_shape(mesh) for mesh in plan.placement.engines],
        },
        "programs": [
            {
                "name": one.program.name,
                "half": one.program.phase,
                "chips": one.program.mesh.size,
                "memory": dict(load.parts),
                "total": load.total,
                "fits": load.fits,
                "problem": one.problem,
                "change": [] if load.fits else _adviser(plan).advice(load),
                "flops": one.work.flops,
                "bytes": moved(one),
                "exchanged": exchanged(one) if one.exchanges_known else None,
                "seconds": vars(seconds_of(one, plan.slice.chip)),
                "compile_seconds": one.seconds,
            }
            for one, load in zip(plan.compiled, plan.loads, strict=True)
        ],
        "step": {**vars(plan.step), "seconds": plan.step.seconds, "waits": plan.step.waits},
        "utilization": plan.utilization,
        "cost": None if price is None else cost(plan, price),
        "cost_of": "step" if plan.placement.engines else "learner",
    }


def _shape(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.shape)
