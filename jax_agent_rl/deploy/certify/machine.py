"""The machine under test: its configuration, devices and peaks, and the parts of a run.

The parts are built when they are first needed.
"""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config, build, load
from jax_agent_rl.data.tasks import prepare_shop
from jax_agent_rl.deploy.doctor.machine import usable_cores
from jax_agent_rl.deploy.plan.compiled import Compiled, compile_program
from jax_agent_rl.deploy.plan.plan import Load, inventory, loads
from jax_agent_rl.deploy.plan.topology import CHIPS, Chip, place_devices
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.engine_devices import engine_shapes, resolve_engine_mesh, with_engine_mesh
from jax_agent_rl.runtime.engines import engine_precision, read_model
from jax_agent_rl.utils.memory import usable_memory
from jax_agent_rl.utils.processor import processor

SHORT = ("trainer.steps=2", "data.eval_limit=8")
"""Overrides that make a training run short; the command line's come after them."""
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}
"""``plan``'s names of chips by JAX's."""
LONG_SECONDS = 5.0
"""Time after which a call is not repeated for another measurement."""
PACKAGES = (
    "jax_agent_rl",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "libtpu",
    "vllm",
    "torch",
)
Clock = Callable[[], float]


def load_config(
    file: Path | None, overrides: Sequence[str], scratch: Path, *, devices: int
) -> Config:
    """Return the configuration of a certification.

    Args:
        file: a run's configuration; None for the quickstart's model and task, with a learner on all
            devices.
        overrides: ``key=value`` of the command line.
        scratch: folder for rows and the training run.
        devices: accelerators that the learner spans without a configuration; 1 on CPUs.

    Raises:
        ConfigError: a key or value is wrong.
    """
    overrides = [f"run_dir={scratch / 'run'}", *SHORT, *overrides]
    if file is not None:
        return load(file, overrides)

    train, heldout, _ = prepare_shop(scratch)
    tree = {
        "model": {"path": str(fetch_quickstart_model())},
        "data": {"train": str(train), "eval": str(heldout), "shuffle": False},
        "tools": {"function_tool_path": "jax_agent_rl.tools.shop"},
        "agent": {
            "tool_prompt": "none",
            "tool_format": "pythonic",
            "max_prompt_length": 256,
            "max_response_length": 96,
            "max_assistant_turns": 4,
            "max_user_turns": 3,
            "max_tool_response_length": 24,
        },
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 12,
            "max_in_flight": 48,
            "max_model_len": 352,
            "temperature": 0.8,
            "eval_temperature": 0.8,
        },
        "learner": {
            "learning_rate": 3e-5,
            "lr_scheduler_type": "linear",
            "min_lr_ratio": 0.15,
            "pack_length": 1024,
            "mesh": {"fsdp": devices},
        },
    }
    return build(tree, overrides)


class NotRunError(Exception):
    """A check cannot run on this machine."""


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What ``plan`` says about this machine.

    Attributes:
        compiled: the run's programs, compiled for this machine's devices.
        loads: memory of each program.
        predicts: whether the compiler's estimate gives times, as libtpu's does; otherwise they are
            ideal times.
    """

    compiled: Sequence[Compiled]
    loads: Sequence[Load]
    predicts: bool

    def find(self, prefix: str) -> list[Compiled]:
        """Return the programs whose names begin so."""
        return [x for x in self.compiled if x.program.name.startswith(prefix)]


class Machine:
    """The machine, and a run's parts on it.

    Args:
        config: the resolved configuration.
        scratch: folder for what the checks write.
        clock: seconds of a monotonic clock.

    Attributes:
        peaks: measured operations per second, by dtype; bytes per second of ``memory``.
    """

    def __init__(self, config: Config, scratch: Path, *, clock: Clock) -> None:
        self.config = config
        self.scratch = scratch
        self.clock = clock
        self.platform = jax.default_backend()
        self.devices = jax.local_devices()
        self.peaks: dict[str, float] = {}

    def best_seconds(self, run: Callable[[], Any], *, repeats: int = 3) -> float:
        """Return the shortest time of several calls, of fewer if they take long.

        The call before them compiles and does not count.
        """
        jax.block_until_ready(run())
        times: list[float] = []
        while len(times) < repeats and sum(times) < LONG_SECONDS:
            start_time = self.clock()
            jax.block_until_ready(run())
            times.append(self.clock() - start_time)
        return min(times)

    def describe(self) -> dict[str, Any]:
        """Return what a reader has to know of the machine.

        No name of it, of its user or of a folder is in it.
        """
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return {
            "platform": self.platform,
            "device": self.devices[0].device_kind,
            "devices": len(jax.devices()),
            "hosts": jax.process_count(),
            "processor": processor(),
            "cores": usable_cores(),
            "load": round(os.getloadavg()[0], 1),
            "memory_bytes": usable_memory(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "versions": versions,
            "model": Path(self.config.model.path).name,
        }

    # --- peaks ------------------------------------------------------------------------------------

    @property
    def chip(self) -> Chip | None:
        """``plan``'s description of the chip; None if it is not a TPU that ``plan`` knows."""
        return CHIPS.get(KINDS.get(self.devices[0].device_kind, ""))

    def flops(self, dtype: str) -> float:
        """Return measured operations per second of a large matrix product."""
        if dtype not in self.peaks:
            size = 2048 if self.platform == "cpu" else 8192
            x = jnp.full((size, size), 0.5, jnp.dtype(dtype))
            product = jax.jit(lambda x: x @ x)
            self.peaks[dtype] = 2 * size**3 / self.best_seconds(lambda: product(x))
        return self.peaks[dtype]

    def bandwidth(self) -> float:
        """Return measured bytes per second of reading a large array."""
        if "memory" not in self.peaks:
            x = jnp.ones(100_000_000 if self.platform == "cpu" else 500_000_000)
            total = jax.jit(jnp.sum)
            self.peaks["memory"] = x.nbytes / self.best_seconds(lambda: total(x))
        return self.peaks["memory"]

    def as_chip(self, dtype: str) -> Chip:
        """Return the device as ``plan`` describes one.

        A known TPU is as documented, another device as measured.
        """
        if self.chip is not None:
            return self.chip
        stats = self.devices[0].memory_stats() or {}
        return Chip(
            name=self.devices[0].device_kind,
            hbm_bytes=stats.get("bytes_limit", usable_memory()),
            flops=self.flops(dtype),
            clock=1e9,
            hbm_bandwidth=self.bandwidth(),
            link_bandwidth=math.inf,
            dcn_bandwidth=math.inf,
            host_bytes=usable_memory(),
            hosts=(),
        )

    # --- the run's parts --------------------------------------------------------------------------

    @functools.cached_property
    def codec(self) -> ChatCodec:
        return ChatCodec.from_pretrained(
            self.config.model.path, tool_format=self.config.agent.tool_format
        )

    @functools.cached_property
    def model(self) -> DecoderConfig:
        return read_model(self.config, self.codec)

    @functools.cached_property
    def alone(self) -> Config:
        """The configuration with one embedded engine beside the learner."""
        config = resolve_engine_mesh(self.config, self.model)
        one_engine = config.rollout.jetstream.mesh.model_copy(update={"data": 1})
        config = with_engine_mesh(config, one_engine)
        rollout = config.rollout.model_copy(
            update={"backend": "jetstream", "placement": "colocated"}
        )
        return config.model_copy(update={"rollout": rollout})

    @functools.cached_property
    def learner(self) -> Learner:
        if jax.process_count() > 1:
            raise NotRunError(
                "a learner spans all hosts, as in the training run; a slice of one host measures"
                " this"
            )
        learner = make_learner(self.alone, self.model)
        if not isinstance(learner, Learner):
            raise NotRunError(
                "agent.role_adapters trains several learners at a time; leave it out to measure one"
            )
        return learner

    @functools.cached_property
    def engine(self) -> JaxEngine:
        """The engine without a scheduler, as ``plan`` compiles it."""
        precision: Mapping[str, Any] = engine_precision(self.alone)
        mesh = place_devices(self.alone, self.devices).engines[0]
        settings = {**precision, "dtype": jnp.dtype(precision["dtype"]), "compile_ahead": False}
        return JaxEngine(self.model, engine_shapes(self.alone), **settings, mesh=mesh)

    @functools.cached_property
    def plan(self) -> LocalPlan:
        """The run's programs, compiled for this machine as ``plan`` compiles them for a slice."""
        chip = self.as_chip(self.alone.rollout.jetstream.dtype)
        placement = place_devices(self.alone, self.devices)
        parts = inventory(self.alone, self.model, placement)
        compiled = [compile_program(program, chip) for program in parts.programs]
        return LocalPlan(
            compiled=compiled,
            loads=loads(parts, compiled, capacity=chip.hbm_bytes),
            predicts=self.platform == "tpu" and self.chip is not None,
        )

    def release(self) -> None:
        """Free what the parts hold on the devices."""
        for name in ("learner", "engine"):
            self.__dict__.pop(name, None)
