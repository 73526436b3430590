"""Programs of a run and the arrays beside them, and what compiling says: memory, work, exchanges, time, a profile.

Ideally a program takes as long as its slowest part (products, memory, links): parts overlap
perfectly, and everything else costs nothing. Where it is known what the model needs
(:class:`EngineWork`), no recomputation counts; otherwise the traced products do, whose operands
pass through memory once.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jax_agent_rl.deploy.plan.hlo import RING, Collective, collectives, parse
from jax_agent_rl.deploy.plan.prediction import Flops, Prediction, count_work, kernel_grids, predict
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.errors import CompilerError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.observe.progress import duration

Phase = Literal["learner", "weights", "rollout"]
Tokens = Literal["prompts", "sampled", "trained"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a run.

    Attributes:
        name: shown to the user.
        phase: phase of a step in which it runs.
        traced: the program, to be compiled.
        mesh: its devices; the compiler numbers them in this order.
        holds: names of the :class:`Resident` arrays among its arguments.
        donates: names of residents whose memory, or as much, its outputs take.
        loops: iterations of a loop whose end is found while it runs.
        tokens: tokens that a full call takes or gives.
        of: which tokens of a step these are; None if the program does not process tokens.
        calls: runs per step over all those tokens; 0 where its time does not count.
        copies: engines along the mesh's ``data``, each of which runs it on its own devices.
        model_flops: operations that the model itself needs for a call of one copy: nothing
            recomputed.
        model_bytes: bytes that have to pass through its memories: weights and the visible KV, once.
            None, as for ``model_flops``: what is counted in the trace.
        rare_branches: what few runs need counts, too, where the program has branches.
    """

    name: str
    phase: Phase
    traced: jax.stages.Traced
    mesh: Mesh
    holds: frozenset[str] = frozenset()
    donates: frozenset[str] = frozenset()
    loops: int = 1
    tokens: int = 0
    of: Tokens | None = None
    calls: int = 1
    copies: int = 1
    model_flops: float | None = None
    model_bytes: float | None = None
    rare_branches: bool = True


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Arrays that stay on devices between programs: a tree of described arrays, except in the ``absent`` phases."""

    name: str
    arrays: Any
    absent: frozenset[Phase] = frozenset()

    @functools.cached_property
    def bytes(self) -> Mapping[Device, int]:
        """Bytes on each device that holds some, without padding."""
        sums: dict[Device, int] = {}
        for x in jax.tree.leaves(self.arrays):
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for device in x.sharding.device_set:
                sums[device] = sums.get(device, 0) + size
        return sums


@dataclass(kw_only=True)
class Inventory:
    """Programs and resident arrays of a run, or of a phase of it."""

    programs: list[Program] = field(default_factory=list)
    residents: list[Resident] = field(default_factory=list)

    def keep(
        self, name: str, arrays: Any, *, absent: frozenset[Phase] = frozenset()
    ) -> frozenset[str]:
        """Record resident arrays, if there are any; return their name for :attr:`Program.holds`."""
        if not jax.tree.leaves(arrays):
            return frozenset()
        self.residents.append(Resident(name=name, arrays=arrays, absent=absent))
        return frozenset({name})


class Published(NamedTuple):
    """The parameters an engine is given, and the names of the residents that they are (none if they are copies)."""

    params: Params
    holds: frozenset[str]


# --- compiling ------------------------------------------------------------------------------------

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one chip while a program runs there; ``aliased`` outputs take the memory of arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program and the compiler's findings.

    Attributes:
        memory: None if the program does not fit a chip even alone.
        needs: bytes of a chip that it takes alone; if it does not fit, as far as the compiler says.
        problem: the compiler's message if it does not fit.
        work: work of all devices together.
        exchanges: exchanges between them; empty where they are not known.
        prediction: predicted time of a call; None if the compiler refused the program.
        seconds: duration of the compilation.
    """

    program: Program
    memory: Memory | None
    needs: int
    problem: str | None = None
    work: Flops
    exchanges: tuple[Collective, ...] = ()
    prediction: Prediction | None = None
    seconds: float

    @property
    def exchanges_known(self) -> bool:
        """Whether there was text to read exchanges from: a program that does not fit has none."""
        return self.memory is not None or self.program.mesh.size == 1

    def summary(self, chip: Chip) -> str:
        """Return what it was found to take, in a few words."""
        took = f"compiled in {format_seconds(self.seconds)}"
        if self.prediction is None:
            return f"refused, {took}"
        steps, predicted = self.program.loops, self.prediction.seconds
        if not self.program.calls:
            return took
        share = f"{ideal_seconds(self, chip).total / predicted:.0%} of the ideal"
        return (
            f"{format_seconds(predicted / steps)} a {'step' if steps > 1 else 'call'}, {share},"
            f" {took}"
        )

    @property
    def flops(self) -> float:
        """Least operations of a call, on all chips together."""
        one = self.work.flops if self.program.model_flops is None else self.program.model_flops
        return one * self.program.copies

    @property
    def moved(self) -> float:
        """Least bytes that pass through all chips' memory in a call."""
        if self.program.model_bytes is not None:
            return self.program.model_bytes * self.program.copies
        if (
            not self.work.flops and self.memory
        ):  # a program without products passes over all that it is given
            return (self.memory.arguments + self.memory.outputs) * self.program.mesh.size
        return self.work.bytes * self.program.copies


def compile_program(program: Program, chip: Chip) -> Compiled:
    """Compile for the chips of the program's mesh, which are of one kind.

    Raises:
        CompilerError: the compiler failed in another way than for want of memory.
    """
    work, begin = count_work(program.traced.jaxpr.jaxpr, loops=program.loops), time.perf_counter()
    try:
        executable = program.traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise CompilerError(f"the compiler does not take {program.name}: {error}") from error
        seconds, text = time.perf_counter() - begin, str(error)
        return Compiled(
            program=program,
            memory=None,
            needs=needed(text),
            problem=text,
            work=work,
            seconds=seconds,
        )
    seconds = time.perf_counter() - begin
    found, text = executable.memory_analysis(), executable.as_text()
    assert found is not None and text is not None  # XLA's compilers give both
    memory = Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )
    hlo = parse(text)
    return Compiled(
        program=program,
        memory=memory,
        needs=memory.total,
        work=work,
        exchanges=tuple(collectives(hlo, program.mesh, loops=program.loops)),
        prediction=predict(
            hlo,
            chip,
            program.mesh,
            loops=program.loops,
            grids=kernel_grids(program.traced.jaxpr),
            rare_branches=program.rare_branches,
        ),
        seconds=seconds,
    )


def needed(text: str) -> int:
    """Return the bytes a program takes according to the compiler's refusal; 0 if it does not say.

    >>> needed("RESOURCE_EXHAUSTED: … required for HLO temporaries (768.00G) exceeds available HBM (15.75G).") >> 30
    768
    >>> needed("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm.") / 2**30
    21.5
    """
    found = re.search(r"(?:Used|temporaries \(|required [^(]*\()\s*([\d.]+)([KMGT]?)", text)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one call of a program, by resource."""

    products: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        return max(self.products, self.memory, self.links)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(vars(self), key=lambda part: getattr(self, part))


def ideal_seconds(one: Compiled, chip: Chip) -> Seconds:
    """Return the ideal time of a call; without exchanges where these are unknown."""
    chips = one.program.mesh.size
    return Seconds(
        products=one.flops / chips / chip.flops,
        memory=one.moved / chips / chip.hbm_bandwidth,
        links=sum(
            e.bytes / (chip.dcn_bandwidth if e.between_slices else RING * chip.link_bandwidth)
            for e in one.exchanges
        ),
    )


def format_bytes(size: float) -> str:
    """Format bytes in a readable unit."""
    return f"{size / 1024 ** unit_power(size):.3g} {UNITS[unit_power(size)]}"


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable unit."""
    return (
        duration(seconds)
        if seconds >= 10
        else f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
    )


def unit_power(size: float) -> int:
    """Return the power of 1024 of that unit."""
    return next(
        (power for power in range(len(UNITS) - 1) if size < 1000 * 1024**power), len(UNITS) - 1
    )


# --- profiles -------------------------------------------------------------------------------------

ROWS = 25
"""Places that are shown; the others count together."""


def show_profiles(compiled: Sequence[Compiled], chip: Chip, console: Console) -> None:
    """Print the profile of each program."""
    for one in compiled:
        name, steps, ideal = one.program.name, one.program.loops, ideal_seconds(one, chip)
        if one.prediction is None:
            console.print(
                f"{name} does not fit: {one.problem}",
                "",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
            continue
        predicted, least = one.prediction.seconds, format_seconds(ideal.total / steps)
        console.print(
            f"[bold]{name}[/bold]: {format_seconds(predicted / steps)} a"
            f" {'step' if steps > 1 else 'call'}, {ideal.total / predicted:.0%} of the ideal"
            f" ({least}, bound by {ideal.bound})",
            highlight=False,
            soft_wrap=True,
        )
        console.print(profile_table(one), "")


def profile_table(one: Compiled) -> Table:
    """Return a table of the parts of a program that the compiler took, longest first."""
    assert one.prediction is not None
    whole, steps = one.prediction.seconds, one.program.loops
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("time", "share", "runs"):
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in ("what", "operation"):
        made.add_column(heading, overflow="fold")
    made.add_column(
        "where, and from where", overflow="fold", min_width=30
    )  # a path and its line stay on one
    shown, others = one.prediction.parts[:ROWS], one.prediction.parts[ROWS:]
    for part in shown:
        numbers = (
            format_seconds(part.seconds / steps),
            f"{part.seconds / whole:.1%}",
            f"{part.runs / steps:.4g}",
        )
        made.add_row(
            *numbers, part.what, part.operation, "\n".join(part.source[:2]) or "(the compiler)"
        )
    if rest := sum(part.seconds for part in others):
        made.add_row(
            format_seconds(rest / steps), f"{rest / whole:.1%}", "", f"{len(others)} others"
        )
    return made


def profiles_as_json(compiled: Sequence[Compiled], chip: Chip) -> dict[str, Any]:
    """Return the profiles in seconds of a call, by program; and whether the compiler took all of them."""
    return {
        "fits": all(one.memory is not None for one in compiled),
        "profiles": {
            one.program.name: {
                "ideal": ideal_seconds(one, chip).total,
                "predicted": one.prediction.seconds,
                "steps": one.program.loops,
                "parts": [part._asdict() for part in one.prediction.parts],
            }
            for one in compiled
            if one.prediction is not None
        },
    }
