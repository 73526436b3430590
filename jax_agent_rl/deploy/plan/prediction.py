"""The predicted time of a compiled program, instruction by instruction as its schedule overlaps them, and its work.

The compiler's text carries its own estimate of each fusion, ``estimated_cycles``. What it has no
estimate for is priced
here: copies and slices by the memory's bandwidth, exchanges by that of the links and their hops,
Pallas kernels by the cost that they state and their grid's steps.

::

    computing   fusion  kernel ───────────  (wait)  fusion ─►    instructions in their order
    memory        └──────── copy ─────────────┘                  copy-start … copy-done; kernels read there, too
    links              └── collective-permute ─┘                 …-start … …-done

What runs between the start and the end of an asynchronous instruction hides it; what is left is a
wait, which counts for the code that needed it. Memory serves one copy at a time, and what computing
instructions read delays them.

Work, in contrast, is counted in what JAX traces: products and the bytes they read. A compiler's own
cost analysis counts a loop's body once, and for one device. Here a loop counts every iteration,
recomputation counts (it is in the trace), and all devices count together. Platform-dependent code
counts with the TPU's branch; a kernel states its own cost.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from jax_agent_rl.deploy.plan.topology import Chip

SUSTAINED = 0.9
"""Share of a memory's bandwidth that copies reach; libtpu's own ``optimal_seconds`` has it for v5e.
"""
GRID_STEP = 0.35e-6
"""Seconds of a step of a Pallas kernel's grid beyond its work: pointers, semaphores, starts of
copies."""
HOP = 1e-6
"""Seconds that an exchange takes from chip to chip, however small it is."""
LAUNCH = 1e-6
"""Seconds of an instruction without an estimate: libtpu gives 1,800 cycles to the smallest fusions.
"""

_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id"
    " add-dependency opt-barrier".split()
)
_SLICES = frozenset(
    ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
)
_NEARBY = 6  # users on the way from a copy to the code that needs it: concatenations, bitcasts

KernelCost = tuple[int, int, int]
"""Operations, transcendentals and bytes that a Pallas kernel states."""
Grids = Mapping[KernelCost, int]
"""Steps of kernels' grids, by the costs they state: compiled text has these, but no grid."""


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
    rare_branches: bool = True,
) -> Prediction:
    """Predict the time of a program.

    Args:
        program: the compiled program.
        chip: the chip that it is compiled for.
        mesh: its devices.
        loops: iterations of a loop whose end is found while it runs.
        grids: see :func:`kernel_grids`.
        rare_branches: of several branches, count the longest; otherwise the shortest.
    """
    timeline = _Timeline(program, chip, mesh, loops, grids or {}, max if rare_branches else min)
    seconds, parts = timeline.run(program.entry)
    return Prediction(seconds=seconds, parts=tuple(_summed(parts)))


@dataclass
class _Timeline:
    program: Hlo
    chip: Chip
    mesh: Mesh
    loops: int
    grids: Grids
    choose: Callable[..., tuple[float, list[Part]]]
    known: dict[str, tuple[float, list[Part]]] = field(default_factory=dict)

    def run(self, name: str) -> tuple[float, list[Part]]:
        """Return the seconds of one run of a computation, and its instructions with a share in them."""
        if name not in self.known:
            self.known[name] = self._run(name)
        return self.known[name]

    def _run(self, name: str) -> tuple[float, list[Part]]:
        now = memory_free = links_free = 0.0
        copying: dict[str, float] = {}  # when asynchronous instructions end
        exchanging: dict[str, float] = {}
        timed: list[Part] = []
        computation = self.program.computations[name]
        types = {each.name: each.result for each in computation}
        users = _users(computation)
        for each in computation:
            kind = each.kind
            if kind in _FREE:
                continue
            if kind == "while":
                runs = self.program.iterations(each, self.loops)
                seconds, inner = self.run(each.called("body")[0])
                now += runs * seconds
                timed += [
                    one._replace(runs=one.runs * runs, seconds=one.seconds * runs) for one in inner
                ]
            elif kind in ("conditional", "call"):
                called = each.branches if kind == "conditional" else each.wrapped
                seconds, inner = self.choose(
                    (self.run(branch) for branch in called), key=lambda found: found[0]
                )
                now += seconds
                timed += inner
            elif kind in _SLICES:
                if (
                    "cross_program_prefetch_index" in each.rest
                ):  # done beside the end of the program before
                    continue
                memory_free = max(memory_free, now) + self._copied(each)
                copying[each.name] = memory_free
            elif kind.endswith("-start"):
                links_free = max(links_free, now) + sum(map(self._exchanged, self._exchanges(each)))
                exchanging[each.name] = links_free
            elif kind.endswith("-done"):
                end = max(
                    (x.pop(name, now) for name in each.operands for x in (copying, exchanging)),
                    default=now,
                )
                if end > now:
                    timed.append(
                        Part(
                            f"wait for {kind.removesuffix('-done')}",
                            *self._place(each, users),
                            end - now,
                        )
                    )
                    now = end
            else:
                seconds, read_here, what = self._computed(each, types)
                delay = min(read_here, seconds)
                memory_free = max(memory_free, now) + delay
                copying |= {name: end + delay for name, end in copying.items() if end > now}
                now += seconds
                if seconds:
                    timed.append(Part(what, *self._place(each, users), seconds))
        return now, timed

    def _computed(self, each: Instruction, types: Mapping[str, str]) -> tuple[float, float, str]:
        """Return the seconds of an instruction, those of its reads and writes in memory, and what it is."""
        operands = [types[name] for name in each.operands if name in types]
        in_memory = self._memory(
            sum(x.bytes for t in (each.result, *operands) for x in arrays(t) if x.in_hbm)
        )
        cycles = each.number("estimated_cycles")
        if is_exchange(each):
            return self._exchanged((each.name, each)), 0.0, each.kind
        if each.kind == "custom-call" and 'custom_call_target="tpu_custom_call"' in each.rest:
            seconds, read_here = self._kernel(each, in_memory)
            return seconds, read_here, "kernel"
        if each.kind == "custom-call" and cycles is None:
            return 0.0, 0.0, each.kind  # a name for memory, as ConcatBitcast, AllocateBuffer
        hidden = [self._exchanged(found) for found in self._exchanges(each)]
        if cycles is not None:
            seconds = cycles / self.chip.clock
            if each.kind == "copy":
                seconds = max(seconds, in_memory)
        elif all(x.bytes <= 4 for x in arrays(each.result)):
            seconds = 0.0  # scalars, beside everything else
        elif updates := self._scattered(
            each, types
        ):  # each is read, and where it goes is read and written
            seconds = LAUNCH + self._memory(3 * updates)
        else:  # gathers and updates in place touch as much as they result in, or as they are given
            touched = min(
                (sum(x.bytes for x in arrays(t)) for t in (each.result, *operands[1:2])),
                default=0.0,
            )
            seconds = LAUNCH + self._memory(2 * touched)
        return (
            max([seconds, *hidden]),
            in_memory,
            f"{each.kind}{' with exchange' if hidden else ''}",
        )

    def _kernel(self, each: Instruction, in_memory: float) -> tuple[float, float]:
        stated = [each.number(key) for key in ("flops", "transcendentals", "bytes_accessed")]
        if None in stated:
            return LAUNCH + in_memory, in_memory
        flops, transcendentals, size = (value or 0 for value in stated)
        steps = self.grids.get((flops, transcendentals, size), 1)
        read_here = self._memory(size)
        return LAUNCH + max(flops / self.chip.flops, read_here, steps * GRID_STEP), read_here

    def _scattered(self, each: Instruction, types: Mapping[str, str]) -> float:
        """Return the bytes of the updates of a scatter, or of those in a fusion."""
        if each.kind == "scatter":  # n arrays, indices, n updates
            names = each.operands[len(each.operands) // 2 + 1 :]
            return sum(x.bytes for name in names for x in arrays(types[name]))
        found = 0.0
        for name in each.wrapped:
            inside = self.program.computations.get(name, ())
            inner = {one.name: one.result for one in inside}
            found += sum(self._scattered(one, inner) for one in inside)
        return found

    def _memory(self, size: float) -> float:
        return size / (self.chip.hbm_bandwidth * SUSTAINED)

    def _copied(self, each: Instruction) -> float:
        """Return the seconds of an asynchronous copy; its result's second array is the destination, or the first."""
        sizes = [x.bytes for x in arrays(each.result)]
        return self._memory(min(sizes[:2], default=0.0))

    def _exchanges(self, each: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yield an instruction if it exchanges, or the exchanges in the computations that it wraps."""
        if is_exchange(each):
            yield each.name, each
        for name in each.wrapped:
            for inner in self.program.computations.get(name, ()):
                yield from ((name, found) for _, found in self._exchanges(inner))

    def _exchanged(self, found: tuple[str, Instruction]) -> float:
        """Return the seconds of an exchange: around a ring in both directions, or through the data centre."""
        one = read_collective(*found, self.mesh)
        if one.between_slices:
            return one.bytes / self.chip.dcn_bandwidth
        hops = max(1, one.members // 2) * (2 if one.kind == "all-reduce" else 1)
        directions = 1 if one.kind == "collective-permute" else RING
        return hops * HOP + one.bytes / (directions * self.chip.link_bandwidth)

    def _place(
        self, each: Instruction, users: Mapping[str, list[Instruction]]
    ) -> tuple[tuple[str, ...], str]:
        """Return sources and operation of an instruction, or of the next that uses its result."""
        waiting = [each]
        for _ in range(_NEARBY):
            for one in waiting:
                if sources := self.program.sources(one):
                    found = re.search(r'\bop_name="([^"]*)"', one.rest)
                    return sources, found[1].rpartition("/")[2] if found else ""
            waiting = [user for one in waiting for user in users[one.name]]
        return (), ""


def _users(computation: Iterable[Instruction]) -> Mapping[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in computation:
        for operand in each.operands:
            users[operand].append(each)
    return users


def _summed(timed: Iterable[Part]) -> list[Part]:
    """Sum what has the same kind, source and operation, longest first."""
    sums: dict[tuple[str, tuple[str, ...], str], Part] = {}
    for one in timed:
        before = sums.get(one[:3])
        sums[one[:3]] = (
            one
            if before is None
            else one._replace(seconds=before.seconds + one.seconds, runs=before.runs + one.runs)
        )
    return sorted(sums.values(), key=lambda part: -part.seconds)


def kernel_grids(traced: core.ClosedJaxpr) -> Grids:
    """Return the steps of the grids of a traced call's Pallas kernels, by the costs that they state."""
    found: dict[KernelCost, int] = {}
    waiting = [traced.jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            params = equation.params
            if (
                equation.primitive.name == "pallas_call"
                and (stated := params["cost_estimate"]) is not None
            ):
                steps = math.prod(
                    size for size in params["grid_mapping"].grid if isinstance(size, int)
                )
                found[
                    int(stated.flops), int(stated.transcendentals), int(stated.bytes_accessed)
                ] = steps
                continue
            for value in params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                        waiting.append(
                            inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                        )
    return found


# --- work -----------------------------------------------------------------------------------------

PLATFORM = "tpu"


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Work of all devices together.

    Attributes:
        flops: operations of matrix products and convolutions; a multiplication and an addition are
            two.
        bytes: their operands and results, each read or written once: the traffic if nothing stayed
            in a cache and everything else were fused into them.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def __mul__(self, times: float) -> Flops:
        return Flops(flops=self.flops * times, bytes=self.bytes * times)


def count_work(jaxpr: core.Jaxpr, *, loops: int = 1) -> Flops:
    """Count the work of a traced call (see ``jax.make_jaxpr``); nothing is computed.

    A loop whose end is found while it runs (``while``) counts ``loops`` times.
    """
    return sum((_count_equation(equation, loops) for equation in jaxpr.eqns), Flops())


def _count_equation(equation: core.JaxprEqn, loops: int) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _count_product(equation)
    if name == "scan":
        return count_work(params["jaxpr"].jaxpr, loops=loops) * params["length"]
    if name == "while":
        return count_work(params["body_jaxpr"].jaxpr, loops=loops) * loops
    if name == "pallas_call" and (stated := params["cost_estimate"]) is not None:
        return Flops(flops=float(stated.flops), bytes=float(stated.bytes_accessed))
    if name == "cond" and (platforms := params.get("branches_platforms")):
        taken = next(at for at, names in enumerate(platforms) if names is None or PLATFORM in names)
        return count_work(params["branches"][taken].jaxpr, loops=loops)
    if name == "cond":
        return max(
            (count_work(branch.jaxpr, loops=loops) for branch in params["branches"]),
            key=lambda work: work.flops,
        )
    # Calls, custom derivatives and rematerialized parts have their programs among their parameters.
    inner = (
        value.jaxpr if isinstance(value, core.ClosedJaxpr) else value for value in params.values()
    )
    times = math.prod(params["mesh"].shape.values()) if name == "shard_map" else 1
    return (
        sum(
            (count_work(value, loops=loops) for value in inner if isinstance(value, core.Jaxpr)),
            Flops(),
        )
        * times
    )


def _count_product(equation: core.JaxprEqn) -> Flops:
    """Count a product: two operations per number of the result and number contracted for it."""
    arrays = [
        cast(ShapedArray, variable.aval) for variable in (*equation.invars, *equation.outvars)
    ]
    left, right, result = arrays[0], arrays[1], arrays[-1]
    match equation.primitive.name:
        case "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            contracted = math.prod(left.shape[axis] for axis in axes)
        case "conv_general_dilated":
            contracted = right.size / right.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        case _:  # ragged: each row meets one expert
            contracted = left.shape[-1]
    return Flops(
        flops=2.0 * result.size * contracted,
        bytes=float(sum(x.size * x.dtype.itemsize for x in arrays)),
    )
