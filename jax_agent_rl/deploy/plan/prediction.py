"""The predicted time of a compiled program, and its work.

The time is predicted instruction by instruction, as the schedule overlaps them. The compiler's text
carries its own estimate of each fusion, ``estimated_cycles``. Instructions without an estimate are
priced here: copies and slices by the memory's bandwidth, exchanges by the bandwidth and the hops of
the links, Pallas kernels by the cost that they state and their grid's steps.

::

    computing   fusion  kernel ───────────  (wait)  fusion ─►    instructions in their order
    memory        └──────── copy ─────────────┘                  copy-start … copy-done, kernels
    links              └── collective-permute ─┘                 …-start … …-done

XLA's CUDA compiler gives no cycles: there every kernel takes as long as the slower of its products
and its bytes (``deploy.plan.roofline``), at the shares of a GPU's stated peaks that large kernels
reach.

What runs between the start and the end of an asynchronous instruction hides it; what is left is a
wait, which counts for the code that needed it. Memory serves one copy at a time, and what computing
instructions read delays them.

Work, in contrast, is counted in what JAX traces: products and the bytes they read. A compiler's own
cost analysis counts a loop's body once, and for one device. Here a loop counts every iteration,
recomputation counts (it is in the trace), and all devices count together. Platform-dependent code
counts with the branch of the devices that are planned for; a kernel states its own cost.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from jax.core import ShapedArray
from jax.extend import core
from jax.sharding import Mesh

from jax_agent_rl.deploy.plan.hlo import (
    RING,
    Hlo,
    Instruction,
    arrays,
    is_exchange,
    read_collective,
)
from jax_agent_rl.deploy.plan.roofline import KERNEL_LAUNCH, PRODUCTS, Work, instruction_work
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.models.sharding import Platform

SUSTAINED = 0.9
"""Share of a memory's bandwidth that copies reach: libtpu's own ``optimal_seconds`` has it for
v5e."""
GRID_STEP = 0.35e-6
"""Seconds of a step of a Pallas kernel's grid beyond its work: pointers, semaphores, starts of
copies."""
HOP = 1e-6
"""Seconds that an exchange takes from chip to chip, however small it is."""
LAUNCH = 1e-6
"""Seconds of an instruction without an estimate, as libtpu gives 1,800 cycles to the smallest
fusions."""

_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id"
    " add-dependency opt-barrier".split()
)
_SLICES = frozenset(
    ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
)
_MAX_USERS = 6  # on the way from a copy to the code that needs it: concatenations, bitcasts

KernelCost = tuple[int, int, int]
"""Operations, transcendentals and bytes that a Pallas kernel states."""
Grids = Mapping[KernelCost, int]
"""Steps of kernels' grids, by the costs they state: compiled text has these, but no grid."""
NamedCosts = Mapping[tuple[str, float], KernelCost]
"""Costs that kernels state, by their names and the bytes of their results: compiled text of GPUs
has these, but no cost."""


class Part(NamedTuple):
    """An instruction of a program, or all of one kind from one place of the code.

    Attributes:
        what: fusion, kernel, exchange, or what was waited for.
        source: lines of code, innermost first; empty for what the compiler added.
        operation: JAX's name of the operation.
        seconds: predicted time of all runs together.
        runs: how often it ran.
    """

    what: str
    source: tuple[str, ...]
    operation: str
    seconds: float
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one call, and what it is made of, longest first."""

    seconds: float
    parts: tuple[Part, ...]


def predict(
    program: Hlo,
    chip: Chip,
    mesh: Mesh,
    *,
    loops: int = 1,
    grids: Grids | None = None,
    costs: NamedCosts | None = None,
    rare_branches: bool = True,
) -> Prediction:
    """Predict the time of a program.

    Args:
        chip: the chip that the program is compiled for.
        mesh: the program's devices.
        loops: iterations of a loop whose end is found while it runs.
        grids: see :func:`kernel_grids`.
        costs: see :func:`kernel_costs`.
        rare_branches: of several branches, count the longest; otherwise the shortest.
    """
    timeline = _Timeline(program, chip, mesh, loops, grids or {}, costs or {}, rare_branches)
    run = timeline.run(program.entry)
    return Prediction(seconds=run.seconds, parts=tuple(_summed(run.parts)))


class _Run(NamedTuple):
    """One run of a computation: its seconds, and its instructions with a share in them."""

    seconds: float
    parts: list[Part]


class _Priced(NamedTuple):
    """An instruction's time.

    Attributes:
        memory_seconds: time in which its reads and writes occupy the memory.
        what: see :class:`Part`.
    """

    seconds: float
    memory_seconds: float
    what: str


@dataclass
class _Timeline:
    """Runs the computations of a program in predicted time, each of them once."""

    program: Hlo
    chip: Chip
    mesh: Mesh
    loops: int
    grids: Grids
    costs: NamedCosts
    rare_branches: bool
    runs: dict[str, _Run] = field(default_factory=dict)

    def run(self, name: str) -> _Run:
        """Return one run of a computation."""
        if name not in self.runs:
            self.runs[name] = self._run(name)
        return self.runs[name]

    def _run(self, name: str) -> _Run:
        now = 0.0
        memory_free = 0.0
        links_free = 0.0
        copy_ends: dict[str, float] = {}  # of asynchronous instructions
        exchange_ends: dict[str, float] = {}
        parts: list[Part] = []
        computation = self.program.computations[name]
        types = {instruction.name: instruction.result for instruction in computation}
        users = _users(computation)

        for instruction in computation:
            kind = instruction.kind
            if kind in _FREE:
                continue

            if kind == "while":
                body = self.run(instruction.called("body")[0])
                iterations = self.program.iterations(instruction, self.loops)
                now += iterations * body.seconds
                for part in body.parts:
                    parts.append(
                        part._replace(
                            runs=part.runs * iterations, seconds=part.seconds * iterations
                        )
                    )

            elif kind in ("conditional", "call"):
                branch = self._branch(instruction)
                now += branch.seconds
                parts += branch.parts

            elif kind in _SLICES:
                if "cross_program_prefetch_index" in instruction.remainder:
                    continue  # it runs beside the end of the previous program
                memory_free = max(memory_free, now) + self._copy_seconds(instruction)
                copy_ends[instruction.name] = memory_free

            elif kind.endswith("-start"):
                seconds = sum(self._wrapped_exchange_seconds(instruction))
                links_free = max(links_free, now) + seconds
                exchange_ends[instruction.name] = links_free

            elif kind.endswith("-done"):
                end = now
                for operand in instruction.operands:
                    end = max(end, copy_ends.pop(operand, now), exchange_ends.pop(operand, now))
                if end > now:
                    source, operation = self._place(instruction, users)
                    awaited = kind.removesuffix("-done")
                    parts.append(Part(f"wait for {awaited}", source, operation, end - now))
                    now = end

            else:
                priced = self._price(instruction, types)
                # While it reads, copies under way have to wait.
                delay = min(priced.memory_seconds, priced.seconds)
                memory_free = max(memory_free, now) + delay
                for copy, end in copy_ends.items():
                    if end > now:
                        copy_ends[copy] = end + delay
                now += priced.seconds
                if priced.seconds:
                    source, operation = self._place(instruction, users)
                    parts.append(Part(priced.what, source, operation, priced.seconds))
        return _Run(now, parts)

    def _branch(self, instruction: Instruction) -> _Run:
        """Return the run of a call, or of one of a conditional's branches."""
        names = instruction.wrapped
        if instruction.kind == "conditional":
            names = instruction.branches
        runs = [self.run(name) for name in names]
        if self.rare_branches:
            return max(runs, key=lambda run: run.seconds)
        return min(runs, key=lambda run: run.seconds)

    def _price(self, instruction: Instruction, types: Mapping[str, str]) -> _Priced:
        """Return the time of an instruction that is neither asynchronous nor calls computations.

        Args:
            types: types of the computation's instructions, by name.
        """
        kind = instruction.kind
        operands = [types[name] for name in instruction.operands if name in types]
        size = 0.0
        for array_type in (instruction.result, *operands):
            size += sum(array.bytes for array in arrays(array_type) if array.in_hbm)
        memory_seconds = self._memory_seconds(size)
        cycles = instruction.number("estimated_cycles")

        if is_exchange(instruction):
            return _Priced(self._exchange_seconds(instruction.name, instruction), 0.0, kind)
        if self.chip.gpu is not None:
            return self._price_by_roofline(instruction, types)
        if kind == "custom-call":
            if 'custom_call_target="tpu_custom_call"' in instruction.remainder:
                return self._price_kernel(instruction, memory_seconds)
            if cycles is None:  # a name for memory, as ConcatBitcast, AllocateBuffer
                return _Priced(0.0, 0.0, kind)

        if cycles is not None:
            seconds = cycles / self.chip.clock
            if kind == "copy":
                seconds = max(seconds, memory_seconds)
        else:
            seconds = self._unestimated_seconds(instruction, operands, types)

        exchanges = self._wrapped_exchange_seconds(instruction)
        if exchanges:
            return _Priced(max(seconds, *exchanges), memory_seconds, f"{kind} with exchange")
        return _Priced(seconds, memory_seconds, kind)

    def _price_by_roofline(self, instruction: Instruction, types: Mapping[str, str]) -> _Priced:
        """Return the time of a GPU's kernel: of its products or its bytes, whichever is longer.

        Args:
            types: types of the computation's instructions, by name.
        """
        work = instruction_work(self.program, instruction, types)
        name = re.search(r'(\w+)/pallas_call"', instruction.remainder)
        if name is not None and instruction.kind == "custom-call":
            result_bytes = sum(array.bytes for array in arrays(instruction.result))
            flops, _, size = self.costs.get((name[1], result_bytes), (0, 0, round(work.bytes)))
            work = Work(flops, size)
        memory_seconds = self._memory_seconds(work.bytes)
        product_seconds = work.flops / (self.chip.flops * PRODUCTS)
        seconds = KERNEL_LAUNCH + max(product_seconds, memory_seconds)
        return _Priced(seconds, memory_seconds, instruction.kind)

    def _unestimated_seconds(
        self, instruction: Instruction, operands: list[str], types: Mapping[str, str]
    ) -> float:
        """Return the seconds of an instruction that the compiler gives no cycles for.

        Args:
            operands: types of its operands.
            types: types of the computation's instructions, by name.
        """
        if all(array.bytes <= 4 for array in arrays(instruction.result)):
            return 0.0  # scalars, beside everything else
        updates = self._update_bytes(instruction, types)
        if updates:  # each is read, and where it goes is read and written
            return LAUNCH + self._memory_seconds(3 * updates)

        # Gathers and updates in place touch as much as they result in, or as they are given.
        sizes = []
        for array_type in (instruction.result, *operands[1:2]):
            sizes.append(sum(array.bytes for array in arrays(array_type)))
        return LAUNCH + self._memory_seconds(2 * min(sizes))

    def _price_kernel(self, instruction: Instruction, memory_seconds: float) -> _Priced:
        """Return the time of a Pallas kernel, by the cost that it states if it does."""
        flops = instruction.number("flops")
        transcendentals = instruction.number("transcendentals")
        size = instruction.number("bytes_accessed")
        if flops is None or transcendentals is None or size is None:
            return _Priced(LAUNCH + memory_seconds, memory_seconds, "kernel")

        steps = self.grids.get((flops, transcendentals, size), 1)
        memory_seconds = self._memory_seconds(size)
        seconds = LAUNCH + max(flops / self.chip.flops, memory_seconds, steps * GRID_STEP)
        return _Priced(seconds, memory_seconds, "kernel")

    def _update_bytes(self, instruction: Instruction, types: Mapping[str, str]) -> float:
        """Return the bytes of a scatter's updates, or of all scatters in a fusion."""
        size = 0.0
        if instruction.kind == "scatter":  # n arrays, indices, n updates
            operands = instruction.operands
            for name in operands[len(operands) // 2 + 1 :]:
                size += sum(array.bytes for array in arrays(types[name]))
            return size

        for name in instruction.wrapped:
            computation = self.program.computations.get(name, ())
            inner_types = {inner.name: inner.result for inner in computation}
            for inner in computation:
                size += self._update_bytes(inner, inner_types)
        return size

    def _memory_seconds(self, size: float) -> float:
        return size / (self.chip.hbm_bandwidth * SUSTAINED)

    def _copy_seconds(self, instruction: Instruction) -> float:
        """Return the seconds of an asynchronous copy.

        The first or the second array of its result is the destination.
        """
        sizes = [array.bytes for array in arrays(instruction.result)]
        return self._memory_seconds(min(sizes[:2], default=0.0))

    def _wrapped_exchange_seconds(self, instruction: Instruction) -> list[float]:
        """Return the seconds of the exchanges that an instruction is or wraps."""
        seconds = []
        for computation, exchange in self._exchanges(instruction):
            seconds.append(self._exchange_seconds(computation, exchange))
        return seconds

    def _exchanges(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yield an instruction if it exchanges, and the exchanges in computations that it wraps.

        Each comes with the name of the wrapped computation.
        """
        if is_exchange(instruction):
            yield instruction.name, instruction
        for name in instruction.wrapped:
            for inner in self.program.computations.get(name, ()):
                for _, exchange in self._exchanges(inner):
                    yield name, exchange

    def _exchange_seconds(self, computation: str, instruction: Instruction) -> float:
        """Return the seconds of an exchange.

        It goes around a ring in both directions, or through the data centre.
        """
        collective = read_collective(computation, instruction, self.mesh)
        if collective.between_slices:
            return collective.bytes / self.chip.dcn_bandwidth

        hops = max(1, collective.members // 2)
        if collective.kind == "all-reduce":  # reduce-scatter, then all-gather
            hops *= 2
        directions = RING
        if collective.kind == "collective-permute":
            directions = 1
        return hops * HOP + collective.bytes / (directions * self.chip.link_bandwidth)

    def _place(
        self, instruction: Instruction, users: Mapping[str, list[Instruction]]
    ) -> tuple[tuple[str, ...], str]:
        """Return sources and operation of an instruction, or of the next that uses its result."""
        nearest = [instruction]
        for _ in range(_MAX_USERS):
            for candidate in nearest:
                sources = self.program.sources(candidate)
                if sources:
                    match = re.search(r'\bop_name="([^"]*)"', candidate.remainder)
                    path = match[1] if match else ""
                    return sources, path.rpartition("/")[2]
            next_users = []
            for candidate in nearest:
                next_users += users[candidate.name]
            nearest = next_users
        return (), ""


def _users(computation: Iterable[Instruction]) -> Mapping[str, list[Instruction]]:
    """Return the instructions that use the result of an instruction, by its name."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in computation:
        for operand in instruction.operands:
            users[operand].append(instruction)
    return users


def _summed(parts: Iterable[Part]) -> list[Part]:
    """Sum the parts of the same kind, source and operation, longest first."""
    sums: dict[tuple[str, tuple[str, ...], str], Part] = {}
    for part in parts:
        key = (part.what, part.source, part.operation)
        if key in sums:
            summed = sums[key]
            part = part._replace(
                seconds=summed.seconds + part.seconds, runs=summed.runs + part.runs
            )
        sums[key] = part
    return sorted(sums.values(), key=lambda part: -part.seconds)


def kernel_grids(traced: core.ClosedJaxpr) -> Grids:
    """Return the steps of the grids of a traced call's Pallas kernels, by their stated costs."""
    grids: dict[KernelCost, int] = {}
    for equation in _kernels(traced):
        sizes = [size for size in equation.params["grid_mapping"].grid if isinstance(size, int)]
        grids[_stated_cost(equation)] = math.prod(sizes)
    return grids


def kernel_costs(traced: core.ClosedJaxpr) -> NamedCosts:
    """Return what the Pallas kernels of a traced call state."""
    costs: dict[tuple[str, float], KernelCost] = {}
    for equation in _kernels(traced):
        results = [cast(ShapedArray, variable.aval) for variable in equation.outvars]
        result_bytes = float(sum(array.size * array.dtype.itemsize for array in results))
        costs[equation.params["name"], result_bytes] = _stated_cost(equation)
    return costs


def _kernels(traced: core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yield the Pallas kernels of a traced call that state their costs."""
    waiting = [traced.jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            params = equation.params
            if equation.primitive.name == "pallas_call" and params["cost_estimate"] is not None:
                yield equation
                continue
            for value in params.values():
                waiting += _inner_programs(value)


def _stated_cost(kernel: core.JaxprEqn) -> KernelCost:
    cost = kernel.params["cost_estimate"]
    return int(cost.flops), int(cost.transcendentals), int(cost.bytes_accessed)


def _inner_programs(value: object) -> list[core.Jaxpr]:
    """Return the programs in a parameter of an equation."""
    values = value if isinstance(value, tuple | list) else (value,)
    programs = []
    for item in values:
        if isinstance(item, core.ClosedJaxpr):
            programs.append(item.jaxpr)
        elif isinstance(item, core.Jaxpr):
            programs.append(item)
    return programs


# --- work -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Work of all devices together.

    Attributes:
        flops: operations of matrix products and convolutions; a multiplication and an addition are
            two.
        bytes: operands and results of these operations, each read or written once: the traffic if
            nothing stayed in a cache and everything else were fused into them.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def __mul__(self, times: float) -> Flops:
        return Flops(flops=self.flops * times, bytes=self.bytes * times)


def count_work(jaxpr: core.Jaxpr, *, loops: int = 1, platform: Platform = "tpu") -> Flops:
    """Count the work of a traced call (see ``jax.make_jaxpr``); nothing is computed.

    A loop whose end is found while it runs (``while``) counts ``loops`` times.

    Args:
        platform: its branch of platform-dependent code counts.
    """
    work = Flops()
    for equation in jaxpr.eqns:
        work += _count_equation(equation, loops, platform)
    return work


def _count_equation(equation: core.JaxprEqn, loops: int, platform: Platform) -> Flops:
    name = equation.primitive.name
    params = equation.params
    count = functools.partial(count_work, loops=loops, platform=platform)
    if name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _count_product(equation)
    if name == "scan":
        return count(params["jaxpr"].jaxpr) * params["length"]
    if name == "while":
        return count(params["body_jaxpr"].jaxpr) * loops
    if name == "pallas_call" and params["cost_estimate"] is not None:
        flops, _, size = _stated_cost(equation)
        return Flops(flops=float(flops), bytes=float(size))
    if name == "cond":
        for index, platforms in enumerate(params.get("branches_platforms") or ()):
            if platforms is None or platform in platforms:
                return count(params["branches"][index].jaxpr)
        branches = [count(branch.jaxpr) for branch in params["branches"]]
        return max(branches, key=lambda work: work.flops)

    # Calls, custom derivatives and rematerialized parts have their programs among their parameters.
    work = Flops()
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            value = value.jaxpr
        if isinstance(value, core.Jaxpr):
            work += count(value)
    if name == "shard_map":  # its program is the part of one device
        work *= math.prod(params["mesh"].shape.values())
    return work


def _count_product(equation: core.JaxprEqn) -> Flops:
    """Count a product: two operations per number of the result and number contracted for it."""
    variables = (*equation.invars, *equation.outvars)
    arrays = [cast(ShapedArray, variable.aval) for variable in variables]
    lhs = arrays[0]
    rhs = arrays[1]
    result = arrays[-1]
    match equation.primitive.name:
        case "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            contracted = math.prod(lhs.shape[axis] for axis in axes)
        case "conv_general_dilated":
            output_axis = equation.params["dimension_numbers"].rhs_spec[0]
            contracted = rhs.size / rhs.shape[output_axis]
        case _:  # ragged: each row meets one expert
            contracted = lhs.shape[-1]
    size = sum(array.size * array.dtype.itemsize for array in arrays)
    return Flops(flops=2.0 * result.size * contracted, bytes=float(size))
