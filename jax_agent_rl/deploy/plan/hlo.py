"""The text of a compiled program (``jax.stages.Compiled.as_text``): its computations, their schedule and sources.

The text is a list of computations; one calls another in fusions, loops, branches and asynchronous
steps. Instructions stand in the order in which they run. A loop's body runs as often as its
condition says: ``compare(counter, constant), direction=LT``; where the end is found while it runs,
as often as the caller says.

TPUs spread one exchange between devices over several fusions, which share its ``channel_id``: it
counts once. Between slices the hosts exchange for the programs: the text has a ``send`` to the
runtime of several slices, which names the exchange, as in
``_xla_megascale_transfer_type="ALL_REDUCE"``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(?!token)([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_PACKAGE, _PLANNER = "jax_agent_rl/", "deploy/plan/"


class Array(NamedTuple):
    """One array of a type: its size, and whether it lies in a chip's main memory (HBM) rather than on the chip."""

    bytes: float
    in_hbm: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        kind: its operation: ``fusion``, ``all-reduce-start``, …
        result: its type.
        rest: operands and attributes.
    """

    name: str
    kind: str
    result: str
    rest: str

    def called(self, key: str) -> list[str]:
        """Return the names of the computations that ``key`` refers to."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return re.findall(r"[\w.\-]+", found[1]) if found else []

    @property
    def branches(self) -> list[str]:
        """Names of the computations of which a ``conditional`` runs one."""
        keys = ("branch_computations", "true_computation", "false_computation")
        return [name for key in keys for name in self.called(key)]

    @property
    def wrapped(self) -> list[str]:
        """Names of the computations in a fusion, a call or an asynchronous step (a call of a sparse core is one)."""
        return self.called("to_apply" if self.kind.removesuffix("-start") == "call" else "calls")

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        depth = 1
        for at, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.rest[:at])
        return []

    def number(self, key: str) -> int | None:
        """Return a number of its configuration, as ``"estimated_cycles":"12"``; None if it has none."""
        found = re.search(rf'"{key}":"?(\d+)', self.rest)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Hlo:
    """A parsed program.

    Attributes:
        computations: instructions by name of the computation.
        entry: name of the one that runs first.
        frames: ``file:line`` of the project's code that traced an instruction, by the number of its
            stack frame; innermost first.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    frames: Mapping[int, tuple[str, ...]]

    def sources(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the lines of code that an instruction comes from; none for what the compiler added."""
        found = re.search(r"\bstack_frame_id=(\d+)", instruction.rest)
        return self.frames.get(int(found[1]), ()) if found else ()

    def iterations(self, loop: Instruction, loops: int) -> int:
        """Return how often a loop runs that counts from 0; ``loops`` if its end is found while it runs."""
        condition = self.computations[loop.called("condition")[0]]
        constants = [i for i in condition if i.kind == "constant" and i.result.startswith("s32[]")]
        if (
            condition[-1].kind == "compare"
            and "direction=LT" in condition[-1].rest
            and len(constants) == 1
        ):
            return int(constants[0].rest.partition(")")[0])
        return loops


def parse(text: str) -> Hlo:
    """Parse a program."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and (found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)):
            result, rest = _split_type(line[found.end() :])
            kind, _, rest = rest.lstrip().partition("(")
            computations[name].append(Instruction(found[1], kind, result, rest))
    return Hlo(computations, entry, _frames(text))


def arrays(result: str) -> Iterator[Array]:
    """Yield every array of a type."""
    for name, sizes, layout in _ARRAY.findall(result):
        yield Array(math.prod(numbers(sizes)) * _bits(name) / 8, "S(" not in layout)


def numbers(text: str | None) -> list[int]:
    """Parse ``2,4``; nothing of an empty text."""
    return [int(number) for number in text.split(",") if number] if text else []


@functools.cache
def _bits(name: str) -> int:
    known = next((bits for prefix, bits in _BITS.items() if name.startswith(prefix)), None)
    return known or int(re.sub(r"\D.*", "", name[1:]))


def _split_type(text: str) -> tuple[str, str]:
    """Split a type, which may be a tuple, from what follows it."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return text[:at], text[at:]
    return text, ""


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Return the project's lines of each stack frame, innermost first."""
    files = {key: name for key, name in _table(text, "FileNames", r'"(.*)"')}
    locations = {
        key: (files.get(int(re.findall(r"\d+", fields)[0]), ""), re.search(r"\bline=(\d+)", fields))
        for key, fields in _table(text, "FileLocations", r"\{(.*)\}")
    }
    frames: dict[int, tuple[str, ...]] = {}
    for key, fields in _table(text, "StackFrames", r"\{(.*)\}"):
        location, parent = numbers(",".join(re.findall(r"\d+", fields)))
        outer = frames.get(parent - 1, ())  # numbers of parents are one too high, so that 1 is none
        file, line = locations.get(location, ("", None))
        inside = file.rpartition(_PACKAGE)[2] if _PACKAGE in file else _PLANNER
        own = (f"{inside}:{line[1]}",) if line and not inside.startswith(_PLANNER) else ()
        frames[key] = own + outer
    return frames


def _table(text: str, heading: str, row: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered rows below a heading."""
    begin = re.search(rf"^{heading}$", text, re.MULTILINE)
    for line in text[begin.end() + 1 :].splitlines() if begin else ():
        found = re.match(rf"(\d+) {row}$", line)
        if found is None:
            return
        yield int(found[1]), found[2]


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
RING = 2
"""Directions of a ring of links, used at the same time."""
_BETWEEN_SLICES = "_xla_megascale_transfer_type"
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"

Groups = list[list[int]]
"""Numbers of devices that exchange with each other."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One exchange.

    Attributes:
        kind: one of :data:`KINDS`.
        axes: axes of the mesh; empty if its groups could not be read.
        between_slices: some of its devices are on different slices.
        members: devices that exchange with each other.
        times: how often it runs in one call of the program.
        bytes: bytes that each device sends in all of these, around a ring.
    """

    kind: str
    axes: tuple[str, ...]
    between_slices: bool
    members: int
    times: int
    bytes: float


def collectives(program: Hlo, mesh: Mesh, *, loops: int = 1) -> list[Collective]:
    """Return every exchange of a program.

    Args:
        program: the compiled program.
        mesh: its devices, numbered in this order.
        loops: iterations of a loop whose end is found while it runs.
    """
    if mesh.size == 1:
        return []
    return [
        read_collective(name, instruction, mesh, times)
        for name, instruction, times in _walk(program, loops)
    ]


def is_exchange(instruction: Instruction) -> bool:
    """Return whether an instruction exchanges, or begins to."""
    kind = instruction.kind.removesuffix("-start")
    return kind in KINDS or kind == "send" and _BETWEEN_SLICES in instruction.rest


def _walk(program: Hlo, loops: int) -> Iterator[tuple[str, Instruction, int]]:
    """Yield exchanges with the name of their computation and how often they run."""
    waiting: list[tuple[str, int, set[str]]] = [(program.entry, 1, set())]
    while waiting:
        name, times, seen = waiting.pop()
        for instruction in program.computations[name]:
            if is_exchange(instruction):
                channel = re.search(r"channel_id=\d+", instruction.rest)
                if channel and channel[0] in seen:
                    continue
                if channel:
                    seen.add(channel[0])
                yield name, instruction, times
            elif instruction.kind == "while":
                waiting.append(
                    (
                        instruction.called("body")[0],
                        times * program.iterations(instruction, loops),
                        set(),
                    )
                )
            elif instruction.kind == "conditional":
                waiting += [(called, times, set()) for called in instruction.branches]
            else:
                waiting += [(each, times, seen) for each in instruction.wrapped]


def read_collective(
    computation: str, instruction: Instruction, mesh: Mesh, times: int = 1
) -> Collective:
    """Return an exchange.

    Args:
        computation: name of its computation.
        instruction: for which :func:`is_exchange` holds.
        mesh: the program's devices.
        times: how often it runs.
    """
    sizes = [array.bytes for array in arrays(instruction.result)]
    if stated := re.search(rf'{_BETWEEN_SLICES}="(\w+)"', instruction.rest):
        # What hosts exchange for their chips; the axes are those along which slices differ.
        slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(mesh.devices)
        axes = tuple(
            name for at, name in enumerate(mesh.axis_names) if np.diff(slices, axis=at).any()
        )
        kind, whole, size, between = (
            stated[1].lower().replace("_", "-"),
            sizes[0],
            len(np.unique(slices)),
            True,
        )
        gathered, scattered = whole * (size - 1), whole * (size - 1) / size  # given the operand
        kind = "collective-permute" if kind == "one-to-one" else kind
    else:
        kind = instruction.kind.removesuffix("-start")
        groups = _groups(instruction.rest, mesh.size)
        size, axes = max(map(len, groups), default=mesh.size), _axes(groups, mesh)
        # The start of an asynchronous exchange gives operand and result (and numbers of its own);
        # others one array, or several at once.
        both = instruction.kind.endswith("-start") and kind != "all-reduce"
        whole = max(sizes, default=0.0) if both else sum(sizes)
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind, whole = "reduce-scatter", whole / size  # the fusion keeps a part of the sum
        devices = mesh.devices.flat
        between = any(
            len({getattr(devices[i], "slice_index", None) for i in group}) > 1 for group in groups
        )
        gathered, scattered = whole * (size - 1) / size, whole * (size - 1)  # given the result
    sent = {
        "all-reduce": 2 * whole * (size - 1) / size,
        "all-gather": gathered,
        "reduce-scatter": scattered,
        "collective-permute": whole,
    }.get(kind, whole * (size - 1) / size)
    return Collective(
        kind=kind, axes=axes, between_slices=between, members=size, times=times, bytes=sent * times
    )


def _axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in which members of a group differ."""
    varying: set[str] = set()
    for group in groups:
        places = np.unravel_index(np.asarray(group), mesh.devices.shape)
        varying |= {
            name
            for name, at in zip(mesh.axis_names, places, strict=True)
            if len(set(at.tolist())) > 1
        }
    return tuple(name for name in mesh.axis_names if name in varying)


def _groups(rest: str, devices: int) -> Groups:
    """Parse who exchanges with whom; empty if the notation is unknown."""
    if "replica_groups={}" in rest:
        return [list(range(devices))]
    if found := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{[\d,{} ]*\})\}", rest):
        return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", found[1])]
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", rest):
        return _iota(found[2], found[3]).reshape(numbers(found[1])).tolist()
    mesh = re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{((?:'[^':]+',?)*)\}}",
        rest,
    )
    if mesh is None:
        return []
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    ids = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes.values()))
    named = re.findall(r"'([^']+)'", mesh[4])  # members of a group differ in these axes only
    order = sorted(range(len(sizes)), key=lambda at: list(sizes)[at] in named)
    together = math.prod(size for name, size in sizes.items() if name in named)
    return ids.reshape(list(sizes.values())).transpose(order).reshape(-1, together).tolist()


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Expand ``[2,4]T(1,0)``: 0, 1, 2, … in these sizes, transposed."""
    ids = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    return ids.transpose(numbers(order)) if order else ids
