"""The text of a compiled program: its computations, their schedule and sources.

It is what ``jax.stages.Compiled.as_text`` returns. The text is a list of computations; one calls
another in fusions, loops, branches and asynchronous steps. Instructions stand in the order in which
they run. A loop's body runs as often as its condition says: ``compare(counter, constant),
direction=LT``; where the end is found while it runs, as often as the caller says.

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

from jax_agent_rl.models.sharding import slice_number

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(?!token)([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_PACKAGE = "jax_agent_rl/"
_PLANNER = "deploy/plan/"


class Array(NamedTuple):
    """One array of a type.

    Attributes:
        in_hbm: it lies in a chip's main memory rather than on the chip.
    """

    bytes: float
    in_hbm: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        kind: its operation: ``fusion``, ``all-reduce-start``, …
        result: its type.
        remainder: operands and attributes.
    """

    name: str
    kind: str
    result: str
    remainder: str

    def called(self, key: str) -> list[str]:
        """Return the names of the computations that ``key`` refers to."""
        match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.remainder)
        if match is None:
            return []
        return re.findall(r"[\w.\-]+", match[1])

    @property
    def branches(self) -> list[str]:
        """Names of the computations of which a ``conditional`` runs one."""
        names = []
        for key in ("branch_computations", "true_computation", "false_computation"):
            names += self.called(key)
        return names

    @property
    def wrapped(self) -> list[str]:
        """Names of the computations in a fusion, a call or an asynchronous step.

        A call of a sparse core is an asynchronous step.
        """
        if self.kind.removesuffix("-start") == "call":
            return self.called("to_apply")
        return self.called("calls")

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        depth = 1
        for index, letter in enumerate(self.remainder):
            if letter == "(":
                depth += 1
            elif letter == ")":
                depth -= 1
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.remainder[:index])
        return []

    def number(self, key: str) -> int | None:
        """Return a number of its configuration, as ``"estimated_cycles":"12"``, or None."""
        match = re.search(rf'"{key}":"?(\d+)', self.remainder)
        if match is None:
            return None
        return int(match[1])


@dataclass(frozen=True)
class Hlo:
    """A parsed program.

    Attributes:
        computations: instructions by name of the computation.
        entry: name of the computation that runs first.
        frames: ``file:line`` of the project's code that traced an instruction, by the number of its
            stack frame; innermost first.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    frames: Mapping[int, tuple[str, ...]]

    def sources(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the lines of code that an instruction comes from.

        An instruction that the compiler added has none.
        """
        match = re.search(r"\bstack_frame_id=(\d+)", instruction.remainder)
        if match is None:
            return ()
        return self.frames.get(int(match[1]), ())

    def iterations(self, loop: Instruction, loops: int) -> int:
        """Return how often a loop runs that counts from 0.

        Args:
            loops: the answer where the end is found while it runs.
        """
        counted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.remainder)
        if counted is not None:  # GPUs' programs say it
            return int(counted[1])
        condition = self.computations[loop.called("condition")[0]]
        constants = []
        for instruction in condition:
            if instruction.kind == "constant" and instruction.result.startswith("s32[]"):
                constants.append(instruction)
        last = condition[-1]
        is_less_than = last.kind == "compare" and "direction=LT" in last.remainder
        if is_less_than and len(constants) == 1:
            limit, _, _ = constants[0].remainder.partition(")")
            return int(limit)
        return loops


def parse(text: str) -> Hlo:
    """Parse a program."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    computation: list[Instruction] | None = None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header is not None:
            name = header[2]
            computation = []
            computations[name] = computation
            if header[1]:
                entry = name
            continue

        assignment = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if assignment is not None and computation is not None:
            result, remainder = _split_type(line[assignment.end() :])
            kind, _, remainder = remainder.lstrip().partition("(")
            computation.append(Instruction(assignment[1], kind, result, remainder))

    return Hlo(computations, entry, _frames(text))


def arrays(result: str) -> Iterator[Array]:
    """Yield every array of a type."""
    for name, sizes, layout in _ARRAY.findall(result):
        size = math.prod(numbers(sizes)) * _bits(name) / 8
        yield Array(size, in_hbm="S(" not in layout)


def numbers(text: str | None) -> list[int]:
    """Parse ``2,4``; return nothing of an empty text."""
    if not text:
        return []
    return [int(number) for number in text.split(",") if number]


@functools.cache
def _bits(name: str) -> int:
    """Return the bits of a number of a type: those in its name, as of ``s32``, unless listed."""
    for prefix, bits in _BITS.items():
        if name.startswith(prefix):
            return bits
    return int(re.sub(r"\D.*", "", name[1:]))


def _split_type(text: str) -> tuple[str, str]:
    """Split a type, which may be a tuple, from what follows it."""
    depth = 0
    for index, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == " " and depth == 0:
            return text[:index], text[index:]
    return text, ""


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Return the project's lines of each stack frame, innermost first."""
    files = dict(_numbered_rows(text, "FileNames", r'"(.*)"'))

    locations: dict[int, str] = {}
    for key, fields in _numbered_rows(text, "FileLocations", r"\{(.*)\}"):
        file_number = re.findall(r"\d+", fields)[0]
        file = files.get(int(file_number), "")
        line = re.search(r"\bline=(\d+)", fields)
        locations[key] = _project_line(file, line[1] if line else "")

    frames: dict[int, tuple[str, ...]] = {}
    for key, fields in _numbered_rows(text, "StackFrames", r"\{(.*)\}"):
        location, parent = (int(number) for number in re.findall(r"\d+", fields))
        outer = frames.get(parent - 1, ())  # numbers of parents are one too high, so that 1 is none
        inner = locations.get(location, "")
        frames[key] = (inner, *outer) if inner else outer
    return frames


def _project_line(file: str, line: str) -> str:
    """Return ``file:line`` within the package; empty for other code and for the planner's."""
    if _PACKAGE not in file or not line:
        return ""
    _, _, path = file.rpartition(_PACKAGE)
    if path.startswith(_PLANNER):
        return ""
    return f"{path}:{line}"


def _numbered_rows(text: str, heading: str, row: str) -> Iterator[tuple[int, str]]:
    """Yield number and content of the rows below a heading."""
    start = re.search(rf"^{heading}$", text, re.MULTILINE)
    if start is None:
        return
    for line in text[start.end() + 1 :].splitlines():
        match = re.match(rf"(\d+) {row}$", line)
        if match is None:
            return
        yield int(match[1]), match[2]


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
        members: number of devices that exchange with each other.
        times: how often it runs in one call of the program.
        bytes: bytes that each device sends in all of these runs, around a ring.
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
        mesh: the program's devices, numbered in this order.
        loops: iterations of a loop whose end is found while it runs.
    """
    if mesh.size == 1:
        return []
    exchanges = []
    for name, instruction, times in _walk(program, loops):
        exchanges.append(read_collective(name, instruction, mesh, times))
    return exchanges


def is_exchange(instruction: Instruction) -> bool:
    """Return whether an instruction exchanges, or begins to."""
    kind = instruction.kind.removesuffix("-start")
    if kind == "send":
        return _BETWEEN_SLICES in instruction.remainder
    return kind in KINDS


def _walk(program: Hlo, loops: int) -> Iterator[tuple[str, Instruction, int]]:
    """Yield exchanges with the name of their computation and how often they run."""
    # Computations to read: name, how often each runs, and the channels already counted there.
    waiting: list[tuple[str, int, set[str]]] = [(program.entry, 1, set())]
    while waiting:
        name, times, channels = waiting.pop()
        for instruction in program.computations[name]:
            if is_exchange(instruction):
                channel = re.search(r"channel_id=\d+", instruction.remainder)
                if channel is not None:
                    if channel[0] in channels:  # one exchange, spread over several fusions
                        continue
                    channels.add(channel[0])
                yield name, instruction, times
            elif instruction.kind == "while":
                body = instruction.called("body")[0]
                iterations = program.iterations(instruction, loops)
                waiting.append((body, times * iterations, set()))
            elif instruction.kind == "conditional":
                for branch in instruction.branches:
                    waiting.append((branch, times, set()))
            else:
                for called in instruction.wrapped:
                    waiting.append((called, times, channels))


def read_collective(
    computation: str, instruction: Instruction, mesh: Mesh, times: int = 1
) -> Collective:
    """Return the exchange of an instruction for which :func:`is_exchange` holds.

    Args:
        computation: name of the computation that holds the instruction.
        mesh: the program's devices.
        times: how often it runs.
    """
    hosts_exchange = re.search(rf'{_BETWEEN_SLICES}="(\w+)"', instruction.remainder)
    if hosts_exchange is not None:
        kind = hosts_exchange[1].lower().replace("_", "-")
        return _exchange_of_hosts(kind, instruction, mesh, times)
    return _exchange_of_devices(computation, instruction, mesh, times)


def _exchange_of_hosts(kind: str, instruction: Instruction, mesh: Mesh, times: int) -> Collective:
    """Return what hosts of several slices exchange for their chips."""
    if kind == "one-to-one":
        kind = "collective-permute"
    sizes = [array.bytes for array in arrays(instruction.result)]
    operand = sizes[0]

    slices = np.vectorize(slice_number, otypes=[int])(mesh.devices)
    members = len(np.unique(slices))
    axes = []  # along which slices differ
    for index, name in enumerate(mesh.axis_names):
        if np.diff(slices, axis=index).any():
            axes.append(name)

    if kind == "all-gather":
        sent_bytes = operand * (members - 1)
    else:
        sent_bytes = _sent_bytes(kind, operand, members)
    return Collective(
        kind=kind,
        axes=tuple(axes),
        between_slices=True,
        members=members,
        times=times,
        bytes=sent_bytes * times,
    )


def _exchange_of_devices(
    computation: str, instruction: Instruction, mesh: Mesh, times: int
) -> Collective:
    """Return what devices exchange over their links, or over the network between slices."""
    kind = instruction.kind.removesuffix("-start")
    groups = _groups(instruction.remainder, mesh.size)
    members = max(map(len, groups), default=mesh.size)

    # The start of an asynchronous exchange gives operand and result (and numbers of its own);
    # others give one array, or several at once.
    sizes = [array.bytes for array in arrays(instruction.result)]
    if instruction.kind == "reduce-scatter-start":
        result = sum(sizes) / (members + 1)  # operands are as many times as large
    elif instruction.kind.endswith("-start") and kind != "all-reduce":
        result = max(sizes, default=0.0)
    else:
        result = sum(sizes)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"
        result /= members  # the fusion keeps a part of the sum

    if kind == "reduce-scatter":
        sent_bytes = result * (members - 1)
    else:
        sent_bytes = _sent_bytes(kind, result, members)
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh),
        between_slices=_between_slices(groups, mesh),
        members=members,
        times=times,
        bytes=sent_bytes * times,
    )


def _sent_bytes(kind: str, size: float, members: int) -> float:
    """Return the bytes that each device sends around a ring.

    Args:
        size: bytes of a whole array: gathered, or before it is scattered.
    """
    if kind == "collective-permute":
        return size
    if kind == "all-reduce":
        return 2 * size * (members - 1) / members
    return size * (members - 1) / members


def _between_slices(groups: Groups, mesh: Mesh) -> bool:
    """Return whether members of a group are on different slices."""
    devices = mesh.devices.flat
    for group in groups:
        slices = {slice_number(devices[number]) for number in group}
        if len(slices) > 1:
            return True
    return False


def _axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in which members of a group differ."""
    varying: set[str] = set()
    for group in groups:
        coordinates = np.unravel_index(np.asarray(group), mesh.devices.shape)
        for name, along_axis in zip(mesh.axis_names, coordinates, strict=True):
            if len(set(along_axis.tolist())) > 1:
                varying.add(name)
    return tuple(name for name in mesh.axis_names if name in varying)


def _groups(remainder: str, devices: int) -> Groups:
    """Parse who exchanges with whom; return nothing if the notation is unknown.

    Args:
        remainder: the instruction's attributes.
        devices: number of all devices.
    """
    if "replica_groups={}" in remainder:
        return [list(range(devices))]

    listed = re.search(r"(?:source_target_pairs|replica_groups)=\{(\{[\d,{} ]*\})\}", remainder)
    if listed is not None:
        return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]

    by_iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", remainder)
    if by_iota is not None:
        return _iota(by_iota[2], by_iota[3]).reshape(numbers(by_iota[1])).tolist()

    mesh = re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{((?:'[^':]+',?)*)\}}",
        remainder,
    )
    if mesh is None:
        return []
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    if mesh[2]:
        ids = _iota(mesh[2], mesh[3])
    else:
        ids = np.arange(math.prod(sizes.values()))

    # Members of a group differ in the named axes only: these go last, and are flattened.
    named_axes = re.findall(r"'([^']+)'", mesh[4])
    axes = list(sizes)
    order = sorted(range(len(axes)), key=lambda index: axes[index] in named_axes)
    members = math.prod(size for name, size in sizes.items() if name in named_axes)
    return ids.reshape(list(sizes.values())).transpose(order).reshape(-1, members).tolist()


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Expand ``[2,4]T(1,0)``: 0, 1, 2, … in these sizes, transposed."""
    ids = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    if order:
        ids = ids.transpose(numbers(order))
    return ids
