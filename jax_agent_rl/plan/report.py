"""A plan for people: tables, and what follows from them. And for programs: one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jax_agent_rl.observe.progress import duration
from jax_agent_rl.plan.advice import advice
from jax_agent_rl.plan.compiled import Compiled
from jax_agent_rl.plan.plan import Plan
from jax_agent_rl.plan.roofline import RING, seconds_of

COLUMNS = {
    "program": "what a run compiles, the largest of each kind",
    "chips": "it runs on",
    "memory": "of the fullest of these chips while it runs, with what stays there between programs; ! is too much",
    "own": "of this, what the program adds: batches, gradients, temporaries, code",
    "TFLOP": "of its products, on all chips together",
    "sent": "by each chip to others in one call",
    "least": "time of a call, if nothing is lost; - where it hardly counts",
    "bound": "by products, memory, or links between chips",
    "compiled": "in so many seconds, here",
}

_WRAPPED = ("program", "exchanges in", "kinds")


def show(plan: Plan, console: Console, *, price: float | None = None) -> None:
    """Prints the plan.

    Args:
        price: of a chip for an hour.
    """
    for made in (programs_table(plan), exchanges_table(plan), memory_table(plan)):
        if made.row_count:
            console.print(made, "")
    for name, meaning in COLUMNS.items():
        console.print(f"  [bold]{name}[/bold]: {meaning}", highlight=False, soft_wrap=True)
    console.print()
    for line in (*_verdict(plan), *_speed(plan, price)):
        console.print(line, highlight=False, soft_wrap=True)


def programs_table(plan: Plan) -> Table:
    """A line for each program."""
    made = _table({name: "left" if name in ("program", "bound") else "right" for name in COLUMNS})
    for one, load in zip(plan.compiled, plan.loads, strict=True):
        seconds = seconds_of(one, plan.slice.chip)
        least = (_time(seconds.total), seconds.bound) if one.program.calls else ("-", "")
        own = load.total - sum(size for name, size in load.parts.items() if name in plan.resident_names)
        made.add_row(
            one.program.name,
            str(one.program.mesh.size),
            amount(load.total) + ("" if load.fits else " !"),
            amount(own),
            f"{one.work.flops / 1e12:.3g}",
            amount(sum(exchange.bytes for exchange in one.exchanges)),
            *least,
            f"{one.seconds:.1f}",
        )
    return made


def exchanges_table(plan: Plan) -> Table:
    """What chips send in each program, by axes of the mesh."""
    made = _table({"exchanges in": "left", "over": "left", "sent": "right", "kinds": "left"})
    for one in plan.compiled:
        for axes, size in exchanged(one).items():
            kinds = sorted({e.kind for e in one.exchanges if _axes(e.axes) == axes})
            made.add_row(one.program.name, axes, amount(size), ", ".join(kinds))
    return made


def memory_table(plan: Plan) -> Table:
    """What is on the fullest chip, by kind."""
    fullest = plan.fullest
    made = _table({f"on the fullest chip, in {fullest.program.name}": "left", "memory": "right"})
    for name, size in fullest.parts.items():
        made.add_row(name, amount(size))
    made.add_row("[bold]together[/bold]", f"[bold]{amount(fullest.total)} of {amount(fullest.capacity)}[/bold]")
    return made


def _table(columns: dict[str, Any]) -> Table:
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify, no_wrap=heading not in _WRAPPED)
    return made


def amount(size: float) -> str:
    """Bytes, in the unit people would say."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((p for p in range(len(units) - 1) if size < 1000 * 1024**p), len(units) - 1)
    return f"{size / 1024**power:.3g} {units[power]}"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def exchanged(one: Compiled) -> dict[str, float]:
    """Bytes that each chip sends, by axes."""
    sums: dict[str, float] = {}
    for exchange in one.exchanges:
        sums[_axes(exchange.axes)] = sums.get(_axes(exchange.axes), 0.0) + exchange.bytes
    return sums


def _axes(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "?"


def _verdict(plan: Plan) -> Iterator[str]:
    full = [load for load in plan.loads if not load.fits]
    if not full:
        free = plan.fullest.capacity - plan.fullest.total
        yield f"[green]It fits[/green]: of {amount(plan.fullest.capacity)} a chip at least {amount(free)} are free."
    for load in full:
        over, keys = amount(max(0, load.total - load.capacity)), " or ".join(advice(plan.config, load))
        yield f"[red]{load.program.name} does not fit[/red]: {over} too much on a chip; try {keys}."
    used = set(plan.places.learner.devices.flat).union(*(mesh.devices.flat for mesh in plan.places.engines))
    if unused := plan.slice.chips - len(used):
        yield f"[yellow]{unused} of {plan.slice.chips} chips do nothing[/yellow]: raise learner.mesh, or add --search."


def _speed(plan: Plan, price: float | None) -> Iterator[str]:
    step = plan.step
    for name, tokens, seconds in (("rollout", step.sampled, step.rollout), ("learner", step.trained, step.learner)):
        if seconds:
            yield f"{name}: {tokens:,} tokens in {_time(seconds)}, {tokens / seconds:,.0f} a second"
    if plan.places.engines:
        who, share = step.waits
        yield f"step: {_time(step.seconds)}; who waits: {who}, {share:.0%} of it"
    else:
        yield f"rollout.backend={plan.config.rollout.backend}: how fast its engines are is not planned here"
    if (brought := plan.config.rollout.jetstream.engine) is not None:
        yield f"rollout.jetstream.engine={brought}: planned as if it were the built-in engine"
    if price is not None:
        yield f"cost: {cost(plan, price):.3g} a step, {plan.slice.chips} chips at {price:g} an hour"
    yield (
        f"Assumed: {plan.utilization:.0%} of what chips can do at most (--utilization); products, memory and links at "
        f"the same time, links in {RING} directions of a ring; trajectories of full length, lanes and rows full; tools "
        "that take no time."
    )


def cost(plan: Plan, price: float) -> float:
    """Of a step, if a chip costs ``price`` an hour."""
    return plan.step.seconds / 3600 * price * plan.slice.chips


def as_json(plan: Plan, *, price: float | None = None) -> dict[str, Any]:
    """Everything a plan says; in bytes, seconds and floating point operations."""
    return {
        "topology": plan.slice.name,
        "chips": plan.slice.chips,
        "capacity": plan.slice.chip.hbm_bytes,
        "fits": plan.fits,
        "meshes": {
            "learner": _shape(plan.places.learner),
            "engines": [_shape(mesh) for mesh in plan.places.engines],
        },
        "programs": [
            {
                "name": one.program.name,
                "half": one.program.half,
                "chips": one.program.mesh.size,
                "memory": dict(load.parts),
                "total": load.total,
                "fits": load.fits,
                "problem": one.problem,
                "change": [] if load.fits else advice(plan.config, load),
                "flops": one.work.flops,
                "bytes": one.work.bytes,
                "exchanged": exchanged(one),
                "seconds": vars(seconds_of(one, plan.slice.chip)),
                "compile_seconds": one.seconds,
            }
            for one, load in zip(plan.compiled, plan.loads, strict=True)
        ],
        "step": {**vars(plan.step), "seconds": plan.step.seconds, "waits": plan.step.waits},
        "utilization": plan.utilization,
        "cost": None if price is None else cost(plan, price),
    }


def _shape(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.shape)
