"""The text of a compiled program (``jax.stages.Compiled.as_text``): its computations, their schedule and sources.

The text is a list of computations; one calls another in fusions, loops, branches and asynchronous steps. Instructions
stand in the order in which they run. A loop's body runs as often as its condition says: ``compare(counter, constant),
direction=LT``; where the end is found while it runs, as often as the caller says.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        frames: ``file:line`` of the project's code that traced an instruction, by the number of its stack frame;
            innermost first.
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
        if condition[-1].kind == "compare" and "direction=LT" in condition[-1].rest and len(constants) == 1:
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
