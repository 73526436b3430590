"""Programs of a run and the arrays beside them, and what compiling says of them.

That is memory, work, exchanges and time. Ideally a program takes as long as its slowest
part (products, memory, links): parts overlap perfectly, and everything else costs nothing. Where it
is known what the model needs (:class:`EngineWork`), no recomputation counts; otherwise the traced
products do, whose operands pass through memory once.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from jax_agent_rl.deploy.plan.answers import (
    CompilerAnswer,
    Memory,
    answer_file,
    keep_answer,
    read_answer,
)
from jax_agent_rl.deploy.plan.hlo import RING, Collective, collectives, parse
from jax_agent_rl.deploy.plan.prediction import (
    Flops,
    Prediction,
    count_work,
    kernel_costs,
    kernel_grids,
    predict,
)
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.errors import CompilerError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.observe.progress import duration

Phase = Literal["learner", "weights", "rollout"]
TokenKind = Literal["prompts", "sampled", "trained", "fed"]


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
        donated_bytes: bytes on a device of the part of them that a call takes, without padding;
            None: all of them.
        loops: iterations of a loop whose end is found while it runs.
        tokens: tokens that a full call takes or gives.
        token_kind: which tokens of a step these are; None if the program does not process tokens.
        calls: runs per step over all those tokens; 0 where its time does not count.
        copies: engines along the mesh's ``data``, each of which runs it on its own devices.
        model_flops: operations that the model itself needs for a call of one copy, nothing
            recomputed; None: as many as the trace has.
        model_bytes: bytes that have to pass through the memories for it: weights and the visible
            KV, once; None: as many as the trace has.
        rare_branches: where the program has branches, count the ones that few runs need.
    """

    name: str
    phase: Phase
    traced: jax.stages.Traced
    mesh: Mesh
    holds: frozenset[str] = frozenset()
    donates: frozenset[str] = frozenset()
    donated_bytes: int | None = None
    loops: int = 1
    tokens: int = 0
    token_kind: TokenKind | None = None
    calls: int = 1
    copies: int = 1
    model_flops: float | None = None
    model_bytes: float | None = None
    rare_branches: bool = True


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Arrays that stay on devices between programs.

    Attributes:
        arrays: a tree of described arrays.
        absent: phases in which they are not there.
    """

    name: str
    arrays: Any
    absent: frozenset[Phase] = frozenset()

    @functools.cached_property
    def bytes(self) -> Mapping[Device, int]:
        """Bytes on each device that holds some, without padding."""
        sums: dict[Device, int] = {}
        for array in jax.tree.leaves(self.arrays):
            shard_shape = array.sharding.shard_shape(array.shape)
            size = math.prod(shard_shape) * array.dtype.itemsize
            for device in array.sharding.device_set:
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
    """The parameters that an engine is given.

    Attributes:
        holds: names of the residents that they are; none if they are copies.
        by_layer: they are copied a layer at a time.
    """

    params: Params
    holds: frozenset[str]
    by_layer: bool = False


# --- compiling ------------------------------------------------------------------------------------

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program and the compiler's findings.

    Attributes:
        memory: None if the program does not fit a chip even alone.
        required_bytes: bytes of a chip that it takes alone; if it does not fit, as far as the
            compiler says.
        problem: the compiler's message if it does not fit.
        work: work of all devices together.
        exchanges: exchanges between the devices; empty where they are not known.
        prediction: predicted time of a call; None if the compiler refused the program.
        seconds: duration of the compilation.
        from_earlier_plan: whether the compiler had answered before, so that it was not asked.
    """

    program: Program
    memory: Memory | None
    required_bytes: int
    problem: str | None = None
    work: Flops
    exchanges: tuple[Collective, ...] = ()
    prediction: Prediction | None = None
    seconds: float
    from_earlier_plan: bool = False

    @property
    def exchanges_known(self) -> bool:
        """Whether there was text to read exchanges from: a program that does not fit has none."""
        return self.memory is not None or self.program.mesh.size == 1

    def summary(self, chip: Chip) -> str:
        """Return its predicted time and the time of its compilation, in a few words."""
        compile_time = f"compiled in {format_seconds(self.seconds)}"
        if self.from_earlier_plan:
            compile_time = "compiled for an earlier plan"
        if self.prediction is None:
            return f"refused, {compile_time}"
        if not self.program.calls:
            return compile_time

        steps = self.program.loops
        predicted = self.prediction.seconds
        unit = "step" if steps > 1 else "call"
        share = ideal_seconds(self, chip).total / predicted
        return (
            f"{format_seconds(predicted / steps)} a {unit}, {share:.0%} of the ideal,"
            f" {compile_time}"
        )

    @property
    def flops(self) -> float:
        """Least operations of a call, on all chips together."""
        of_one_copy = self.program.model_flops
        if of_one_copy is None:
            of_one_copy = self.work.flops
        return of_one_copy * self.program.copies

    @property
    def bytes_accessed(self) -> float:
        """Least bytes that pass through all chips' memory in a call."""
        if self.program.model_bytes is not None:
            return self.program.model_bytes * self.program.copies
        if not self.work.flops and self.memory:
            # A program without products passes over all that it is given.
            return (self.memory.arguments + self.memory.outputs) * self.program.mesh.size
        return self.work.bytes * self.program.copies


def compile_program(program: Program, chip: Chip, *, keeps_answers: bool = False) -> Compiled:
    """Compile for the chips of the program's mesh, which are of one kind.

    Args:
        keeps_answers: answers are kept on disk, and the compiler is not asked twice.

    Raises:
        CompilerError: the compiler failed in another way than for want of memory.
    """
    jaxpr = program.traced.jaxpr.jaxpr
    work = count_work(jaxpr, loops=program.loops, platform=chip.platform)
    start_time = time.perf_counter()
    lowered = program.traced.lower()
    file = None
    answer = None
    if keeps_answers:
        file = answer_file(lowered, program.mesh, chip)
        answer = read_answer(file)
    from_earlier_plan = answer is not None
    if answer is None:
        answer = _ask(lowered, program.name)
        if file is not None:
            keep_answer(file, answer)
    seconds = time.perf_counter() - start_time

    if answer.memory is None:
        return Compiled(
            program=program,
            memory=None,
            required_bytes=required_bytes(answer.text),
            problem=answer.text,
            work=work,
            seconds=seconds,
            from_earlier_plan=from_earlier_plan,
        )

    hlo = parse(answer.text)
    exchanges = collectives(hlo, program.mesh, loops=program.loops)
    prediction = predict(
        hlo,
        chip,
        program.mesh,
        loops=program.loops,
        grids=kernel_grids(program.traced.jaxpr),
        costs=kernel_costs(program.traced.jaxpr),
        rare_branches=program.rare_branches,
    )
    return Compiled(
        program=program,
        memory=answer.memory,
        required_bytes=answer.memory.total,
        work=work,
        exchanges=tuple(exchanges),
        prediction=prediction,
        seconds=seconds,
        from_earlier_plan=from_earlier_plan,
    )


def _ask(lowered: jax.stages.Lowered, name: str) -> CompilerAnswer:
    """Return the compiler's answer about a program; see :func:`compile_program`."""
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        problem = str(error)
        if "RESOURCE_EXHAUSTED" not in problem:
            raise CompilerError(f"the compiler does not take {name}: {error}") from error
        return CompilerAnswer(memory=None, text=problem)

    analysis = executable.memory_analysis()
    text = executable.as_text()
    assert analysis is not None and text is not None  # XLA's compilers give both
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )
    return CompilerAnswer(memory=memory, text=text)


def required_bytes(text: str) -> int:
    """Return the bytes a program takes according to the compiler's refusal; 0 if it does not say.

    >>> required_bytes("… for HLO temporaries (768.00G) exceeds available HBM (15.75G).") >> 30
    768
    >>> required_bytes("Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm.") / 2**30
    21.5
    """
    match = re.search(r"(?:Used|temporaries \(|required [^(]*\()\s*([\d.]+)([KMGT]?)", text)
    if match is None:
        return 0
    power = " KMGT".index(match[2] or " ")
    return int(float(match[1]) * 1024**power)


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


def ideal_seconds(compiled: Compiled, chip: Chip) -> Seconds:
    """Return the ideal time of a call; without exchanges where these are unknown."""
    link_seconds = 0.0
    for exchange in compiled.exchanges:
        if exchange.between_slices:
            link_seconds += exchange.bytes / chip.dcn_bandwidth
        else:
            link_seconds += exchange.bytes / (RING * chip.link_bandwidth)

    chips = compiled.program.mesh.size
    return Seconds(
        products=compiled.flops / chips / chip.flops,
        memory=compiled.bytes_accessed / chips / chip.hbm_bandwidth,
        links=link_seconds,
    )


def format_bytes(size: float) -> str:
    """Format bytes in a readable unit."""
    power = unit_power(size)
    return f"{size / 1024**power:.3g} {UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable unit."""
    if seconds >= 10:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def unit_power(size: float) -> int:
    """Return the power of 1024 of the unit in which a size is readable."""
    largest = len(UNITS) - 1
    for power in range(largest):
        if size < 1000 * 1024**power:
            return power
    return largest
