"""Programs, compiled: what each takes of a chip's memory, what it computes, and what devices exchange in it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import jax

from jax_agent_rl.deploy.plan.chips import GIB
from jax_agent_rl.deploy.plan.collectives import Collective, collectives
from jax_agent_rl.deploy.plan.flops import Flops, work_in
from jax_agent_rl.deploy.plan.inventory import Program
from jax_agent_rl.errors import CompilerError

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
