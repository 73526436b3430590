"""A slice by its name: the devices a compiler needs to know of, and nothing that has to be there."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.deploy.plan.chips import CHIPS, Chip
from jax_agent_rl.deploy.tpu_shapes import SHAPES
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.suggest import did_you_mean

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
        """From its name.

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
        """As :meth:`parse` takes it."""
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return one if self.count == 1 else f"{self.count}*{one}"

    @property
    def larger(self) -> Slice | None:
        """The next slices of this generation, as many; None if these are the largest."""
        bigger = (tuple(int(size) for size in shape.split("x")) for shape in SHAPES[self.chip.name])
        return next((replace(self, shape=s) for s in bigger if math.prod(s) > math.prod(self.shape)), None)

    @property
    def chips(self) -> int:
        """Of all slices."""
        return math.prod(self.shape) * self.count

    def devices(self) -> list[Any]:
        """Described devices, one a chip, by slice and coordinates: programs can be compiled for them, not run.

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
