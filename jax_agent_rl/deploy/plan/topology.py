"""A TPU slice by its name: its chips, and the devices a compiler needs to know of, none of which has to exist.

Chips are as Cloud TPU's documentation states them (docs.cloud.google.com/tpu, 2026).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.deploy.launch.tpu.topology import SHAPES
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.text import did_you_mean

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU.

    Attributes:
        hbm_bytes: memory of a chip that programs get; libtpu, which keeps some, says how much.
        flops: peak bfloat16 operations per second; a multiplication and an addition count as two.
        hbm_bandwidth: bytes per second between a chip and its memory.
        link_bandwidth: bytes per second and direction of one link to a neighbour.
        dcn_bandwidth: bytes per second and direction of a chip's share of the network between slices.
        hosts: shapes of slices that are one host; larger ones are of hosts of four chips.
        config: libtpu's name for how its cores make devices; None where it supposes one device a chip by itself.
    """

    name: str
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    dcn_bandwidth: float
    hosts: tuple[tuple[int, ...], ...]
    config: str | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            hbm_bytes=int(30.75 * GIB),
            flops=275e12,
            hbm_bandwidth=1200e9,
            link_bandwidth=50e9,  # of 6 links (Jouppi et al. 2023, arXiv 2304.01433)
            dcn_bandwidth=1.6e9,  # 81 Tbps between 1536 hosts (Chowdhery et al. 2022, arXiv 2204.02311, section 4)
            hosts=((2, 2, 1),),
            config="megacore",  # both cores of a chip are one device, as they are for JAX on a real one
        ),
        Chip(
            name="v5e",
            hbm_bytes=int(15.75 * GIB),
            flops=197e12,
            hbm_bandwidth=819e9,
            link_bandwidth=50e9,  # 400 GB/s in both directions over 4 links
            dcn_bandwidth=3.1e9,
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
        Chip(
            name="v5p",
            hbm_bytes=int(95.74 * GIB),
            flops=459e12,
            hbm_bandwidth=2765e9,
            link_bandwidth=100e9,  # 1200 GB/s in both directions over 6 links
            dcn_bandwidth=6.25e9,
            hosts=((2, 2, 1),),
        ),
        Chip(
            name="v6e",
            hbm_bytes=int(31.25 * GIB),
            flops=918e12,
            hbm_bandwidth=1600e9,
            link_bandwidth=100e9,  # 3200 Gbps over 4 links
            dcn_bandwidth=12.5e9,
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
    )
}


_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # or it asks a metadata server that only a cloud has
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it need not be alone: it takes no chip
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """``v5e:4x4``, or ``2*v5e:4x4`` for two of them.

    Attributes:
        shape: chips in each direction of the torus.
        count: slices, joined by the data centre's network.
    """

    chip: Chip
    shape: tuple[int, ...]
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Parse a slice's name.

        Raises:
            ConfigError: no such generation, or no such shape.
        """
        match = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", text.strip().lower())
        if match is None:
            raise ConfigError(f"topology {text!r} is not of the form v5e:4x4, v5p:4x4x4, or 2*v5e:16x16 for two slices")
        count, name, sizes = int(match[1] or 1), match[2], match[3]
        chip = CHIPS.get(name)
        if chip is None:
            known = ", ".join(CHIPS)
            raise ConfigError(
                f"topology {text!r}: no TPU is called {name!r}; {did_you_mean(name, CHIPS)}there are {known}"
            )
        if sizes not in SHAPES[name]:
            raise ConfigError(f"topology {text!r}: {name} comes as {', '.join(SHAPES[name])}")
        if count == 0:
            raise ConfigError(f"topology {text!r} is no slice; leave out '0*', or say how many: 2*{name}:{sizes}")
        return cls(chip=chip, shape=tuple(int(size) for size in sizes.split("x")), count=count)

    @property
    def name(self) -> str:
        """The name that :meth:`parse` takes."""
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return one if self.count == 1 else f"{self.count}*{one}"

    @property
    def larger(self) -> Slice | None:
        """The next slices of this generation, as many; None if these are the largest."""
        bigger = (tuple(int(size) for size in shape.split("x")) for shape in SHAPES[self.chip.name])
        return next((replace(self, shape=s) for s in bigger if math.prod(s) > math.prod(self.shape)), None)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.count

    def devices(self) -> list[Any]:
        """Return described devices, one a chip, by slice and coordinates: programs compile for them, but cannot run.

        Raises:
            ConfigError: ``libtpu`` is not installed, or knows no such slice.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigError("plan compiles with libtpu, which is not installed: pip install 'jax_agent_rl[plan]'")
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"num_slices": self.count} if self.count > 1 else {}
        if self.chip.config is not None:
            options["chip_config_name"] = self.chip.config
        if self.shape in self.chip.hosts:  # else libtpu supposes hosts of four chips
            options["chips_per_host_bounds"] = (*self.shape, 1, 1)[:3]
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        try:
            from jax.experimental import topologies

            from jax_agent_rl.models.mesh import expect_described_tpus

            expect_described_tpus()
            return list(topologies.get_topology_desc(platform="tpu", topology_name=one, **options).devices)
        except ImportError as error:
            raise ConfigError(f"plan needs jax.experimental.topologies ({error}): pip install 'jax>=0.10'") from None
        except Exception as error:  # whatever the compiler's plug-in raises: its words are the best there are
            raise ConfigError(f"libtpu does not give topology {self.name!r}: {error}") from error
