"""The predicted time of a compiled program, instruction by instruction, as its schedule overlaps them.

The compiler's text carries its own estimate of each fusion, ``estimated_cycles``. What it has no estimate for is priced
here: copies and slices by the memory's bandwidth, exchanges by that of the links and their hops, Pallas kernels by the
cost that they state and their grid's steps.

::

    computing   fusion  kernel ───────────  (wait)  fusion ─►    instructions in their order
    memory        └──────── copy ─────────────┘                  copy-start … copy-done; kernels read there, too
    links              └── collective-permute ─┘                 …-start … …-done

What runs between the start and the end of an asynchronous instruction hides it; what is left is a wait, which counts
for the code that needed it. Memory serves one copy at a time, and what computing instructions read delays them.

:class:`EngineWork` is the ideal that the predicted time is compared with: what the model itself needs of a call,
without recomputation, weights and visible keys and values read once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Mesh

from jax_agent_rl.deploy.plan.hlo import RING, Hlo, Instruction, arrays, is_exchange, read
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.models.config import DecoderConfig

SUSTAINED = 0.9
"""Share of a memory's bandwidth that copies reach; libtpu's own ``optimal_seconds`` has it for v5e."""
GRID_STEP = 0.35e-6
"""Seconds of a step of a Pallas kernel's grid beyond its work: pointers, semaphores, starts of copies."""
HOP = 1e-6
"""Seconds that an exchange takes from chip to chip, however small it is."""
LAUNCH = 1e-6
"""Seconds of an instruction without an estimate: libtpu gives 1,800 cycles to the smallest fusions."""

_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id add-dependency "
    "opt-barrier".split()
)
_SLICES = frozenset(("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"))
_NEARBY = 6  # users on the way from a copy to the code that needs it: concatenations, bitcasts

KernelCost = tuple[int, int, int]
"""Operations, transcendentals and bytes that a Pallas kernel states."""
Grids = Mapping[KernelCost, int]
"""Steps of kernels' grids, by the costs they state: compiled text has these, but no grid."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Instructions of one kind from one place of the code.

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
    runs: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one call, and what it is made of, longest first."""

    seconds: float
    parts: tuple[Part, ...]


def predict(
    program: Hlo, chip: Chip, mesh: Mesh, *, loops: int = 1, grids: Grids | None = None, rare_branches: bool = True
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


class _Timed(NamedTuple):
    """One instruction, how often it ran, and the seconds of all runs."""

    instruction: Instruction
    what: str
    runs: int
    seconds: float
    sources: tuple[str, ...]
    operation: str


@dataclass
class _Timeline:
    program: Hlo
    chip: Chip
    mesh: Mesh
    loops: int
    grids: Grids
    choose: Callable[..., tuple[float, list[_Timed]]]
    known: dict[str, tuple[float, list[_Timed]]] = field(default_factory=dict)

    def run(self, name: str) -> tuple[float, list[_Timed]]:
        """Return the seconds of one run of a computation, and its instructions with a share in them."""
        if name not in self.known:
            self.known[name] = self._run(name)
        return self.known[name]

    def _run(self, name: str) -> tuple[float, list[_Timed]]:
        now = memory_free = links_free = 0.0
        copying: dict[str, float] = {}  # when asynchronous instructions end
        exchanging: dict[str, float] = {}
        timed: list[_Timed] = []
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
                timed += [one._replace(runs=one.runs * runs, seconds=one.seconds * runs) for one in inner]
            elif kind in ("conditional", "call"):
                called = each.branches if kind == "conditional" else each.called("to_apply")
                seconds, inner = self.choose((self.run(branch) for branch in called), key=lambda found: found[0])
                now += seconds
                timed += inner
            elif kind in _SLICES:
                if "cross_program_prefetch_index" in each.rest:  # done beside the end of the program before
                    continue
                memory_free = max(memory_free, now) + self._copied(each)
                copying[each.name] = memory_free
            elif kind.endswith("-start"):
                links_free = max(links_free, now) + sum(map(self._exchanged, self._exchanges(each)))
                exchanging[each.name] = links_free
            elif kind.endswith("-done"):
                end = max((x.pop(name, now) for name in each.operands for x in (copying, exchanging)), default=now)
                if end > now:
                    needed_by = self._place(each, users)
                    timed.append(_Timed(each, f"wait for {kind.removesuffix('-done')}", 1, end - now, *needed_by))
                    now = end
            else:
                seconds, read_here, what = self._computed(each, types)
                delay = min(read_here, seconds)
                memory_free = max(memory_free, now) + delay
                copying |= {name: end + delay for name, end in copying.items() if end > now}
                now += seconds
                if seconds:
                    timed.append(_Timed(each, what, 1, seconds, *self._place(each, users)))
        return now, timed

    def _computed(self, each: Instruction, types: Mapping[str, str]) -> tuple[float, float, str]:
        """Return the seconds of an instruction, those of its reads and writes in memory, and what it is."""
        operands = [types[name] for name in each.operands if name in types]
        in_memory = self._memory(sum(x.bytes for t in (each.result, *operands) for x in arrays(t) if x.in_hbm))
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
        else:  # gathers, scatters and updates in place touch as much as they result in, or as they are given
            touched = min((sum(x.bytes for x in arrays(t)) for t in (each.result, *operands[1:2])), default=0.0)
            seconds = LAUNCH + self._memory(2 * touched)
        return max([seconds, *hidden]), in_memory, f"{each.kind}{' with exchange' if hidden else ''}"

    def _kernel(self, each: Instruction, in_memory: float) -> tuple[float, float]:
        stated = [each.number(key) for key in ("flops", "transcendentals", "bytes_accessed")]
        if None in stated:
            return LAUNCH + in_memory, in_memory
        flops, transcendentals, size = (value or 0 for value in stated)
        steps = self.grids.get((flops, transcendentals, size), 1)
        read_here = self._memory(size)
        return LAUNCH + max(flops / self.chip.flops, read_here, steps * GRID_STEP), read_here

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
        for name in each.called("calls"):
            for inner in self.program.computations.get(name, ()):
                yield from ((name, found) for _, found in self._exchanges(inner))

    def _exchanged(self, found: tuple[str, Instruction]) -> float:
        """Return the seconds of an exchange: around a ring in both directions, or through the data centre."""
        one = read(*found, self.mesh)
        if one.between_slices:
            return one.bytes / self.chip.dcn_bandwidth
        hops = max(1, one.members // 2) * (2 if one.kind == "all-reduce" else 1)
        directions = 1 if one.kind == "collective-permute" else RING
        return hops * HOP + one.bytes / (directions * self.chip.link_bandwidth)

    def _place(self, each: Instruction, users: Mapping[str, list[Instruction]]) -> tuple[tuple[str, ...], str]:
        """Return sources and operation of an instruction, or of the next that uses its result."""
        waiting = [each]
        for _ in range(_NEARBY):
            for one in waiting:
                if sources := self.program.sources(one):
                    return sources, _operation(one)
            waiting = [user for one in waiting for user in users[one.name]]
        return (), ""


def _users(computation: Iterable[Instruction]) -> Mapping[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in computation:
        for operand in each.operands:
            users[operand].append(each)
    return users


def _operation(each: Instruction) -> str:
    found = re.search(r'\bop_name="([^"]*)"', each.rest)
    return found[1].rpartition("/")[2] if found else ""


def _summed(timed: Iterable[_Timed]) -> list[Part]:
    """Sum what has the same kind, source and operation, longest first."""
    sums: dict[tuple[str, tuple[str, ...], str], tuple[float, int]] = {}
    for one in timed:
        key = (one.what, one.sources, one.operation)
        seconds, runs = sums.get(key, (0.0, 0))
        sums[key] = seconds + one.seconds, runs + one.runs
    parts = [
        Part(what=what, source=source, operation=operation, seconds=seconds, runs=runs)
        for (what, source, operation), (seconds, runs) in sums.items()
    ]
    return sorted(parts, key=lambda part: -part.seconds)


def kernel_grids(traced: core.ClosedJaxpr) -> Grids:
    """Return the steps of the grids of a traced call's Pallas kernels, by the costs that they state."""
    found: dict[KernelCost, int] = {}
    waiting = [traced.jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            params = equation.params
            if equation.primitive.name == "pallas_call" and (stated := params["cost_estimate"]) is not None:
                steps = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
                found[int(stated.flops), int(stated.transcendentals), int(stated.bytes_accessed)] = steps
                continue
            for value in params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                        waiting.append(inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner)
    return found


def pass_flops(model: DecoderConfig, tokens: int, *, visible: float, head: bool = True) -> float:
    """Return the operations of a forward pass over one context; a multiplication and an addition are two.

    Args:
        model: the architecture.
        tokens: tokens of the pass.
        visible: positions that a token attends to on average.
        head: logits of every token are computed.
    """
    chosen = 1.0 if model.experts is None else model.experts.per_token / model.experts.count
    matrices = {name: math.prod(shape) for name, shape in model.layer_shapes().items() if len(shape) > 1}
    layer = sum(size * (chosen if name.startswith("expert") else 1) for name, size in matrices.items())
    spans = [
        min(visible, model.sliding_window or visible) if model.is_windowed(i) else visible
        for i in range(model.num_layers)
    ]
    attention = 4 * model.num_heads * model.head_dim * sum(spans)
    return tokens * (2 * (model.num_layers * layer + head * model.vocab_size * model.hidden_size) + attention)


class EngineWork(NamedTuple):
    """What an engine has to compute and read, from its described arrays; all devices together."""

    model: DecoderConfig
    weights: EngineParams
    cache: KVCache

    def of(self, key: tuple) -> tuple[float, float] | None:
        """Return operations and bytes of a program of the engine's table, or of one step; None if it runs no model."""
        if self.model.vision is not None:
            return None
        match key:
            case (str(kind), _, width, span) if kind.startswith("decode"):
                return pass_flops(self.model, width, visible=span), self._weights(width) + self._kv(width, span)
            case ("chunks", _, rows, count, span):
                flops = pass_flops(self.model, rows * count, visible=span + (count + 1) / 2, head=False)
                return flops, self._weights(rows * count, head=False) + self._kv(rows, span)
        return None

    def _weights(self, tokens: int, *, head: bool = True) -> float:
        """Return the bytes of all layers' weights, of the experts that so many tokens choose, and of the head."""
        experts, size = self.model.experts, 0.0
        for layer in self.weights.layers:
            for name, weight in layer.items():
                # Each token misses an expert with probability 1 - k / E.
                missed = (
                    0.0
                    if experts is None or not name.startswith("expert")
                    else (1 - experts.per_token / experts.count) ** tokens
                )
                size += _bytes(weight) * (1 - missed)
        return size + head * _bytes(self.weights.embed if self.weights.head is None else self.weights.head)

    def _kv(self, contexts: int, span: int) -> float:
        """Return the bytes of the visible positions; keys and values that are kept twice count once."""
        size = 0.0
        for number, layer in enumerate(self.cache.layers):
            windowed = self.model.is_windowed(number)
            visible = min(span, self.model.sliding_window or span) if windowed else span
            kept = layer.values.shape[1] / self.model.num_kv_heads
            size += contexts * visible * _bytes(layer) / (layer.values.shape[0] * layer.values.shape[2]) / kept
        return size


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
