"""Reports of a plan: tables and conclusions, what to change if it does not fit, and its JSON."""

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
from jax_agent_rl.deploy.plan.estimate import estimate
from jax_agent_rl.deploy.plan.hlo import Collective
from jax_agent_rl.deploy.plan.plan import BATCH, TEMPORARIES, Load, ResourcePlan
from jax_agent_rl.deploy.plan.prediction import SUSTAINED
from jax_agent_rl.deploy.plan.roofline import PRODUCTS
from jax_agent_rl.deploy.plan.topology import (
    Chip,
    Slice,
    as_overrides,
    check_layout,
    learner_meshes,
    list_idle,
    sampling_hosts,
)
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import engine_shapes, of_one_host
from jax_agent_rl.utils.text import counted

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

PREDICTED_ON_GPUS = (
    f"time by a roofline: a kernel's products at {PRODUCTS:.0%} of the stated peak or its bytes at"
    f" {SUSTAINED:.0%} of the stated bandwidth, as they are scheduled; the compiler gives none"
)
"""What a GPU's predicted times are."""

_SIZE_COLUMNS = 6  # columns of the first table, the programs' names included
_PROGRAM_WIDTH = 10  # characters of a program's column: its name is broken at blanks
_WRAPPED = ("program", "exchanges in", "kinds")
_MAX_HINTS = 3


def show(plan: ResourcePlan, console: Console, *, price: float | None = None) -> None:
    """Print the plan.

    Args:
        price: price of a chip-hour; None leaves out the cost.
    """
    tables = [
        *programs_tables(plan),
        exchanges_table(plan),
        *memory_tables(plan, width=console.width),
    ]
    for table in tables:
        if table.row_count:
            console.print(table, "")

    meanings = dict(COLUMNS)
    if plan.slice.chip.gpu is not None:
        meanings["predicted"] = PREDICTED_ON_GPUS
    for name, meaning in meanings.items():
        console.print(f"  [bold]{name}[/bold]: {meaning}", highlight=False, soft_wrap=True)
    console.print()

    for line in (*_describe_fit(plan), *_describe_speed(plan, price)):
        console.print(line, highlight=False, soft_wrap=True)


def programs_tables(plan: ResourcePlan) -> tuple[Table, Table]:
    """Return tables of the programs' sizes and times, each narrow enough for 80 characters."""
    justify = dict.fromkeys(COLUMNS, "right")
    justify["program"] = "left"
    justify["bound"] = "left"
    names = list(COLUMNS)
    sizes = _table({name: justify[name] for name in names[:_SIZE_COLUMNS]})
    times = _table({name: justify[name] for name in (names[0], *names[_SIZE_COLUMNS:])})
    for compiled, load in zip(plan.compiled, plan.loads, strict=True):
        sizes.add_row(compiled.program.name, *_size_cells(compiled, load))
        times.add_row(
            compiled.program.name,
            *_time_cells(compiled, plan.slice.chip),
            f"{compiled.seconds:.1f}",
        )
    return sizes, times


def _size_cells(compiled: Compiled, load: Load) -> list[str]:
    """Return chips, memory, operations, bytes of memory accessed and bytes sent of a program."""
    memory = format_bytes(load.total)
    if not load.fits:
        memory += " !"
    accessed = "-"
    if compiled.bytes_accessed:
        accessed = format_bytes(compiled.bytes_accessed)
    sent = "-"
    if compiled.exchanges_known:
        sent = format_bytes(sum(exchange.bytes for exchange in compiled.exchanges))
    return [
        str(compiled.program.mesh.size),
        memory,
        f"{compiled.flops / 1e12:.3g}",
        accessed,
        sent,
    ]


def _time_cells(compiled: Compiled, chip: Chip) -> list[str]:
    """Return ideal, bound, prediction and share of a program."""
    seconds = ideal_seconds(compiled, chip)
    if not compiled.program.calls or not seconds.total:
        return ["-", "", "-", "-"]

    steps = compiled.program.loops
    ideal = format_seconds(seconds.total / steps)
    bound = seconds.bound
    if not compiled.exchanges_known:
        ideal = f">={ideal}"
        bound = ""
    if compiled.prediction is None:
        return [ideal, bound, "-", "-"]
    predicted = compiled.prediction.seconds
    return [ideal, bound, format_seconds(predicted / steps), f"{seconds.total / predicted:.0%}"]


def exchanges_table(plan: ResourcePlan) -> Table:
    """Return a table of what chips send in each program, by axes of the mesh."""
    table = _table({"exchanges in": "left", "over": "left", "sent": "right", "kinds": "left"})
    for compiled in plan.compiled:
        for axes, (size, kinds) in _sum_exchanges(compiled).items():
            table.add_row(compiled.program.name, axes, format_bytes(size), ", ".join(kinds))
    return table


def memory_tables(plan: ResourcePlan, *, width: int) -> Iterator[Table]:
    """Yield tables of the memory on each program's fullest chip, by kind, all in one unit.

    A table has as many programs as fit into ``width`` characters.
    """
    power = unit_power(plan.fullest.total)
    kinds = []
    for load in plan.loads:
        for kind in load.parts:
            if kind not in kinds:
                kinds.append(kind)
    heading = f"{UNITS[power]} of a chip's {plan.fullest.capacity / 1024**power:.4g}"

    first_width = max(map(len, (heading, *kinds))) + 1
    most = max(1, (width - first_width) // _PROGRAM_WIDTH)
    table_count = math.ceil(len(plan.loads) / most)
    per_table = math.ceil(len(plan.loads) / table_count)  # so that all are about as wide

    for start in range(0, len(plan.loads), per_table):
        loads = plan.loads[start : start + per_table]
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column(heading, no_wrap=True, vertical="bottom")
        for load in loads:
            table.add_column(
                load.program.name, justify="right", vertical="bottom", max_width=_PROGRAM_WIDTH - 1
            )
        for kind in kinds:
            cells = []
            for load in loads:
                if kind in load.parts:
                    cells.append(f"{load.parts[kind] / 1024**power:.2f}")
                else:
                    cells.append("-")
            table.add_row(kind, *cells)
        totals = [f"[bold]{load.total / 1024**power:.2f}[/bold]" for load in loads]
        table.add_row("[bold]together[/bold]", *totals)
        yield table


def _table(columns: dict[str, Any]) -> Table:
    """Return an empty table, given how each column is justified."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading, justify in columns.items():
        table.add_column(heading, justify=justify, no_wrap=heading not in _WRAPPED)
    return table


def _sum_exchanges(compiled: Compiled) -> dict[str, tuple[float, list[str]]]:
    """Return the bytes that each chip sends, and the kinds of exchanges, by axes."""
    by_axes: dict[str, list[Collective]] = {}
    for exchange in compiled.exchanges:
        axes = "+".join(exchange.axes) or "?"
        by_axes.setdefault(axes, []).append(exchange)

    sums = {}
    for axes, exchanges in by_axes.items():
        size = sum(exchange.bytes for exchange in exchanges)
        kinds = {exchange.kind for exchange in exchanges}
        sums[axes] = (size, sorted(kinds))
    return sums


def _describe_fit(plan: ResourcePlan) -> Iterator[str]:
    """Yield sentences on whether the plan fits, and what to change."""
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
    for advice, loads in by_advice.items():
        names = ", ".join(load.program.name for load in loads)
        excess = format_bytes(max(0, *(load.total - capacity for load in loads)))
        if len(loads) == 1:
            problem = f"[red]{names} does not fit[/red]: {excess}"
        else:
            problem = f"[red]{names} do not fit[/red]: up to {excess}"
        yield f"{problem} too much on a chip; try {' or '.join(advice)}."

    pages = plan.host_pages
    if pages:
        used = f"{format_bytes(pages)} of KV in a host's {format_bytes(plan.host_memory)} of memory"
        if pages > plan.host_memory:
            yield f"[red]{used} do not fit[/red]: lower rollout.jetstream.kv_offloading_size."
        else:
            yield f"The engines keep up to {used} (rollout.jetstream.kv_offloading_size)."

    for line in list_idle(plan.config, plan.slice, plan.placement):
        yield f"[yellow]{line}[/yellow]."


def _describe_speed(plan: ResourcePlan, price: float | None) -> Iterator[str]:
    """Yield sentences on the time of a step, what it transfers and what it costs."""
    step = plan.step
    rollout = plan.config.rollout
    if step.rollout:
        is_bound = "rollout" in step.bounds
        yield f"rollout: {_describe_tokens(step.sampled, step.rollout, is_bound=is_bound)}"
    if step.learner:
        is_bound = "learner" in step.bounds
        yield f"learner: {_describe_tokens(step.trained, step.learner, is_bound=is_bound)}"

    at_least = "at least " if step.bounds else ""
    if plan.placement.engines:
        side, share = step.waits
        seconds = format_seconds(step.seconds)
        yield f"step: {at_least}{seconds}; who waits: {side}, {share:.0%} of it"
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
    factory = rollout.jetstream.engine_factory
    if factory is not None:
        yield (
            f"rollout.jetstream.engine_factory={factory}: planned as if it were the built-in engine"
        )
    if price is not None:
        label = "cost" if plan.placement.engines else "cost of the learner"
        yield (
            f"{label}: {at_least}{_cost(plan, price):.3g} a step,"
            f" {_cost_of_million(plan, price):.3g} a million trained tokens;"
            f" {counted(plan.slice.chips, 'chip')} at {price:g} an hour"
        )
    yield (
        "Assumed: trajectories of full length, rows full, slots as far as trajectories and KV"
        f" cache go; tools and hosts that take no time; {plan.utilization:.0%} of the ideal where"
        " the compiler refuses a program (--utilization)."
    )


def _describe_tokens(tokens: int, seconds: float, *, is_bound: bool) -> str:
    """Return tokens, time and speed; ``is_bound`` if the seconds are a lower bound."""
    time = format_seconds(seconds)
    speed = f"{tokens / seconds:,.0f}"
    if is_bound:
        return f"{tokens:,} tokens in at least {time}, at most {speed} a second"
    return f"{tokens:,} tokens in {time}, {speed} a second"


def _cost(plan: ResourcePlan, price: float) -> float:
    """Return the cost of a step at ``price`` a chip-hour.

    It is the learner's alone if engines run elsewhere.
    """
    return plan.step.seconds / 3600 * price * plan.slice.chips


def _cost_of_million(plan: ResourcePlan, price: float) -> float:
    """Return the cost of sampling and training on a million tokens; see :func:`_cost`."""
    return _cost(plan, price) * 1e6 / plan.step.sampled


def as_json(plan: ResourcePlan, *, price: float | None = None) -> dict[str, Any]:
    """Return the whole plan, in bytes, seconds and floating point operations."""
    programs = []
    for compiled, load in zip(plan.compiled, plan.loads, strict=True):
        programs.append(_program_as_json(plan, compiled, load))

    cost = None
    cost_of_million = None
    if price is not None:
        cost = _cost(plan, price)
        cost_of_million = _cost_of_million(plan, price)
    return {
        "topology": plan.slice.name,
        "chips": plan.slice.chips,
        "capacity": plan.slice.chip.hbm_bytes,
        "fits": plan.fits,
        "meshes": {
            "learner": dict(plan.placement.learner.shape),
            "engines": [dict(mesh.shape) for mesh in plan.placement.engines],
        },
        "programs": programs,
        "host": {"pages": plan.host_pages, "memory": plan.host_memory},
        "replay": vars(plan.replay),
        "step": {**vars(plan.step), "seconds": plan.step.seconds, "waits": plan.step.waits},
        "utilization": plan.utilization,
        "cost": cost,
        "cost_of_million_trained_tokens": cost_of_million,
        "cost_of": "step" if plan.placement.engines else "learner",
    }


def _program_as_json(plan: ResourcePlan, compiled: Compiled, load: Load) -> dict[str, Any]:
    """Return one program of a plan, for JSON."""
    exchanged = None
    if compiled.exchanges_known:
        exchanged = {axes: sent for axes, (sent, _) in _sum_exchanges(compiled).items()}
    predicted = None
    if compiled.prediction is not None:
        predicted = compiled.prediction.seconds
    return {
        "name": compiled.program.name,
        "phase": compiled.program.phase,
        "chips": compiled.program.mesh.size,
        "memory": dict(load.parts),
        "total": load.total,
        "fits": load.fits,
        "problem": compiled.problem,
        "change": [] if load.fits else _adviser(plan).advice(load),
        "flops": compiled.flops,
        "bytes": compiled.bytes_accessed,
        "exchanged": exchanged,
        "seconds": vars(ideal_seconds(compiled, plan.slice.chip)),
        "predicted": predicted,
        "steps": compiled.program.loops,
        "compile_seconds": compiled.seconds,
    }


# --- what to change -------------------------------------------------------------------------------


def _adviser(plan: ResourcePlan) -> Adviser:
    return Adviser(config=plan.config, model=plan.model, slice=plan.slice)


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Proposes changes of a configuration that the planner would accept on the slice's devices."""

    config: Config
    model: DecoderConfig
    slice: Slice

    def advice(self, load: Load) -> list[str]:
        """Return overrides to try on a program that does not fit.

        They begin with what makes the largest parts of the chip's memory smaller.
        """
        parts = sorted(load.parts, key=lambda name: load.parts[name], reverse=True)
        hints = []
        for part in parts:
            hints += self._hints(load, part)
        hints += [*self._adapters(), self._larger_slice()]
        unique = list(dict.fromkeys(hints))
        return unique[:_MAX_HINTS]

    def _hints(self, load: Load, part: str) -> Iterator[str]:
        """Yield overrides that make a part of a program's memory smaller."""
        config = self.config
        phase = load.program.phase
        could_sleep = (
            config.rollout.placement == "colocated"
            and config.trainer.mode == "sync"
            and not config.rollout.sleep_during_update
        )
        if part in (WEIGHTS, CACHE) and phase == "learner" and could_sleep:
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
        hosts = sampling_hosts(self.config, self.slice)
        shapes = engine_shapes(of_one_host(self.config, hosts))
        if shapes.kv_cache_tokens > shapes.max_model_len:
            half = max(shapes.max_model_len, shapes.kv_cache_tokens // 2)
            yield from self._accepted(f"rollout.jetstream.kv_cache_tokens={half}")
        checkpoints = shapes.num_state_checkpoints
        if self.model.delta_net is not None and checkpoints:
            yield from self._accepted(f"rollout.jetstream.state_checkpoints={checkpoints // 2}")
        slots = shapes.max_concurrent_decodes
        if slots > 1:
            yield from self._accepted(f"rollout.jetstream.max_concurrent_decodes={slots // 2}")

    def _engine(self) -> Iterator[str]:
        """Yield overrides that make an engine's arrays smaller on each chip."""
        engine = self.config.rollout.jetstream
        if engine.dtype == "float32":
            yield from self._accepted("rollout.jetstream.dtype=bfloat16")

        tensor = engine.mesh.tensor or 1
        expert = engine.mesh.expert or 1
        if expert > 1:
            overrides = [f"rollout.jetstream.mesh.expert={2 * expert}"]
        else:
            overrides = [f"rollout.jetstream.mesh.tensor={2 * tensor}"]
        engines = engine.mesh.data or 1
        if engines > 1:  # fewer engines, each on more chips
            overrides.append(f"rollout.jetstream.mesh.data={engines // 2}")
        yield from self._accepted(*overrides)

    def _activations(self) -> Iterator[str]:
        """Yield overrides that make the learner's activations smaller."""
        learner = self.config.learner
        if learner.remat != "full":
            yield from self._accepted("learner.remat=full")
        if learner.compute_dtype == "float32":
            yield from self._accepted("learner.compute_dtype=bfloat16")
        if learner.micro_batch_size > 1:
            yield from self._accepted(f"learner.micro_batch_size={learner.micro_batch_size // 2}")
        longest = self.config.agent.max_prompt_length + self.config.agent.max_response_length
        if learner.pack_length > longest:
            pack_length = max(longest, learner.pack_length // 2)
            yield from self._accepted(f"learner.pack_length={pack_length}")

    def _mesh(self) -> Iterator[str]:
        """Yield the slice's learner mesh of least memory, unless it is the configured one."""
        least = self._estimate(self.config)
        best: str | None = None
        for choice in learner_meshes(self.config, self.model, self.slice):
            overrides = as_overrides(choice, changing=self.config)
            changed = self._change(overrides)
            if changed is None:
                continue
            total = self._estimate(changed)
            if total < least:
                least = total
                best = " ".join(overrides)
        if best is not None:
            yield best

    def _adapters(self) -> Iterator[str]:
        """Yield the override that trains adapters instead of all weights."""
        if self.config.learner.lora is None:
            yield from self._accepted("learner.lora.rank=16")

    def _larger_slice(self) -> str:
        larger = self.slice.larger
        if larger is None:
            return "a larger --topology"
        return f"a larger --topology, as {larger.name}"

    def _accepted(self, *overrides: str) -> Iterator[str]:
        """Yield the overrides as one hint, unless they would be refused."""
        if self._change(overrides) is not None:
            yield " ".join(overrides)

    def _change(self, overrides: Sequence[str]) -> Config | None:
        """Return the configuration with these overrides; None if it would be refused."""
        try:
            changed = build(self.config.model_dump(mode="json", exclude_unset=True), overrides)
            check_layout(changed, self.model, self.slice)
        except ConfigError:
            return None
        return changed

    def _estimate(self, config: Config) -> float:
        hosts = sampling_hosts(config, self.slice)
        return estimate(config, self.model, self.slice.chip, engines=1, hosts=hosts).total
