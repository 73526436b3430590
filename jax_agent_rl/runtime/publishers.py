"""The form in which engines take the learner's weights."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from jax_agent_rl.config import Config
from jax_agent_rl.learner.export import WeightFiles
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.ray.weights import store
from jax_agent_rl.runtime.multihost import LeadingLearner
from jax_agent_rl.runtime.multihost_engines import KIND, WeightBuffer
from jax_agent_rl.trainer.components import Publisher, WeightSource

PROBE_LENGTH = 96
"""Ids of the context that proves an update: enough to touch every parameter, and cheap to recompute."""


class ArrayPublisher:
    """For an engine of this process: the arrays themselves."""

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=learner.params)

    def close(self) -> None:
        pass


class FilePublisher:
    """For engines of other processes and machines: safetensors files that carry a log-prob probe."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Writes all parameters; the files of the version before are removed first."""
        files = self._files.write(learner.params, version)
        return WeightUpdate(
            version=version, kind="safetensors", payload=files, lasting=True, digests=self._files.digests
        )

    def close(self) -> None:
        self._files.close()


class MeshPublisher:
    """For engines beside a learner of several processes: a copy in each, see ``runtime.host_engines``.

    Args:
        shelf: of this process.
    """

    def __init__(self, shelf: WeightBuffer) -> None:
        self._shelf = shelf

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        assert isinstance(learner, LeadingLearner)  # one process has no others
        learner.hand_out(version, self._shelf)
        return WeightUpdate(version=version, kind=KIND, payload=None)

    def close(self) -> None:
        pass


class ObjectStorePublisher:
    """For engines in Ray actors: what another publisher makes, in Ray's object store, from where all of them read it.

    Args:
        inner: makes it in the form in which the engines take it.
    """

    def __init__(self, inner: Publisher) -> None:
        self._inner = inner
        self._newest: WeightUpdate | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Writes all parameters once; the store forgets those of the version before when no engine reads them."""
        import ray

        self._newest = store(self._inner.make(learner, version), ray.put)
        return self._newest

    def close(self) -> None:
        self._newest = None
        self._inner.close()


class TensorstorePublisher:
    """For engines that see a folder or bucket: shards from every process of the learner, for every engine's own.

    Args:
        folder: where; a folder of the run's own is made in it.
    """

    def __init__(self, folder: str) -> None:
        self._root = f"{stored.address(folder)}weights-{secrets.token_hex(8)}/"
        self._served: str | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Writes a version, makes it visible, and removes the one before.

        Raises:
            OSError: a process of the learner could not write.
        """
        folder, before = stored.version_folder(self._root, version), self._served
        digest = learner.store(folder)
        self._served = folder
        if before not in (None, folder):
            stored.remove(before)
        return WeightUpdate(
            version=version, kind="tensorstore", payload=folder, lasting=True, digests={stored.MANIFEST: digest}
        )

    def close(self) -> None:
        stored.remove(self._root)


def make_publisher(
    config: Config, model: DecoderConfig, *, probe_ids: Sequence[int], shelf: WeightBuffer | None = None
) -> Publisher:
    """What the engines of ``rollout.backend`` and ``rollout.placement`` take weights from.

    Args:
        probe_ids: a typical context, by which weights are checked after they were moved.
        shelf: of this process, where every process of the learner has an engine.

    Raises:
        ConfigError: ``rollout.weight_dir`` does not exist.
    """
    if shelf is not None:
        return MeshPublisher(shelf)
    form = _form(config, model, probe_ids)
    return form if config.rollout.placement == "colocated" else ObjectStorePublisher(form)


def _form(config: Config, model: DecoderConfig, probe_ids: Sequence[int]) -> Publisher:
    if config.rollout.backend == "jetstream":
        return ArrayPublisher()
    if config.rollout.weight_transport == "tensorstore":
        assert config.rollout.weight_dir is not None  # by the configuration's own checks
        return TensorstorePublisher(config.rollout.weight_dir)
    probe = probe_ids[: min(PROBE_LENGTH, config.rollout.max_model_len - 1)]
    return FilePublisher(WeightFiles(model, probe_ids=[probe], folder=config.rollout.weight_dir))
