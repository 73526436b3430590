"""Whether a run fits its chips: what stays there between programs, and what each adds while it runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_agent_rl.deploy.plan.compiled import Compiled
from jax_agent_rl.deploy.plan.inventory import Inventory, Program, Resident
from jax_agent_rl.models.mesh import Device

BATCH, TEMPORARIES, CODE = "gradients and batches", "temporaries", "code"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fullest chip of a program while it runs there.

    Attributes:
        parts: bytes by what they are; in order.
        refused: the compiler would not make it; then parts are what it said, or less.
    """

    program: Program
    parts: Mapping[str, int]
    capacity: int
    refused: bool = False

    @functools.cached_property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity and not self.refused


def loads(inventory: Inventory, compiled: Sequence[Compiled], *, capacity: int) -> list[Load]:
    """Return the load of each program.

    Args:
        inventory: programs and resident arrays.
        compiled: the inventory's programs.
        capacity: bytes of a chip.
    """
    sizes = padded(inventory.residents, compiled)
    return [_load(one, inventory.residents, sizes, capacity) for one in compiled]


def _load(one: Compiled, residents: Sequence[Resident], sizes: Mapping[str, float], capacity: int) -> Load:
    program = one.program
    here = set(program.mesh.devices.flat)
    there = [r for r in residents if program.half not in r.absent or r.name in program.holds]

    def on(device: Device) -> dict[str, int]:
        return {r.name: round(r.bytes[device] * sizes[r.name]) for r in there if device in r.bytes}

    staying = max((on(device) for device in here), key=lambda parts: sum(parts.values()))
    held = sum(staying.get(name, 0) for name in program.holds)
    if one.memory is None:
        added = {TEMPORARIES: one.needs if "temporaries (" in (one.problem or "") else max(0, one.needs - held)}
    else:
        memory = one.memory
        added = {
            BATCH: max(0, memory.arguments - held) + memory.outputs - memory.aliased,
            TEMPORARIES: memory.temporaries,
            CODE: memory.code,
        }
    return Load(program=program, parts=staying | added, capacity=capacity, refused=one.memory is None)


def padded(residents: Sequence[Resident], compiled: Sequence[Compiled]) -> dict[str, float]:
    """Return each resident's padded size over its plain size: chips keep arrays in tiles of 8 x 128 numbers.

    Where a program's outputs take the memory of residents, the compiler has said how much that is; where one resident
    among several is not known, it is what is left. 1 where no program says.
    """
    plain = {r.name: max(r.bytes.values()) for r in residents}
    known: dict[str, float] = {}
    said = sorted(
        ((one.program.donates, one.memory.aliased) for one in compiled if one.memory and one.program.donates),
        key=lambda pair: len(pair[0]),
    )
    for names, total in said:
        unknown = [name for name in names if name not in known]
        if len(unknown) == 1:
            known[unknown[0]] = total - sum(known[name] for name in names if name in known)
    return {name: max(1.0, known[name] / size) if name in known and size else 1.0 for name, size in plain.items()}
