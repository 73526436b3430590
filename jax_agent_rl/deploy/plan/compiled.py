"""Compiled programs: the memory each takes of a chip, its work, and what devices exchange in it.

Work is counted in what JAX traces: products and the bytes they read. A compiler's own cost analysis counts a loop's
body once, and for one device. Here it counts as often as it runs, recomputation counts (it is in the trace), and all
devices count together. Of platform-dependent code the TPU's branch counts; a kernel states its own cost.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend import core

from jax_agent_rl.deploy.plan.collectives import Collective, collectives
from jax_agent_rl.deploy.plan.inventory import Program
from jax_agent_rl.deploy.plan.topology import GIB
from jax_agent_rl.errors import CompilerError

PLATFORM = "tpu"


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Work of all devices together.

    Attributes:
        flops: of matrix products and convolutions; a multiplication and an addition are two.
        bytes: operands and results of these, each read or written once: what would pass if nothing stayed in a cache
            and everything else were fused into them.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def __mul__(self, times: float) -> Flops:
        return Flops(flops=self.flops * times, bytes=self.bytes * times)


def work_of(function: Callable[..., Any], *args: Any, loops: int = 1, **kwargs: Any) -> Flops:
    """Count the work of a call; nothing is computed.

    Args:
        function: anything JAX can trace.
        *args: arrays or their shapes.
        loops: how often a loop runs whose end is found while it runs (``while``).
        **kwargs: likewise, by keyword.
    """
    return work_in(jax.make_jaxpr(function)(*args, **kwargs), loops=loops)


def work_in(traced: core.ClosedJaxpr, *, loops: int = 1) -> Flops:
    """Count the work of a traced call."""
    return _of_jaxpr(traced.jaxpr, loops)


def _of_jaxpr(jaxpr: core.Jaxpr, loops: int) -> Flops:
    return sum((_of_equation(equation, loops) for equation in jaxpr.eqns), Flops())


def _of_equation(equation: core.JaxprEqn, loops: int) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _moved(equation, flops=_dot_flops(equation))
    if name in ("conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _moved(equation, flops=_contraction_flops(equation))
    if name == "scan":
        return _of_jaxpr(params["jaxpr"].jaxpr, loops) * params["length"]
    if name == "while":
        return _of_jaxpr(params["body_jaxpr"].jaxpr, loops) * loops
    if name == "pallas_call" and (said := params["cost_estimate"]) is not None:
        return Flops(flops=float(said.flops), bytes=float(said.bytes_accessed))
    if name == "cond" and (platforms := params.get("branches_platforms")):
        taken = next(at for at, names in enumerate(platforms) if names is None or PLATFORM in names)
        return _of_jaxpr(params["branches"][taken].jaxpr, loops)
    if name == "cond":
        return max((_of_jaxpr(branch.jaxpr, loops) for branch in params["branches"]), key=lambda work: work.flops)
    times = math.prod(params["mesh"].shape.values()) if name == "shard_map" else 1
    return sum((_of_jaxpr(inner, loops) for inner in _inner(params)), Flops()) * times


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """Yield programs within an equation's parameters: calls, custom derivatives, rematerialized parts."""
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _array(variable: Any) -> ShapedArray:
    """Return the abstract array of a variable; these programs have no others."""
    return cast(ShapedArray, variable.aval)


def _moved(equation: core.JaxprEqn, *, flops: float) -> Flops:
    variables = (*equation.invars, *equation.outvars)
    return Flops(flops=flops, bytes=float(sum(_array(v).size * _array(v).dtype.itemsize for v in variables)))


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _array(equation.invars[0])
    return 2.0 * _array(equation.outvars[0]).size * math.prod(left.shape[axis] for axis in contracted)


def _contraction_flops(equation: core.JaxprEqn) -> float:
    """Count, for each number of the result, the kernel's numbers per output feature."""
    kernel, name = _array(equation.invars[1]), equation.primitive.name
    if name == "conv_general_dilated":
        features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _array(equation.outvars[0]).size * kernel.size / features
    return 2.0 * _array(equation.outvars[0]).size * _array(equation.invars[0]).shape[-1]  # each row meets one expert


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one chip while a program runs there.

    Attributes:
        aliased: of the outputs, those that take the memory of arguments.
    """

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
    """What is known of a program once a compiler has seen it.

    Attributes:
        memory: None if it does not fit a chip even alone.
        needs: bytes of a chip that it takes alone; if it does not fit, as far as the compiler says.
        problem: the compiler's words if it does not fit.
        work: of all devices together.
        exchanges: between them; empty where they are not known.
        seconds: that compiling took here.
    """

    program: Program
    memory: Memory | None
    needs: int
    problem: str | None = None
    work: Flops
    exchanges: tuple[Collective, ...] = ()
    seconds: float

    @property
    def exchanges_known(self) -> bool:
        """Whether there was text to read exchanges from: a program that does not fit has none."""
        return self.memory is not None or self.program.mesh.size == 1


def compile_program(program: Program) -> Compiled:
    """Compile for the chips of the program's mesh.

    Raises:
        CompilerError: the compiler failed in another way than for want of memory.
    """
    work, begin = work_in(program.traced.jaxpr, loops=program.loops), time.perf_counter()
    try:
        executable = program.traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise CompilerError(f"the compiler does not take {program.name}: {error}") from error
        seconds, text = time.perf_counter() - begin, str(error)
        return Compiled(program=program, memory=None, needs=needed(text), problem=text, work=work, seconds=seconds)
    seconds = time.perf_counter() - begin
    found, text = executable.memory_analysis(), executable.as_text()
    assert found is not None and text is not None  # XLA's compilers say both
    memory = Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )
    exchanges = tuple(collectives(text, program.mesh, loops=program.loops))
    return Compiled(program=program, memory=memory, needs=memory.total, work=work, exchanges=exchanges, seconds=seconds)


def needed(text: str) -> int:
    """Return the bytes a program takes according to the compiler's refusal; 0 if it does not say.

    >>> needed("RESOURCE_EXHAUSTED: … required for HLO temporaries (768.00G) exceeds available HBM (15.75G).") >> 30
    768
    >>> needed("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm.") / GIB
    21.5
    """
    found = re.search(r"(?:Used|temporaries \(|required [^(]*\()\s*([\d.]+)([KMGT]?)", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
