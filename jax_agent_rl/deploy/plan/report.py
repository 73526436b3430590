"""Reports of a plan: tables and conclusions, what to change if it does not fit, and one JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_agent_rl.config import Config, build
from jax_agent_rl.deploy.plan.compiled import (
    UNITS,
    Compiled,
    format_bytes,
    format_seconds,
    ideal_seconds,
    unit_power,
)
from jax_agent_rl.deploy.plan.engine_programs import CACHE, WEIGHTS
from jax_agent_rl.deploy.plan.hlo import Collective
from jax_agent_rl.deploy.plan.plan import BATCH, TEMPORARIES, Load, ResourcePlan
from jax_agent_rl.deploy.plan.search import estimate
from jax_agent_rl.deploy.plan.topology import (
    Slice,
    as_overrides,
    check_layout,
    learner_meshes,
    list_idle,
)
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import engine_shapes

COLUMNS = {
    "program": "what a run compiles, the largest of each kind",
    "chips": "chips that it runs on",
    "memory": (
        "used on the fullest chip while it runs, with what stays there between programs; ! is too"
        " much"
    ),
    "TFLOP": (
        "operations that the model needs in a call (in decoding: in all its steps), on all chips"
        " together"
    ),
    "bytes": (
        "of such a call: weights, visible keys and values, or operands of products; without any,"
        " all arrays"
    ),
    "sent": (
        "bytes that each chip sends in one call; - if the compiler refused the program and they are"
        " not known"
    ),
    "ideal": (
        "least time of a call, or of a step of decoding; >= without what is sent; - where it hardly"
        " counts"
    ),
    "bound": "what limits that: products, memory, or links between chips",
    "predicted": (
        "time by the compiler's estimates of its instructions, as they are scheduled; - if it"
        " refused"
    ),
    "share": "of the ideal in that",
    "compiled": "seconds that compiling took here",
}

_SIZES = 6  # columns of the first table, the programs' names included
_PROGRAM = 10  # characters of a program's column: its name is broken at blanks
_WRAPPED = ("program", "exchanges in", "kinds")
_MAX_HINTS = 3


def show(plan: ResourcePlan, console: Console, *, price: float | None = None) -> None:
    """Print the plan.

    Args:
        plan: the plan.
        console: where to print.
        price: price of a chip-hour.
    """
    for made in (
        *programs_tables(plan),
        exchanges_table(plan),
        *memory_tables(plan, width=console.width),
    ):
        if made.row_count:
            console.print(made, "")
    for name, meaning in COLUMNS.items():
        console.print(f"  [bold]{name}[/bold]: {meaning}", highlight=False, soft_wrap=True)
    console.print()
    for line in (*_describe_fit(plan), *_describe_speed(plan, price)):
        console.print(line, highlight=False, soft_wrap=True)


def programs_tables(plan: ResourcePlan) -> tuple[Table, Table]:
    """Return tables of the programs' sizes and times, each narrow enough for 80 characters."""
    justify = {name: "left" if name in ("program", "bound") else "right" for name in COLUMNS}
    columns = list(justify.items())
    sizes, times = (
        _table(dict(chosen)) for chosen in (columns[:_SIZES], [columns[0], *columns[_SIZES:]])
    )
    for one, load in zip(plan.compiled, plan.loads, strict=True):
        seconds, known, steps = (
            ideal_seconds(one, plan.slice.chip),
            one.exchanges_known,
            one.program.loops,
        )
        ideal = format_seconds(seconds.total / steps)
        row = [ideal, seconds.bound] if known else [f">={ideal}", ""]
        if one.prediction is None:
            row += ["-", "-"]
        else:
            row += [
                format_seconds(one.prediction.seconds / steps),
                f"{seconds.total / one.prediction.seconds:.0%}",
            ]
        counts = one.program.calls and seconds.total
        sizes.add_row(
            one.program.name,
            str(one.program.mesh.size),
            format_bytes(load.total) + ("" if load.fits else " !"),
            f"{one.flops / 1e12:.3g}",
            format_bytes(one.moved) if one.moved else "-",
            format_bytes(sum(exchange.bytes for exchange in one.exchanges)) if known else "-",
        )
        times.add_row(
            one.program.name, *(row if counts else ("-", "", "-", "-")), f"{one.seconds:.1f}"
        )
    return sizes, times


def exchanges_table(plan: ResourcePlan) -> Table:
    """Return a table of what chips send in each program, by axes of the mesh."""
    made = _table({"exchanges in": "left", "over": "left", "sent": "right", "kinds": "left"})
    for one in plan.compiled:
        for axes, (size, kinds) in _sum_exchanges(one).items():
            made.add_row(one.program.name, axes, format_bytes(size), ", ".join(kinds))
    return made


def memory_tables(plan: ResourcePlan, *, width: int) -> Iterator[Table]:
    """Yield tables of the memory on each program's fullest chip, by kind, all in one unit.

    Programs that do not fit beside the others into ``width`` characters go into a table below.
    """
    power = unit_power(plan.fullest.total)
    kinds = list(dict.fromkeys(name for load in plan.loads for name in load.parts))
    heading = f"{UNITS[power]} of a chip's {plan.fullest.capacity / 1024**power:.4g}"
    beside = max(1, (width - max(map(len, (heading, *kinds))) - 1) // _PROGRAM)
    beside = math.ceil(len(plan.loads) / math.ceil(len(plan.loads) / beside))
    for begin in range(0, len(plan.loads), beside):
        loads = plan.loads[begin : begin + beside]
        made = Table(box=None, padding=(0, 1, 0, 0))
        made.add_column(heading, no_wrap=True, vertical="bottom")
        for load in loads:
            made.add_column(
                load.program.name, justify="right", vertical="bottom", max_width=_PROGRAM - 1
            )
        for kind in kinds:
            made.add_row(
                kind,
                *(
                    f"{load.parts[kind] / 1024**power:.2f}" if kind in load.parts else "-"
                    for load in loads
                ),
            )
        made.add_row(
            "[bold]together[/bold]",
            *(f"[bold]{load.total / 1024**power:.2f}[/bold]" for load in loads),
        )
        yield made


def _table(columns: dict[str, Any]) -> Table:
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify, no_wrap=heading not in _WRAPPED)
    return made


def _sum_exchanges(one: Compiled) -> dict[str, tuple[float, list[str]]]:
    """Return the bytes that each chip sends, and the kinds of exchanges, by axes."""
    found: dict[str, list[Collective]] = {}
    for exchange in one.exchanges:
        found.setdefault("+".join(exchange.axes) or "?", []).append(exchange)
    return {
        axes: (sum(e.bytes for e in those), sorted({e.kind for e in those}))
        for axes, those in found.items()
    }


def _describe_fit(plan: ResourcePlan) -> Iterator[str]:
    capacity = plan.fullest.capacity
    if all(load.fits for load in plan.loads):
        free = format_bytes(capacity - plan.fullest.total)
        yield (
            f"[green]It fits[/green]: of {format_bytes(capacity)} a chip at least {free} are free."
        )
    by_advice: dict[tuple[str, ...], list[Load]] = {}
    for load in plan.loads:
        if not load.fits:
            by_advice.setdefault(tuple(_adviser(plan).advice(load)), []).append(load)
    for keys, those in by_advice.items():
        names = ", ".join(load.program.name for load in those)
        over = format_bytes(max(0, *(load.total - capacity for load in those)))
        verb, most = ("does not fit", "") if len(those) == 1 else ("do not fit", "up to ")
        yield (
            f"[red]{names} {verb}[/red]: {most}{over} too much on a chip; try {' or '.join(keys)}."
        )
    if pages := plan.host_pages:
        used = f"{format_bytes(pages)} of KV in a host's {format_bytes(plan.host_memory)} of memory"
        if pages > plan.host_memory:
            yield f"[red]{used} do not fit[/red]: lower rollout.jetstream.kv_offloading_size."
        else:
            yield f"The engines keep up to {used} (rollout.jetstream.kv_offloading_size)."
    yield from (
        f"[yellow]{line}[/yellow]." for line in list_idle(plan.config, plan.slice, plan.placement)
    )


def _describe_speed(plan: ResourcePlan, price: float | None) -> Iterator[str]:
    step, rollout = plan.step, plan.config.rollout
    phases = (("rollout", step.sampled, step.rollout), ("learner", step.trained, step.learner))
    for name, tokens, seconds in phases:
        if seconds:
            least, most = ("at least ", "at most ") if name in step.bounds else ("", "")
            time, speed = format_seconds(seconds), f"{tokens / seconds:,.0f}"
            yield f"{name}: {tokens:,} tokens in {least}{time}, {most}{speed} a second"
    least = "at least " if step.bounds else ""
    if plan.placement.engines:
        who, share = step.waits
        yield f"step: {least}{format_seconds(step.seconds)}; who waits: {who}, {share:.0%} of it"
    else:
        yield f"rollout.backend={rollout.backend}: the speed of its engines is not planned here"
    replay = plan.replay
    if replay.masks:
        yield (
            f"sampling replay: {format_bytes(replay.masks)} of masks a step between hosts and"
            f" chips, on each side; up to {format_bytes(replay.supports)} between processes"
        )
    if replay.experts:
        yield (
            f"router replay: {format_bytes(replay.experts)} of chosen experts a step, from engines"
            " to the learner"
        )
    if (factory := rollout.jetstream.engine_factory) is not None:
        yield (
            f"rollout.jetstream.engine_factory={factory}: planned as if it were the built-in engine"
        )
    if price is not None:
        what = "cost" if plan.placement.engines else "cost of the learner"
        yield (
            f"{what}: {least}{_cost(plan, price):.3g} a step, {_cost_of_million(plan, price):.3g} a"
            f" million trained tokens; {plan.slice.chips} chips at {price:g} an hour"
        )
    yield (
        "Assumed: trajectories of full length, rows full, slots as far as trajectories and KV"
        f" cache go; tools and hosts that take no time; {plan.utilization:.0%} of the ideal where"
        " the compiler refuses a program (--utilization)."
    )


def _cost(plan: ResourcePlan, price: float) -> float:
    """Return the cost of a step at ``price`` a chip-hour; of the learner alone if engines run elsewhere."""
    return plan.step.seconds / 3600 * price * plan.slice.chips


def _cost_of_million(plan: ResourcePlan, price: float) -> float:
    """Return the cost of sampling and training on a million tokens; see :func:`_cost`."""
    return _cost(plan, price) * 1e6 / plan.step.sampled


def as_json(plan: ResourcePlan, *, price: float | None = None) -> dict[str, Any]:
    """Return the whole plan, in bytes, seconds and floating point operations."""

    def exchanged(one: Compiled) -> dict[str, float] | None:
        return (
            {axes: sent for axes, (sent, _) in _sum_exchanges(one).items()}
            if one.exchanges_known
            else None
        )

    return {
        "topology": plan.slice.name,
        "chips": plan.slice.chips,
        "capacity": plan.slice.chip.hbm_bytes,
        "fits": plan.fits,
        "meshes": {
            "learner": dict(plan.placement.learner.shape),
            "engines": [dict(mesh.shape) for mesh in plan.placement.engines],
        },
        "programs": [
            {
                "name": one.program.name,
                "phase": one.program.phase,
                "chips": one.program.mesh.size,
                "memory": dict(load.parts),
                "total": load.total,
                "fits": load.fits,
                "problem": one.problem,
                "change": [] if load.fits else _adviser(plan).advice(load),
                "flops": one.flops,
                "bytes": one.moved,
                "exchanged": exchanged(one),
                "seconds": vars(ideal_seconds(one, plan.slice.chip)),
                "predicted": None if one.prediction is None else one.prediction.seconds,
                "steps": one.program.loops,
                "compile_seconds": one.seconds,
            }
            for one, load in zip(plan.compiled, plan.loads, strict=True)
        ],
        "host": {"pages": plan.host_pages, "memory": plan.host_memory},
        "replay": vars(plan.replay),
        "step": {**vars(plan.step), "seconds": plan.step.seconds, "waits": plan.step.waits},
        "utilization": plan.utilization,
        "cost": None if price is None else _cost(plan, price),
        "cost_of_million_trained_tokens": None if price is None else _cost_of_million(plan, price),
        "cost_of": "step" if plan.placement.engines else "learner",
    }


# --- what to change -------------------------------------------------------------------------------


def _adviser(plan: ResourcePlan) -> Adviser:
    return Adviser(config=plan.config, model=plan.model, slice=plan.slice)


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Proposes changes of a configuration, none of which the planner would refuse on the slice's devices."""

    config: Config
    model: DecoderConfig
    slice: Slice

    def advice(self, load: Load) -> list[str]:
        """Return overrides to try on a program that does not fit, largest parts of the chip's memory first."""
        parts = sorted(load.parts, key=lambda name: load.parts[name], reverse=True)
        hints = [hint for part in parts for hint in self._hints(load, part)]
        hints += [*self._adapters(), self._larger_slice()]
        return list(dict.fromkeys(hints))[:_MAX_HINTS]

    def _hints(self, load: Load, part: str) -> Iterator[str]:
        config, phase = self.config, load.program.phase
        if (
            part in (WEIGHTS, CACHE)
            and phase == "learner"
            and config.rollout.placement == "colocated"
        ):
            if config.trainer.mode == "sync" and not config.rollout.sleep_during_update:
                yield "rollout.sleep_during_update=true"
        if part == CACHE or (part in (BATCH, TEMPORARIES) and phase == "rollout"):
            yield from self._contexts()
            yield from self._engine()
            yield f"rollout.max_model_len below {config.rollout.max_model_len}"
        elif part == WEIGHTS:
            yield from self._engine()
        elif part == TEMPORARIES:
            yield from self._activations()
            yield from self._mesh()
        else:
            yield from (*self._mesh(), *self._adapters(), self._larger_slice())

    def _contexts(self) -> Iterator[str]:
        """Yield overrides of the contexts that an engine keeps."""
        shapes = engine_shapes(self.config)
        if shapes.kv_cache_tokens > shapes.max_model_len:
            half = max(shapes.max_model_len, shapes.kv_cache_tokens // 2)
            yield from self._accepted(f"rollout.jetstream.kv_cache_tokens={half}")
        if (slots := shapes.max_concurrent_decodes) > 1:
            yield from self._accepted(f"rollout.jetstream.max_concurrent_decodes={slots // 2}")

    def _engine(self) -> Iterator[str]:
        engine = self.config.rollout.jetstream
        if engine.dtype == "float32":
            yield from self._accepted("rollout.jetstream.dtype=bfloat16")
        data, axis = engine.mesh.data or 1, "expert" if (engine.mesh.expert or 1) > 1 else "tensor"
        fewer = [f"rollout.jetstream.mesh.data={data // 2}"] if data > 1 else []
        more = 2 * (getattr(engine.mesh, axis) or 1)
        yield from self._accepted(f"rollout.jetstream.mesh.{axis}={more}", *fewer)

    def _activations(self) -> Iterator[str]:
        learner = self.config.learner
        if learner.remat != "full":
            yield from self._accepted("learner.remat=full")
        if learner.compute_dtype == "float32":
            yield from self._accepted("learner.compute_dtype=bfloat16")
        if learner.micro_batch_size > 1:
            yield from self._accepted(f"learner.micro_batch_size={learner.micro_batch_size // 2}")
        need = self.config.agent.max_prompt_length + self.config.agent.max_response_length
        if learner.pack_length > need:
            yield from self._accepted(f"learner.pack_length={max(need, learner.pack_length // 2)}")

    def _mesh(self) -> Iterator[str]:
        """Yield the slice's learner mesh that takes least memory, if it takes less than the configured one."""
        least, best = self._estimate(self.config), None
        for choice in learner_meshes(self.config, self.model, self.slice):
            change = as_overrides(choice, changing=self.config)
            if (made := self._change(change)) is not None and (
                total := self._estimate(made)
            ) < least:
                least, best = total, " ".join(change)
        if best is not None:
            yield best

    def _adapters(self) -> Iterator[str]:
        if self.config.learner.lora is None:
            yield from self._accepted("learner.lora.rank=16")

    def _larger_slice(self) -> str:
        return (
            f"a larger --topology, as {self.slice.larger.name}"
            if self.slice.larger
            else "a larger --topology"
        )

    def _accepted(self, *overrides: str) -> Iterator[str]:
        if self._change(overrides) is not None:
            yield " ".join(overrides)

    def _change(self, overrides: Sequence[str]) -> Config | None:
        """Return the configuration with these overrides; None if it would be refused."""
        try:
            made = build(self.config.model_dump(mode="json", exclude_unset=True), overrides)
            check_layout(made, self.model, self.slice)
        except ConfigError:
            return None
        return made

    def _estimate(self, config: Config) -> float:
        return estimate(config, self.model, self.slice.chip, engines=1).total
