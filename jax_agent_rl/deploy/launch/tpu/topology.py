"""Slices by name: ``v5e:4x4`` is a generation and the layout of its chips; here in gcloud's terms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax_agent_rl.errors import LaunchError
from jax_agent_rl.utils.text import did_you_mean

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
SHAPES: Mapping[str, tuple[str, ...]] = {"v4": _CUBIC[:-1], "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT}
"""Slices of Google Cloud by generation, from the smallest on: those an accelerator type stands for."""
_CHIPS_PER_HOST = 4
_LARGEST_SINGLE_HOST = 8
_SEVERAL = re.compile(r"(?P<slices>\d+)\*(?P<name>.+)")
_NAME = re.compile(r"(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2})")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What differs between TPU generations.

    Attributes:
        prefix: of accelerator types, as in ``v5litepod-16``.
        cores: that the number in an accelerator type counts, per chip; v5e and v6e count chips.
        runtime: software version of the VMs for jax (https://cloud.google.com/tpu/docs/runtimes).
        shapes: those an accelerator type stands for; gcloud takes no other for these generations.
        gke: the node label ``cloud.google.com/gke-tpu-accelerator``.
    """

    prefix: str
    cores: int
    runtime: str
    shapes: tuple[str, ...]
    gke: str

    @property
    def one_host(self) -> str:
        """The shape of 4 chips, which are one host."""
        return "2x2" if "2x2" in self.shapes else "2x2x1"


GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation(prefix="v4", cores=2, runtime="tpu-ubuntu2204-base", shapes=SHAPES["v4"], gke="tpu-v4-podslice"),
    "v5e": Generation(
        prefix="v5litepod", cores=1, runtime="v2-alpha-tpuv5-lite", shapes=SHAPES["v5e"], gke="tpu-v5-lite-podslice"
    ),
    "v5p": Generation(prefix="v5p", cores=2, runtime="v2-alpha-tpuv5", shapes=SHAPES["v5p"], gke="tpu-v5p-slice"),
    "v6e": Generation(prefix="v6e", cores=1, runtime="v2-alpha-tpuv6e", shapes=SHAPES["v6e"], gke="tpu-v6e-slice"),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice: chips that reach each other without a network.

    Attributes:
        generation: a key of :data:`GENERATIONS`.
        shape: chips along each axis, as in ``4x4``.
    """

    generation: str
    shape: str

    @property
    def name(self) -> str:
        """The name as the user writes it."""
        return f"{self.generation}:{self.shape}"

    @property
    def kind(self) -> Generation:
        """The generation's properties."""
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def accelerator_type(self) -> str:
        """Gcloud's name, e.g. ``v5litepod-16`` or ``v5p-128``."""
        return f"{self.kind.prefix}-{self.chips * self.kind.cores}"

    @property
    def hosts(self) -> int:
        """Virtual machines of one slice: one for up to 8 chips of v5e and v6e, otherwise one for 4 chips."""
        single = self.kind.cores == 1 and self.chips <= _LARGEST_SINGLE_HOST
        return 1 if single else max(1, self.chips // _CHIPS_PER_HOST)

    @property
    def chips_per_host(self) -> int:
        """Chips that each virtual machine holds."""
        return self.chips // self.hosts


def parse(name: str) -> Topology:
    """Parse a topology such as ``v5e:4x4``.

    Raises:
        LaunchError: it names none, or none that a Cloud TPU VM can have.
    """
    if name.startswith("tpu7x"):
        raise LaunchError(f"--topology {name}: TPU7x is to be had on GKE only; choose {', '.join(GENERATIONS)}")
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
        raise LaunchError(f"--topology {name}: no generation {generation!r}; {hint}there is {', '.join(GENERATIONS)}")
    shapes = GENERATIONS[generation].shapes
    if shape not in shapes:
        raise LaunchError(f"--topology {name}: {generation} comes as {', '.join(shapes)}")
    return Topology(generation=generation, shape=shape)
