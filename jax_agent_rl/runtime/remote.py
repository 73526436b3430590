"""Engines on other machines (``rollout.backend: remote``): their addresses, the token, and weights as files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.models.hf import save_params
from jax_agent_rl.models.llama import LlamaConfig, Params
from jax_agent_rl.rollout.protocol import BackendMetrics, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.remote.client import RemoteBackend

_MEMORY = Path("/dev/shm")


def remote_backends(config: Config) -> list[RolloutBackend]:
    """A client per address of ``rollout.urls``, not started.

    Raises:
        ConfigError: the variable named by ``rollout.token_env`` is not set.
    """
    token = token_from(config.rollout.token_env)
    shares_disk = True if config.rollout.shared_weight_folder else None
    return [RemoteBackend(url, token=token, shares_disk=shares_disk) for url in config.rollout.urls]


def token_from(variable: str | None) -> str | None:
    """The secret in an environment variable; None if none is named.

    Raises:
        ConfigError: it is named and not set.
    """
    if variable is None:
        return None
    if not (token := os.environ.get(variable)):
        raise ConfigError(f"rollout.token_env names {variable}, which is not set; export {variable}=<the secret>")
    return token


class FolderPublisher:
    """The learner's parameters as a safetensors file, one at a time.

    Args:
        model: the model.
        folder: where to write; None: memory of this machine where it has ``/dev/shm``, else the temporary folder.

    Raises:
        ConfigError: ``folder`` does not exist.
    """

    def __init__(self, model: LlamaConfig, folder: str | None) -> None:
        parent = Path(folder) if folder else (_MEMORY if _MEMORY.is_dir() else None)
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"rollout.shared_weight_folder={folder!r} does not exist; every server must see it, too")
        self._model = model
        self._folder = Path(tempfile.mkdtemp(prefix="jax_agent_rl-weights-", dir=parent))

    def make(self, params: Params, version: int) -> WeightUpdate:
        """Writes all parameters; the file of the version before is removed first."""
        for old in self._folder.iterdir():
            old.unlink()
        file = self._folder / f"v{version}.safetensors"
        save_params(file, self._model, params)
        return WeightUpdate(version=version, kind="safetensors", payload=[str(file)])

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class ArrayPublisher:
    """For an engine of this process: the arrays themselves."""

    def make(self, params: Params, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=params)

    def close(self) -> None:
        pass


class FleetMetrics:
    """The metrics of several engines added up; one that is gone stays in with what it last said."""

    def __init__(self, backends: Sequence[RolloutBackend]) -> None:
        self._backends = backends
        self._last = [BackendMetrics() for _ in backends]

    async def read(self) -> BackendMetrics:
        for i, backend in enumerate(self._backends):
            with contextlib.suppress(BackendError):
                self._last[i] = await backend.metrics()
        names = BackendMetrics.__dataclass_fields__
        return BackendMetrics(**{name: sum(getattr(m, name) for m in self._last) for name in names})
