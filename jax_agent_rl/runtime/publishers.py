"""Publishers: the forms in which engines get the learner's weights, with probes to verify them."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import device_tensors, hf_tensors
from jax_agent_rl.rollout.object_store import store
from jax_agent_rl.rollout.protocol import BROADCAST, CUDA_IPC, WeightUpdate
from jax_agent_rl.runtime.multihost import LeadingLearner
from jax_agent_rl.runtime.multihost_engines import KIND, WeightBuffer
from jax_agent_rl.trainer.components import Publisher, WeightSource
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.network import is_loopback
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, LogprobProbe, file_digest, write_delta

GIB = 1 << 30


class WeightFiles:
    """The newest weights in safetensors files in shared memory, for engines of other processes.

    Args:
        probe_ids: sequences whose log-probs prove that an engine loaded the weights correctly; any
            text will do.
        folder: where to make the folder; None: shared memory (``/dev/shm``) where there is some, so
            that no byte goes to a disk, else the temporary folder.
        shard_bytes: most bytes per file: that much host memory is needed besides.

    Raises:
        ConfigError: ``folder`` does not exist.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        probe_ids: Sequence[Sequence[int]],
        folder: str | Path | None = None,
        shard_bytes: int = 2 * GIB,
    ) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(
                f"rollout.weight_dir={str(folder)!r} does not exist; every engine must see it, too"
            )
        self._config = config
        self._probe_ids = tuple(tuple(ids) for ids in probe_ids)
        self._shard_bytes = shard_bytes
        self._folder = make_temp_folder(
            "jax_agent_rl-weights-", Path(folder) if folder else None, in_memory=True
        )
        self.digests: dict[str, str] = {}
        """Digests of the newest version's files, by name."""
        self.deltas: dict[str, str] = {}
        """Digest of the previous version's file by the path of what changed in it since."""

    def write(
        self, params: Params, version: int, *, dtype: str = AS_THEY_ARE, delta: bool = False
    ) -> list[str]:
        """Write all parameters, remove the files of the previous version, and return the paths.

        A file appears under its name when it is complete.

        Args:
            version: policy version of the parameters.
            dtype: what they are rounded to.
            delta: also write what changed since the previous version, if there is one and not too
                much did.

        Raises:
            WeightUpdateError: they could not be written.
        """
        previous_digests = self.digests if delta else {}
        self._remove_files(keep=previous_digests)
        self.digests = {}
        self.deltas = {}

        metadata = {
            "format": "pt",
            "policy_version": str(version),
            **self.probe(params, dtype=dtype).to_metadata(),
        }
        paths = []
        for number, tensors in enumerate(self._shards(params, dtype)):
            path = self._folder / f"v{version}-{number:05d}.safetensors"
            incomplete = path.with_suffix(".incomplete")
            try:
                save_file(tensors, incomplete, metadata=metadata)
                self.digests[path.name] = file_digest(incomplete)
                incomplete.rename(path)
                self._write_delta(path, number, previous_digests)
            except (SafetensorError, OSError) as error:
                raise WeightUpdateError(
                    f"the weights of version {version} could not be written to {path} ({error});"
                    " make space there, or set rollout.weight_dir to a folder with room for the"
                    " whole model"
                ) from error
            paths.append(str(path))

        if len(self.deltas) < len(paths):
            self.deltas = {}  # engines take changes of all files, or all files
        self._remove_files(keep={Path(file).name for file in (*paths, *self.deltas)})
        return paths

    def probe(self, params: Params, *, dtype: str = AS_THEY_ARE) -> LogprobProbe:
        """Score the probe sequences by the learner's forward pass, with parameters in ``dtype``."""
        return score_probe(self._config, params, self._probe_ids, dtype=dtype)

    def close(self) -> None:
        """Remove the folder."""
        remove_temp_folder(self._folder)

    def _write_delta(self, path: Path, number: int, previous_digests: Mapping[str, str]) -> None:
        """Write what changed in a file, and delete the previous version's.

        So memory holds one version and a file.
        """
        for name, digest in previous_digests.items():
            if not name.endswith(f"-{number:05d}.safetensors"):
                continue
            if name == path.name:  # the same version is written again
                return
            previous_file = self._folder / name
            delta = write_delta(previous_file, digest, path)
            if delta is not None:
                self.deltas[str(delta)] = digest
            previous_file.unlink()
            return

    def _remove_files(self, *, keep: Collection[str]) -> None:
        for file in self._folder.iterdir():
            if file.name not in keep:
                file.unlink()

    def _shards(self, params: Params, dtype: str) -> Iterator[dict[str, np.ndarray]]:
        shard: dict[str, np.ndarray] = {}
        size = 0
        for name, tensor in hf_tensors(self._config, params, dtype=dtype):
            if shard and size + tensor.nbytes > self._shard_bytes:
                yield shard
                shard = {}
                size = 0
            shard[name] = tensor
            size += tensor.nbytes
        yield shard


PROBE_LENGTH = 96
"""Length of the context that verifies an update: all parameters take part, and it is cheap."""


FindDtype = Callable[[], str]
"""Returns ``Capabilities.weight_dtype`` of the engines that will take the next update."""


class ScoreProbe(Protocol):
    """Scores the sequences that verify an update, with the learner's parameters."""

    def __call__(self, params: Params, *, dtype: str) -> LogprobProbe: ...


class ArrayPublisher(Publisher):
    """Publishes the arrays themselves, and adapters in training, to an engine of this process."""

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        adapters = learner.adapters if isinstance(learner, MultiAdapterLearner) else {}
        return WeightUpdate(
            version=version, kind="arrays", payload=learner.params, adapters=adapters
        )


@dataclass
class FilePublisher(Publisher):
    """Publishes safetensors files with a log-prob probe, to engines of other processes and hosts.

    Args:
        full_every: every so many versions all numbers are sent, else those that changed; 1: always
            all.
    """

    files: WeightFiles
    find_dtype: FindDtype
    full_every: int = 1
    _published: int = 0

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Write all parameters and, if only changes are uploaded, the changes.

        The previous version's files are removed.
        """
        dtype = self.find_dtype()
        is_full = self._published % self.full_every == 0
        files = self.files.write(learner.params, version, dtype=dtype, delta=not is_full)
        self._published += 1
        return WeightUpdate(
            version=version,
            kind="safetensors",
            payload=files,
            lasting=True,
            dtype=dtype,
            digests=self.files.digests,
            deltas=self.files.deltas if self.full_every > 1 else None,
        )

    def close(self) -> None:
        self.files.close()


@dataclass
class DevicePublisher(Publisher):
    """Publishes tensors on one device, to vLLM engines; files while an engine takes no others.

    The device holds a copy of the weights, in the engines' precision, so that an engine that is
    restarted can take it.

    Args:
        kind: ``cuda_ipc``, for engines of this machine, or ``broadcast``.
        files: publishes to engines that do not take this kind.
        find_payloads: returns the kinds of payload that all engines take.
    """

    model: DecoderConfig
    kind: str
    files: Publisher
    find_dtype: FindDtype
    find_payloads: Callable[[], frozenset[str]]
    score_probe: ScoreProbe
    _newest: dict[str, jax.Array] = field(default_factory=dict)

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        self._newest.clear()  # the previous version, to which the newest update may still refer
        dtype = self.find_dtype()
        tensors = None
        if self.kind in self.find_payloads():
            tensors = device_tensors(self.model, learner.params, dtype=dtype)
        if tensors is None:
            return self.files.make(learner, version)

        self._newest = tensors
        probe = self.score_probe(learner.params, dtype=dtype)
        return WeightUpdate(
            version=version, kind=self.kind, payload=tensors, lasting=True, dtype=dtype, probe=probe
        )

    def close(self) -> None:
        self._newest.clear()
        self.files.close()


@dataclass
class MeshPublisher(Publisher):
    """Publishes a copy in each process of the learner, to the engine there.

    Args:
        weight_buffer: the buffer of this process.
    """

    weight_buffer: WeightBuffer

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        assert isinstance(learner, LeadingLearner)  # there are several processes
        learner.fill_weight_buffers(version, self.weight_buffer)
        return WeightUpdate(version=version, kind=KIND, payload=None)


@dataclass
class ObjectStorePublisher(Publisher):
    """Publishes another publisher's update through Ray's object store, to engines in Ray actors.

    Args:
        inner: makes the update in the engines' form.
        score_probe: None if the inner publisher adds a probe, and for a learner of several
            processes.
    """

    inner: Publisher
    find_dtype: FindDtype
    score_probe: ScoreProbe | None = None
    _newest: WeightUpdate | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Store all parameters once; the previous version is freed when no engine reads it."""
        import ray

        dtype = self.find_dtype()
        update = store(self.inner.make(learner, version), ray.put, dtype=dtype)
        if self.score_probe is not None:
            update = replace(update, probe=self.score_probe(learner.params, dtype=dtype))
        self._newest = update
        return update

    def close(self) -> None:
        self._newest = None
        self.inner.close()


class TensorstorePublisher(Publisher):
    """Publishes shards from every process of the learner through a shared folder or bucket.

    Args:
        folder: gets a subfolder for the run.
        score_probe: None for a learner of several processes.
    """

    def __init__(
        self, folder: str, find_dtype: FindDtype, score_probe: ScoreProbe | None = None
    ) -> None:
        self._find_dtype = find_dtype
        self._score_probe = score_probe
        self._root = f"{stored.address(folder)}weights-{secrets.token_hex(8)}/"
        self._served: str | None = None

    def make(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Write a version, make it visible, and remove the previous one.

        Raises:
            OSError: a process of the learner could not write.
        """
        folder = stored.version_folder(self._root, version)
        dtype = self._find_dtype()
        digest = learner.store(folder, dtype)
        previous_folder = self._served
        self._served = folder
        if previous_folder is not None and previous_folder != folder:
            stored.remove(previous_folder)

        probe = None
        if self._score_probe is not None:
            probe = self._score_probe(learner.params, dtype=dtype)
        return WeightUpdate(
            version=version,
            kind="tensorstore",
            payload=folder,
            lasting=True,
            dtype=dtype,
            digests={stored.MANIFEST: digest},
            probe=probe,
        )

    def close(self) -> None:
        stored.remove(self._root)


def make_publisher(
    config: Config,
    model: DecoderConfig,
    *,
    probe_ids: Sequence[int],
    find_dtype: FindDtype,
    find_payloads: Callable[[], frozenset[str]] = frozenset,
    weight_buffer: WeightBuffer | None = None,
) -> Publisher:
    """Return the publisher for the engines of ``rollout.backend`` and ``rollout.placement``.

    Args:
        probe_ids: a typical context, with which weights are verified after a transfer.
        find_dtype: see :data:`FindDtype`; for engines of this process, nothing is rounded on the
            way.
        find_payloads: returns the kinds of payload that all engines take.
        weight_buffer: this process's buffer, where every process of the learner has an engine.

    Raises:
        ConfigError: ``rollout.weight_dir`` does not exist, or a learner of several processes should
            broadcast.
    """
    if weight_buffer is not None:
        return MeshPublisher(weight_buffer)

    probe_ids = probe_ids[: min(PROBE_LENGTH, config.rollout.max_model_len - 1)]
    score = None
    if jax.process_count() == 1 and len(probe_ids) > 1:
        score = functools.partial(score_probe, model, sequences=[probe_ids])
    is_colocated = config.rollout.placement == "colocated"

    if config.rollout.backend == "jetstream":
        if is_colocated:
            return ArrayPublisher()
        return ObjectStorePublisher(ArrayPublisher(), find_dtype, score)

    publisher = _publisher_to_processes(config, model, probe_ids, score, find_dtype, find_payloads)
    if is_colocated:
        return publisher

    publisher = ObjectStorePublisher(publisher, find_dtype)
    if config.rollout.weight_transport != BROADCAST:
        return publisher
    if score is None:
        raise ConfigError(
            f"rollout.weight_transport={BROADCAST} sends from a learner of one process, this one"
            f" has {jax.process_count()}; set rollout.weight_transport=files"
        )
    return DevicePublisher(model, BROADCAST, publisher, find_dtype, find_payloads, score)


def _publisher_to_processes(
    config: Config,
    model: DecoderConfig,
    probe_ids: Sequence[int],
    score: ScoreProbe | None,
    find_dtype: FindDtype,
    find_payloads: Callable[[], frozenset[str]],
) -> Publisher:
    """Return the publisher for engines of other processes."""
    rollout = config.rollout
    if rollout.weight_transport == "tensorstore":
        assert rollout.weight_dir is not None  # checked with the configuration
        return TensorstorePublisher(rollout.weight_dir, find_dtype, score)

    files = WeightFiles(model, probe_ids=[probe_ids], folder=rollout.weight_dir)
    # Engines of this machine, and those that see the folder, map the files and get no bytes sent.
    hosts = [urlsplit(url).hostname or "" for url in rollout.urls]
    is_sent = rollout.weight_dir is None and not all(is_loopback(host) for host in hosts)
    full_every = rollout.full_weights_every if is_sent else 1
    publisher = FilePublisher(files, find_dtype, full_every=full_every)

    is_on_same_gpu = rollout.backend == "vllm" and rollout.placement == "colocated"
    if is_on_same_gpu and score is not None:
        return DevicePublisher(model, CUDA_IPC, publisher, find_dtype, find_payloads, score)
    return publisher
