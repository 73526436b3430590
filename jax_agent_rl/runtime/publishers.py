"""Publishers: the forms in which engines receive the learner's weights."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from jax_agent_rl.config import Config
from jax_agent_rl.learner.export import WeightFiles
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.ray.weights import store
from jax_agent_rl.runtime.multihost import LeadingLearner
from jax_agent_rl.runtime.multihost_engines import KIND, WeightBuffer
from jax_agent_rl.trainer.components import Publisher, WeightSource

PROBE_LENGTH = 96
"""Length of the context that verifies an update: touches every parameter and is cheap to recompute."""


FindDtype = Callable[[], str]
"""Returns ``Capabilities.weight_dtype`` of the engines that will take the next update."""


class ArrayPublisher:
    """Publishes the arrays themselves, to an engine of this process."""

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=learner.params)

    def close(self) -> None:
        pass


class AdapterPublisher:
    """Publishes adapters in training and the model below them, to an engine of this process."""

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        assert isinstance(learner, MultiAdapterLearner)  # with agent.role_adapters
        return WeightUpdate(version=version, kind="arrays", payload=learner.params, adapters=learner.adapters)

    def close(self) -> None:
        pass


class FilePublisher:
    """Publishes safetensors files with a log-prob probe, to engines of other processes and machines.

    Args:
        files: writes them.
        find_dtype: see :data:`FindDtype`.
    """

    def __init__(self, files: WeightFiles, find_dtype: FindDtype) -> None:
        self._files = files
        self._find_dtype = find_dtype

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Write all parameters, after removing the previous version's files."""
        dtype = self._find_dtype()
        files = self._files.write(learner.params, version, dtype=dtype)
        digests = self._files.digests
        return WeightUpdate(
            version=version, kind="safetensors", payload=files, lasting=True, dtype=dtype, digests=digests
        )

    def close(self) -> None:
        self._files.close()


class MeshPublisher:
    """Publishes a copy in each process of the learner, to its engine, see ``runtime.multihost_engines``.

    Args:
        weight_buffer: the buffer of this process.
    """

    def __init__(self, weight_buffer: WeightBuffer) -> None:
        self._weight_buffer = weight_buffer

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        assert isinstance(learner, LeadingLearner)  # there are several processes
        learner.fill_weight_buffers(version, self._weight_buffer)
        return WeightUpdate(version=version, kind=KIND, payload=None)

    def close(self) -> None:
        pass


class ObjectStorePublisher:
    """Publishes another publisher's update through Ray's object store, to engines in Ray actors.

    Args:
        inner: makes the update in the engines' form.
        find_dtype: see :data:`FindDtype`.
    """

    def __init__(self, inner: Publisher, find_dtype: FindDtype) -> None:
        self._inner = inner
        self._find_dtype = find_dtype
        self._newest: WeightUpdate | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Store all parameters once; the previous version is freed when no engine reads it."""
        import ray

        self._newest = store(self._inner.make(learner, version), ray.put, dtype=self._find_dtype())
        return self._newest

    def close(self) -> None:
        self._newest = None
        self._inner.close()


class TensorstorePublisher:
    """Publishes shards from every process of the learner through a shared folder or bucket.

    Args:
        folder: gets a subfolder for the run.
        find_dtype: see :data:`FindDtype`.
    """

    def __init__(self, folder: str, find_dtype: FindDtype) -> None:
        self._find_dtype = find_dtype
        self._root = f"{stored.address(folder)}weights-{secrets.token_hex(8)}/"
        self._served: str | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Write a version, make it visible, and remove the one before.

        Raises:
            OSError: a process of the learner could not write.
        """
        folder, before = stored.version_folder(self._root, version), self._served
        dtype = self._find_dtype()
        digest = learner.store(folder, dtype)
        self._served = folder
        if before not in (None, folder):
            stored.remove(before)
        digests = {stored.MANIFEST: digest}
        return WeightUpdate(
            version=version, kind="tensorstore", payload=folder, lasting=True, dtype=dtype, digests=digests
        )

    def close(self) -> None:
        stored.remove(self._root)


def make_publisher(
    config: Config,
    model: DecoderConfig,
    *,
    probe_ids: Sequence[int],
    find_dtype: FindDtype,
    weight_buffer: WeightBuffer | None = None,
) -> Publisher:
    """Return the publisher for the engines of ``rollout.backend`` and ``rollout.placement``.

    Args:
        config: the resolved configuration.
        model: the policy's hyperparameters.
        probe_ids: a typical context, with which weights are verified after a transfer.
        find_dtype: see :data:`FindDtype`; for engines of this process, nothing is rounded on the way.
        weight_buffer: this process's buffer, where every process of the learner has an engine.

    Raises:
        ConfigError: ``rollout.weight_dir`` does not exist.
    """
    if weight_buffer is not None:
        return MeshPublisher(weight_buffer)
    if config.agent.role_adapters:
        return AdapterPublisher()
    form = _form(config, model, probe_ids, find_dtype)
    return form if config.rollout.placement == "colocated" else ObjectStorePublisher(form, find_dtype)


def _form(config: Config, model: DecoderConfig, probe_ids: Sequence[int], find_dtype: FindDtype) -> Publisher:
    if config.rollout.backend == "jetstream":
        return ArrayPublisher()
    if config.rollout.weight_transport == "tensorstore":
        assert config.rollout.weight_dir is not None  # checked with the configuration
        return TensorstorePublisher(config.rollout.weight_dir, find_dtype)
    probe = probe_ids[: min(PROBE_LENGTH, config.rollout.max_model_len - 1)]
    return FilePublisher(WeightFiles(model, probe_ids=[probe], folder=config.rollout.weight_dir), find_dtype)
