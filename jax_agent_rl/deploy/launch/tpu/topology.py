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
_SEVERAL = re.compile(r"(?P<slices>\d+)\*(?P<name>.+)")
_NAME = re.compile(r"(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2})")


class Generation(NamedTuple):
    """What differs between TPU generations."""

    prefix: str  # of accelerator types
    cores: int  # per chip in the number of an accelerator type; v5e and v6e count chips
    runtime: str  # software version of the VMs for jax: https://cloud.google.com/tpu/docs/runtimes
    gke: str  # the node label cloud.google.com/gke-tpu-accelerator
    one_host: str  # the shape of 4 chips, which are one host


GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation("v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice", "2x2x1"),
    "v5e": Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "2x2"),
    "v5p": Generation("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice", "2x2x1"),
    "v6e": Generation("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice", "2x2"),
}


@dataclass(frozen=True)
class Topology:
    """One slice.

    Attributes:
        name: as the user writes it: a generation and the chips along each axis, as in ``v5e:4x4``.
    """

    name: str

    @property
    def shape(self) -> str:
        """The chips along each axis."""
        return self.name.partition(":")[2]

    @property
    def kind(self) -> Generation:
        """The generation's properties."""
        return GENERATIONS[self.name.partition(":")[0]]

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
        return Topology(f"{self.name.partition(':')[0]}:{self.kind.one_host}")


def parse_topology(name: str) -> Topology:
    """Parse a topology such as ``v5e:4x4``.

    Raises:
        LaunchError: the name is malformed, or Cloud TPU VMs have no such slice.
    """
    if name.startswith("tpu7x"):
        raise LaunchError(f"--topology {name}: TPU7x is available on GKE only; choose {', '.join(GENERATIONS)}")
    if several := _SEVERAL.fullmatch(name.strip()):
        raise LaunchError(
            f"--topology {name} is more than one slice: give --topology {several['name']} --slices {several['slices']}"
        )
    match = _NAME.fullmatch(name.strip().lower())
    if match is None:
        raise LaunchError(f"--topology {name!r} is not of the form GENERATION:SHAPE, as in v5e:4x4 or v5p:2x2x2")
    generation, shape = match["generation"], match["shape"]
    if generation not in GENERATIONS:
        hint = did_you_mean(generation, GENERATIONS)
        raise LaunchError(f"--topology {name}: no generation {generation!r}; {hint}there are {', '.join(GENERATIONS)}")
    if shape not in SHAPES[generation]:
        raise LaunchError(f"--topology {name}: {generation} comes as {', '.join(SHAPES[generation])}")
    return Topology(f"{generation}:{shape}")
