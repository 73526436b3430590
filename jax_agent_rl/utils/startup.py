"""libtpu also compiles for TPUs that are not there (``jax-agent-rl plan``); where it is installed for that, JAX is kept
from looking for them in every command: it would complain that there are none.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def ignore_absent_tpus(devices: Path = Path("/dev")) -> None:
    """Sets ``JAX_PLATFORMS=cpu`` where libtpu is installed, the machine has neither TPU nor GPU, and nobody has set it.

    Call it before JAX is imported.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None:
        return
    accelerators = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*")
    if not any(any(devices.glob(pattern)) for pattern in accelerators):
        os.environ["JAX_PLATFORMS"] = "cpu"
