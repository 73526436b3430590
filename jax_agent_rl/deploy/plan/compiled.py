"""Compiled programs: memory on a chip, work, exchanges between devices, and the predicted and ideal time of a call.

Work is counted in what JAX traces: products and the bytes they read. A compiler's own cost analysis counts a loop's
body once, and for one device. Here a loop counts every iteration, recomputation counts (it is in the trace), and all
devices count together. Platform-dependent code counts with the TPU's branch; a kernel states its own cost.

Ideally a program takes as long as its slowest part (products, memory, links): parts overlap perfectly, and everything
else costs nothing. Where it is known what the model needs (:class:`EngineWork`), no recomputation counts; otherwise the
traced products do, whose operands pass through memory once.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import cast

import jax
from jax.core import ShapedArray
from jax.extend import core

from jax_agent_rl.deploy.plan.hlo import RING, Collective, collectives, parse
from jax_agent_rl.deploy.plan.prediction import Prediction, kernel_grids, predict
from jax_agent_rl.deploy.plan.programs import Program
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.errors import CompilerError
from jax_agent_rl.observe.progress import duration

PLATFORM = "tpu"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Work of all devices together.

    Attributes:
        flops: operations of matrix products and convolutions; a multiplication and an addition are two.
        bytes: their operands and results, each read or written once: the traffic if nothing stayed in a cache and
            everything else were fused into them.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def __mul__(self, times: float) -> Flops:
        return Flops(flops=self.flops * times, bytes=self.bytes * times)


def count_work(traced: core.ClosedJaxpr, *, loops: int = 1) -> Flops:
    """Count the work of a traced call (see ``jax.make_jaxpr``); nothing is computed.

    A loop whose end is found while it runs (``while``) counts ``loops`` times.
    """
    return _count_jaxpr(traced.jaxpr, loops)


def _count_jaxpr(jaxpr: core.Jaxpr, loops: int) -> Flops:
    return sum((_count_equation(equation, loops) for equation in jaxpr.eqns), Flops())


def _count_equation(equation: core.JaxprEqn, loops: int) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _count_product(equation)
    if name == "scan":
        return _count_jaxpr(params["jaxpr"].jaxpr, loops) * params["length"]
    if name == "while":
        return _count_jaxpr(params["body_jaxpr"].jaxpr, loops) * loops
    if name == "pallas_call" and (stated := params["cost_estimate"]) is not None:
        return Flops(flops=float(stated.flops), bytes=float(stated.bytes_accessed))
    if name == "cond" and (platforms := params.get("branches_platforms")):
        taken = next(at for at, names in enumerate(platforms) if names is None or PLATFORM in names)
        return _count_jaxpr(params["branches"][taken].jaxpr, loops)
    if name == "cond":
        return max((_count_jaxpr(branch.jaxpr, loops) for branch in params["branches"]), key=lambda work: work.flops)
    # Calls, custom derivatives and rematerialized parts have their programs among their parameters.
    inner = (value.jaxpr if isinstance(value, core.ClosedJaxpr) else value for value in params.values())
    times = math.prod(params["mesh"].shape.values()) if name == "shard_map" else 1
    return sum((_count_jaxpr(value, loops) for value in inner if isinstance(value, core.Jaxpr)), Flops()) * times


def _count_product(equation: core.JaxprEqn) -> Flops:
    """Count a product: two operations per number of the result and number contracted for it."""
    arrays = [cast(ShapedArray, variable.aval) for variable in (*equation.invars, *equation.outvars)]
    left, right, result = arrays[0], arrays[1], arrays[-1]
    match equation.primitive.name:
        case "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            contracted = math.prod(left.shape[axis] for axis in axes)
        case "conv_general_dilated":
            contracted = right.size / right.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        case _:  # ragged: each row meets one expert
            contracted = left.shape[-1]
    return Flops(flops=2.0 * result.size * contracted, bytes=float(sum(x.size * x.dtype.itemsize for x in arrays)))


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

    @property
    def flops(self) -> float:
        """Least operations of a call, on all chips together."""
        return self.work.flops if self.program.model_flops is None else self.program.model_flops

    @property
    def moved(self) -> float:
        """Least bytes that pass through all chips' memory in a call."""
        if self.program.model_bytes is not None:
            return self.program.model_bytes
        if not self.work.flops and self.memory:  # a program without products passes over all that it is given
            return (self.memory.arguments + self.memory.outputs) * self.program.mesh.size
        return self.work.bytes


def compile_program(program: Program, chip: Chip) -> Compiled:
    """Compile for the chips of the program's mesh, which are of one kind.

    Raises:
        CompilerError: the compiler failed in another way than for want of memory.
    """
    work, begin = count_work(program.traced.jaxpr, loops=program.loops), time.perf_counter()
    try:
        executable = program.traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise CompilerError(f"the compiler does not take {program.name}: {error}") from error
        seconds, text = time.perf_counter() - begin, str(error)
        return Compiled(program=program, memory=None, needs=needed(text), problem=text, work=work, seconds=seconds)
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
            e.bytes / (chip.dcn_bandwidth if e.between_slices else RING * chip.link_bandwidth) for e in one.exchanges
        ),
    )


def format_bytes(size: float) -> str:
    """Format bytes in a readable unit."""
    return f"{size / 1024 ** unit_power(size):.3g} {UNITS[unit_power(size)]}"


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable unit."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def unit_power(size: float) -> int:
    """Return the power of 1024 of that unit."""
    return next((power for power in range(len(UNITS) - 1) if size < 1000 * 1024**power), len(UNITS) - 1)
