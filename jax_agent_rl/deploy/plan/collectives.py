"""Exchanges between devices in a compiled program, parsed from its text.

The text is a list of computations; one calls another in fusions, loops, branches and asynchronous steps. A loop's body
runs as often as its condition says: ``compare(counter, constant), direction=LT``; where the end is found while it runs,
as often as the caller says. TPUs spread one exchange over several fusions, which share its ``channel_id``: it counts
once.

Between slices the hosts exchange for the programs: the text has a ``send`` to the runtime of several slices, which
names the exchange, as in ``_xla_megascale_transfer_type="ALL_REDUCE"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BETWEEN_SLICES = "_xla_megascale_transfer_type"
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8": 8, "bf16": 16, "c64": 64, "c128": 128}
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
        times: how often it runs in one call of the program.
        bytes: bytes that each device sends in all of these, around a ring.
    """

    kind: str
    axes: tuple[str, ...]
    between_slices: bool
    times: int
    bytes: float


class _Instruction(NamedTuple):
    kind: str
    result: str
    rest: str

    def called(self, key: str) -> list[str]:
        """Return the names of the computations that ``key`` refers to."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


Computations = dict[str, list[_Instruction]]


def collectives(text: str, mesh: Mesh, *, loops: int = 1) -> list[Collective]:
    """Return every exchange of a program.

    Args:
        text: the compiled program (``jax.stages.Compiled.as_text``).
        mesh: its devices, numbered in this order.
        loops: iterations of a loop whose end is found while it runs.
    """
    if mesh.size == 1:
        return []
    return [_read(name, instruction, mesh, times) for name, instruction, times in _walk(*_parse(text), loops)]


def _parse(text: str) -> tuple[Computations, str]:
    """Parse computations by name, and the name of the entry computation."""
    computations: Computations = {}
    entry = name = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and (found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line)):
            result, rest = _split_type(line[found.end() :])
            kind, _, rest = rest.lstrip().partition("(")
            computations[name].append(_Instruction(kind, result, rest))
    return computations, entry


def _split_type(text: str) -> tuple[str, str]:
    """Split a type, which may be a tuple, from what follows it."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return text[:at], text[at:]
    return text, ""


def _walk(computations: Computations, entry: str, loops: int) -> Iterator[tuple[str, _Instruction, int]]:
    """Yield exchanges with the name of their computation and how often they run."""
    waiting: list[tuple[str, int, set[str]]] = [(entry, 1, set())]
    while waiting:
        name, times, seen = waiting.pop()
        for instruction in computations[name]:
            kind = instruction.kind.removesuffix("-start")
            if kind in KINDS or _BETWEEN_SLICES in instruction.rest and kind == "send":
                channel = re.search(r"channel_id=\d+", instruction.rest)
                if channel and channel[0] in seen:
                    continue
                if channel:
                    seen.add(channel[0])
                yield name, instruction, times
            elif kind == "while":
                condition, body = (instruction.called(key)[0] for key in ("condition", "body"))
                waiting.append((body, times * _count_iterations(computations[condition], loops), set()))
            elif kind == "conditional":
                keys = ("branch_computations", "true_computation", "false_computation")
                waiting += [(called, times, set()) for key in keys for called in instruction.called(key)]
            else:
                called = instruction.called("to_apply" if kind == "call" else "calls")
                waiting += [(each, times, seen) for each in called]


def _count_iterations(condition: list[_Instruction], loops: int) -> int:
    """Return how often a loop runs that counts from 0; ``loops`` if its end is found while it runs."""
    constants = [i for i in condition if i.kind == "constant" and i.result.startswith("s32[]")]
    if condition[-1].kind == "compare" and "direction=LT" in condition[-1].rest and len(constants) == 1:
        return int(constants[0].rest.partition(")")[0])
    return loops


def _read(computation: str, instruction: _Instruction, mesh: Mesh, times: int) -> Collective:
    arrays = _array_bytes(instruction.result)
    if stated := re.search(rf'{_BETWEEN_SLICES}="(\w+)"', instruction.rest):
        # What hosts exchange for their chips; the axes are those along which slices differ.
        slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(mesh.devices)
        axes = tuple(name for at, name in enumerate(mesh.axis_names) if np.diff(slices, axis=at).any())
        kind, whole, size, between = stated[1].lower().replace("_", "-"), arrays[0], len(np.unique(slices)), True
        gathered, scattered = whole * (size - 1), whole * (size - 1) / size  # given the operand
        kind = "collective-permute" if kind == "one-to-one" else kind
    else:
        kind = instruction.kind.removesuffix("-start")
        groups = _groups(instruction.rest, mesh.size)
        size, axes = max(map(len, groups), default=mesh.size), _axes(groups, mesh)
        # The start of an asynchronous exchange gives operand and result (and numbers of its own); others one array, or
        # several at once.
        both = instruction.kind.endswith("-start") and kind != "all-reduce"
        whole = max(arrays, default=0.0) if both else sum(arrays)
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind, whole = "reduce-scatter", whole / size  # the fusion keeps a part of the sum
        devices = mesh.devices.flat
        between = any(len({getattr(devices[i], "slice_index", None) for i in group}) > 1 for group in groups)
        gathered, scattered = whole * (size - 1) / size, whole * (size - 1)  # given the result
    sent = {
        "all-reduce": 2 * whole * (size - 1) / size,
        "all-gather": gathered,
        "reduce-scatter": scattered,
        "collective-permute": whole,
    }.get(kind, whole * (size - 1) / size)
    return Collective(kind=kind, axes=axes, between_slices=between, times=times, bytes=sent * times)


def _array_bytes(result: str) -> list[float]:
    """Return the bytes of every array of a type."""
    found = re.findall(r"\b(?!token)([a-z]+\d*\w*)\[([\d,]*)\]", result)
    return [math.prod(_numbers(sizes)) * _bits(name) / 8 for name, sizes in found]


def _bits(name: str) -> int:
    known = next((bits for prefix, bits in _BITS.items() if name.startswith(prefix)), None)
    return known or int(re.sub(r"\D.*", "", name[1:]))


def _axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in which members of a group differ."""
    varying: set[str] = set()
    for group in groups:
        places = np.unravel_index(np.asarray(group), mesh.devices.shape)
        varying |= {name for name, at in zip(mesh.axis_names, places, strict=True) if len(set(at.tolist())) > 1}
    return tuple(name for name in mesh.axis_names if name in varying)


def _groups(rest: str, devices: int) -> Groups:
    """Parse who exchanges with whom; empty if the notation is unknown."""
    if "replica_groups={}" in rest:
        return [list(range(devices))]
    if found := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{[\d,{} ]*\})\}", rest):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", found[1])]
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", rest):
        return _iota(found[2], found[3]).reshape(_numbers(found[1])).tolist()
    mesh = re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{((?:'[^':]+',?)*)\}}", rest)
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
    ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",") if number] if text else []
