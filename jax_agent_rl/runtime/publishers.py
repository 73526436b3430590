"""The form in which engines take the learner's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax_agent_rl.config import Config
from jax_agent_rl.learner.export import WeightFiles
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.rollout.protocol import WeightUpdate

PROBE_LENGTH = 96
"""Ids of the context that proves an update: enough to touch every parameter, and cheap to recompute."""


class Publisher(Protocol):
    """Turns the learner's parameters into a :class:`WeightUpdate` that the run's engines take."""

    def make(self, params: Params, version: int) -> WeightUpdate: ...

    def close(self) -> None:
        """Removes what it left behind."""
        ...


class ArrayPublisher:
    """For an engine of this process: the arrays themselves."""

    def make(self, params: Params, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=params)

    def close(self) -> None:
        pass


class FilePublisher:
    """For engines of other processes and machines: safetensors files that carry a log-prob probe."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    def make(self, params: Params, version: int) -> WeightUpdate:
        """Writes all parameters; the files of the version before are removed first."""
        files = self._files.write(params, version)
        return WeightUpdate(version=version, kind="safetensors", payload=files, lasting=True)

    def close(self) -> None:
        self._files.close()


def make_publisher(config: Config, model: DecoderConfig, *, probe_ids: Sequence[int]) -> Publisher:
    """What ``rollout.backend`` takes weights from.

    Args:
        probe_ids: a typical context, by which weights are checked after they were moved.

    Raises:
        ConfigError: ``rollout.weight_folder`` does not exist.
    """
    if config.rollout.backend == "jetstream":
        return ArrayPublisher()
    probe = probe_ids[: min(PROBE_LENGTH, config.rollout.max_model_len - 1)]
    return FilePublisher(WeightFiles(model, probe_ids=[probe], folder=config.rollout.weight_folder))
