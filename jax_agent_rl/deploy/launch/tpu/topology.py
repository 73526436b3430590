"""Slices of Cloud TPU by name (``v5e:4x4``): chips, hosts, and Google's names for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax_agent_rl.errors import LaunchError
from jax_agent_rl.utils.text import did_you_mean

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
SHAPES: Mapping[str, tuple[str, ...]] = {"v4": _CUBIC[:-1], "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT}
"""Slices of Google Cloud with an accelerator type, by generation, smallest first."""
_NAME = re.compile(r"((?P<slices>\d+)\*)?(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2})")


class Generation(NamedTuple):
    """What differs between TPU generations."""

    prefix: str  # of accelerator types
    cores: int  # per chip in the number of an accelerator type; v5e and v6e count chips
    runtime: str  # software version of the VMs for jax: https://cloud.google.com/tpu/docs/runtimes
    gke: str  # the node label cloud.google.com/gke-tpu-accelerator


GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation("v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Generation("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Generation("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}


@dataclass(frozen=True)
class Topology:
    """One slice, which users write as ``v5e:4x4``."""

    generation: str
    shape: str  # the chips along each axis

    def __str__(self) -> str:
        return f"{self.generation}:{self.shape}"

    @property
    def kind(self) -> Generation:
        """The generation's properties."""
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def accelerator_type(self) -> str:
        """Gcloud's name, e.g. ``v5litepod-16`` or ``v5p-128``."""
        return f"{self.kind.prefix}-{self.chips * self.kind.cores}"

    @property
    def hosts(self) -> int:
        """Virtual machines: one for up to 8 chips of v5e and v6e, otherwise one for 4 chips."""
        return 1 if self.kind.cores == 1 and self.chips <= 8 else max(1, self.chips // 4)

    @property
    def one_host(self) -> Topology:
        """The slice of 4 chips of the same generation."""
        slices = (Topology(self.generation, shape) for shape in SHAPES[self.generation])
        return next(slice for slice in slices if slice.chips == 4)


def parse_topology(name: str) -> Topology:
    """Parse a topology such as ``v5e:4x4``.

    Raises:
        LaunchError: the name is malformed, or Cloud TPU VMs have no such slice.
    """
    known = ", ".join(GENERATIONS)
    if name.startswith("tpu7x"):
        raise LaunchError(f"--topology {name}: TPU7x is available on GKE only; choose {known}")
    match = _NAME.fullmatch(name.strip().lower())
    if match is None:
        raise LaunchError(f"--topology {name!r} is not of the form GENERATION:SHAPE, as in v5e:4x4 or v5p:2x2x2")
    found, slices = Topology(match["generation"], match["shape"]), match["slices"]
    if slices:
        raise LaunchError(f"--topology {name} is more than one slice: give --topology {found} --slices {slices}")
    if found.generation not in GENERATIONS:
        hint = did_you_mean(found.generation, GENERATIONS)
        raise LaunchError(f"--topology {name}: no generation {found.generation!r}; {hint}there are {known}")
    if found.shape not in SHAPES[found.generation]:
        raise LaunchError(f"--topology {name}: {found.generation} comes as {', '.join(SHAPES[found.generation])}")
    return found
