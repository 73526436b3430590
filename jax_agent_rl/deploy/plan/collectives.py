"""Exchanges between devices in a compiled program, parsed from its text.

The text is a list of computations; one calls another in fusions, loops, branches and asynchronous steps. A loop's body
counts as often as its condition says: ``compare(counter, constant), direction=LT``; where the end is found while it
runs, as often as the caller says. TPUs spread one exchange over several fusions, which share its ``channel_id``: it
counts once.

Between slices programs do not exchange, their hosts do: the text has a ``send`` to the runtime of several slices, which
says what becomes of it, as in ``_xla_megascale_transfer_type="ALL_REDUCE"``, and for which of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BETWEEN_SLICES = "_xla_megascale_transfer_type"
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8": 8, "bf16": 16, "c64": 64, "c128": 128}

Groups = list[list[int]]
"""Numbers of devices that exchange with each other."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One exchange.

    Attributes:
        kind: one of :data:`KINDS`.
        axes: of the mesh, over which it goes; empty where its groups could not be read.
        between_slices: some of its devices are on different slices.
        times: how often it runs in one call of the program.
        bytes: that each device sends in all of these, around a ring.
    """

    kind: str
    axes: tuple[str, ...]
    between_slices: bool
    times: int
    bytes: float


@dataclass(frozen=True)
class _Instruction:
    kind: str
    result: str
    rest: str


@dataclass
class _Computation:
    name: str
    instructions: list[_Instruction] = field(default_factory=list)


def collectives(text: str, mesh: Mesh, *, loops: int = 1) -> list[Collective]:
    """Return every exchange of a program.

    Args:
        text: of the compiled program (``jax.stages.Compiled.as_text``).
        mesh: its devices are numbered in this order.
        loops: how often a loop runs whose end is found while it runs.
    """
    computations, entry = _parse(text)
    return [
        _collective(name, instruction, mesh, times)
        for name, instruction, times in _walk(computations, entry, loops)
        if mesh.size > 1
    ]


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Parse computations by name, and the name of the entry computation."""
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations[header[2]] = _Computation(header[2])
            entry = header[2] if header[1] else entry
        elif current and (found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line)):
            result, rest = _split_type(line[found.end() :])
            kind, _, rest = rest.lstrip().partition("(")
            current.instructions.append(_Instruction(kind, result, rest))
    return computations, entry


def _split_type(text: str) -> tuple[str, str]:
    """Split a type, which may be a tuple, from what follows it."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return text[:at], text[at:]
    return text, ""


def _walk(computations: dict[str, _Computation], entry: str, loops: int) -> Iterator[tuple[str, _Instruction, int]]:
    """Yield exchanges with the name of their computation and how often they run."""
    waiting: list[tuple[str, int, set[str]]] = [(entry, 1, set())]
    while waiting:
        name, times, seen = waiting.pop()
        for instruction in computations[name].instructions:
            kind = instruction.kind.removesuffix("-start")
            if kind in KINDS or _BETWEEN_SLICES in instruction.rest and kind == "send":
                channel = re.search(r"channel_id=\d+", instruction.rest)
                if channel and channel[0] in seen:
                    continue
                if channel:
                    seen.add(channel[0])
                yield name, instruction, times
            elif kind == "while":
                condition, body = (_called(instruction, key)[0] for key in ("condition", "body"))
                waiting.append((body, times * _trips(computations[condition], loops), set()))
            elif kind == "conditional":
                keys = ("branch_computations", "true_computation", "false_computation")
                waiting += [(called, times, set()) for key in keys for called in _called(instruction, key)]
            else:
                key = "to_apply" if kind == "call" else "calls"
                waiting += [(called, times, seen) for called in _called(instruction, key)]


def _called(instruction: _Instruction, key: str) -> list[str]:
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", instruction.rest)
    return re.findall(r"[\w.\-]+", found[1]) if found else []


def _trips(condition: _Computation, loops: int) -> int:
    """Return how often a loop runs that counts from 0."""
    constants = [i for i in condition.instructions if i.kind == "constant" and i.result.startswith("s32[]")]
    last = condition.instructions[-1]
    if last.kind == "compare" and "direction=LT" in last.rest and len(constants) == 1:
        return int(constants[0].rest.partition(")")[0])
    return loops


def _collective(computation: str, instruction: _Instruction, mesh: Mesh, times: int) -> Collective:
    if instruction.kind == "send":
        return _between_slices(instruction, mesh, times)
    kind = instruction.kind.removesuffix("-start")
    groups = _groups(instruction.rest, mesh.size)
    size = max(map(len, groups), default=mesh.size)
    axes = _axes(groups, mesh)
    arrays = _bytes(instruction.result)
    # A step that begins one gives operand and result (and numbers of its own); others one array, or several at once.
    whole = max(arrays, default=0.0) if instruction.kind.endswith("-start") and kind != "all-reduce" else sum(arrays)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind, whole = "reduce-scatter", whole / size  # the fusion keeps a part of the sum
    sent = {
        "all-reduce": 2 * whole * (size - 1) / size,
        "reduce-scatter": whole * (size - 1),
        "collective-permute": whole,
    }.get(kind, whole * (size - 1) / size)
    devices = mesh.devices.flat
    apart = any(len({getattr(devices[i], "slice_index", None) for i in group}) > 1 for group in groups)
    return Collective(kind=kind, axes=axes, between_slices=apart, times=times, bytes=sent * times)


def _between_slices(instruction: _Instruction, mesh: Mesh, times: int) -> Collective:
    """Return what hosts exchange for their chips; the axes are those along which slices differ."""
    slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(mesh.devices)
    axes = tuple(name for at, name in enumerate(mesh.axis_names) if np.diff(slices, axis=at).any())
    said = re.search(rf'{_BETWEEN_SLICES}="(\w+)"', instruction.rest)
    assert said is not None  # by this it was found
    kind = said[1].lower().replace("_", "-")
    whole, size = _bytes(instruction.result)[0], len(np.unique(slices))
    sent = {
        "all-reduce": 2 * whole * (size - 1) / size,
        "all-gather": whole * (size - 1),
        "reduce-scatter": whole * (size - 1) / size,
        "all-to-all": whole * (size - 1) / size,
    }.get(kind, whole)
    kind = "collective-permute" if kind == "one-to-one" else kind
    return Collective(kind=kind, axes=axes, between_slices=True, times=times, bytes=sent * times)


def _bytes(result: str) -> list[float]:
    """Return the bytes of every array of a type."""
    return [
        math.prod(map(int, filter(None, sizes.split(",")))) * _bits(name) / 8
        for name, sizes in re.findall(r"\b(?!token)([a-z]+\d*\w*)\[([\d,]*)\]", result)
    ]


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
    if found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest):
        return _listed(found[1])
    if found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        return _listed(found[1])
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", rest):
        return _iota(*found.groups()[1:]).reshape(_numbers(found[1])).tolist()
    mesh = re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{((?:'[^':]+',?)*)\}}", rest)
    if mesh is None:
        return []
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    ids = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(map(int, sizes.values())))
    return _along(ids, sizes, re.findall(r"'([^']+)'", mesh[4]))


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Expand ``[2,4]T(1,0)``: 0, 1, 2, … in these sizes, transposed."""
    ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return ids.transpose(_numbers(order)) if order else ids


def _listed(text: str) -> Groups:
    return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text)]


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _along(ids: np.ndarray, sizes: dict[str, str], named: Sequence[str]) -> Groups:
    """Return groups of devices that differ in the named axes only."""
    ids = ids.reshape([int(size) for size in sizes.values()])
    apart = [at for at, name in enumerate(sizes) if name not in named]
    together = [at for at, name in enumerate(sizes) if name in named]
    return ids.transpose(apart + together).reshape(-1, math.prod(ids.shape[at] for at in together)).tolist()
