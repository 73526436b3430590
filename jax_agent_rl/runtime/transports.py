"""The transports of weights, and which one a run uses.

They differ in who holds the bytes, and in how an engine gets them::

    transport             holds the bytes                     an engine
    ArrayTransport        the learner                         copies the arrays
    HostTransport         each process of the learner         takes those of its process
    FileTransport         a folder, in memory if it may be    opens paths, or gets an upload
    ShardTransport        a shared folder or bucket           reads the parts of its devices
    PullTransport         the learner's devices               pulls the parts onto its devices
    ObjectStoreTransport  Ray's store, once on every node     reads views of the store
    DeviceTransport       the learner's first device          gets CUDA handles, or a broadcast

Weights that leave the process are rounded to what the engines compute in, and a probe goes with
them: log-probs of a few token ids, which they have to give where they arrive. ``HostTransport`` is
in ``multihost_engines``, ``ObjectStoreTransport`` in ``rollout.transport``.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from safetensors import SafetensorError

from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import device_tensors, hf_tensors
from jax_agent_rl.models.offered import OFFER, OfferedParams
from jax_agent_rl.models.tensors import save_tensors
from jax_agent_rl.rollout.protocol import (
    ARRAYS,
    BROADCAST,
    CUDA_IPC,
    FILES,
    PULL,
    SHARDS,
    WeightUpdate,
)
from jax_agent_rl.rollout.transport import (
    Engines,
    ObjectStoreTransport,
    ScoreProbe,
    WeightSource,
    WeightTransport,
)
from jax_agent_rl.runtime.multihost import LeadingLearner
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.fingerprints import read_fingerprint
from jax_agent_rl.utils.network import is_loopback
from jax_agent_rl.utils.weight_deltas import write_delta
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

GIB = 1 << 30
PROBE_LENGTH = 96
"""Length of the context that verifies an update: all parameters take part, and it is cheap."""


def make_transport(
    config: Config, model: DecoderConfig, engines: Engines, *, probe_ids: Sequence[int]
) -> WeightTransport:
    """Return the transport to the engines of ``rollout.backend`` and ``rollout.placement``.

    Args:
        engines: see :class:`Engines`; for engines of this process, nothing is rounded on the way.
        probe_ids: a typical context, with which weights are verified after a transfer.

    Raises:
        ConfigError: ``rollout.weight_dir`` does not exist, or a learner of several processes should
            broadcast.
    """
    rollout = config.rollout
    is_colocated = rollout.placement == "colocated"
    probe_ids = probe_ids[: min(PROBE_LENGTH, rollout.max_model_len - 1)]
    score: ScoreProbe | None = None
    if jax.process_count() == 1 and len(probe_ids) > 1:
        score = functools.partial(score_probe, model, sequences=[probe_ids])

    is_divided = jax.process_count() > 1
    has_no_probe = rollout.weight_transport == BROADCAST and score is None
    if has_no_probe or (rollout.weight_transport == PULL and is_divided):
        raise ConfigError(
            f"rollout.weight_transport={rollout.weight_transport} sends from a learner of one"
            f" process, this one has {jax.process_count()}; set rollout.weight_transport=files, or"
            " tensorstore with rollout.weight_dir"
        )

    if rollout.backend == "jetstream":
        if is_colocated:
            return ArrayTransport()
        return ObjectStoreTransport(ArrayTransport(), engines, score)

    if rollout.weight_transport == "tensorstore":
        assert rollout.weight_dir is not None  # checked with the configuration
        return ShardTransport(rollout.weight_dir, engines, score)
    if rollout.weight_transport == PULL:
        return PullTransport(engines, score)

    # Engines of this machine, and those that see the folder, map the files and get no bytes sent.
    hosts = [urlsplit(url).hostname or "" for url in rollout.urls]
    is_elsewhere = not all(is_loopback(host) for host in hosts)
    is_sent = rollout.backend == "remote" and rollout.weight_dir is None and is_elsewhere
    files = FileTransport(
        model,
        engines,
        probe_ids=[probe_ids],
        folder=rollout.weight_dir,
        full_every=rollout.full_weights_every if is_sent else 1,
    )
    if is_colocated:
        if rollout.backend == "vllm" and score is not None:  # on the learner's GPU
            return DeviceTransport(CUDA_IPC, model, engines, score, instead=files)
        return files

    objects = ObjectStoreTransport(files, engines)
    if rollout.weight_transport == BROADCAST and score is not None:
        return DeviceTransport(BROADCAST, model, engines, score, instead=objects)
    return objects


class ArrayTransport(WeightTransport):
    """Offers the arrays themselves, and adapters in training, to an engine of this process."""

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        adapters: Mapping[str, Any] = {}
        if isinstance(learner, MultiAdapterLearner):
            adapters = learner.adapters
        return WeightUpdate(version=version, kind=ARRAYS, payload=learner.params, adapters=adapters)

    def release(self) -> None:
        """Do nothing: the arrays are the learner's."""


class FileTransport(WeightTransport):
    """Offers the newest weights in safetensors files, to engines of other processes and hosts.

    Args:
        engines: None: nothing is rounded.
        probe_ids: sequences whose log-probs prove that an engine loaded the weights correctly; any
            text will do.
        folder: where to make the folder; None: shared memory (``/dev/shm``) where there is some, so
            that no byte goes to a disk, else the temporary folder.
        full_every: every so many versions all numbers are sent, else those that changed; 1: always
            all.
        shard_bytes: most bytes per file: that much host memory is needed besides.

    Raises:
        ConfigError: ``folder`` does not exist.
    """

    def __init__(
        self,
        config: DecoderConfig,
        engines: Engines | None = None,
        *,
        probe_ids: Sequence[Sequence[int]],
        folder: str | Path | None = None,
        full_every: int = 1,
        shard_bytes: int = 2 * GIB,
    ) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(
                f"rollout.weight_dir={str(folder)!r} does not exist; every engine must see it"
            )
        self._config = config
        self._engines = engines
        self._probe_ids = tuple(tuple(ids) for ids in probe_ids)
        self._full_every = full_every
        self._shard_bytes = shard_bytes
        self._folder = make_temp_folder(
            "jax_agent_rl-weights-", Path(folder) if folder else None, in_memory=True
        )
        self._offered = 0
        self._digests: dict[Path, str] = {}  # of the newest version's files, in order

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        dtype = AS_THEY_ARE
        if self._engines is not None:
            dtype = self._engines.weight_dtype()
        return self.write(learner.params, version, dtype=dtype)

    def write(self, params: Params, version: int, *, dtype: str = AS_THEY_ARE) -> WeightUpdate:
        """Write all parameters and, if only changes are uploaded, the changes.

        The files of the previous version are removed, each as soon as its successor is written, so
        that memory holds one version and a file. A file appears under its name when it is complete.

        Args:
            dtype: what the parameters are rounded to.

        Raises:
            WeightUpdateError: they could not be written.
        """
        bases: list[tuple[Path, str]] = []
        if self._offered % self._full_every:
            bases = list(self._digests.items())
        self._remove_files(keep=[base for base, _ in bases])
        self._digests = {}

        deltas: dict[str, str] = {}
        for number, tensors in enumerate(self._shards(params, dtype)):
            path = self._folder / f"v{version}-{number:05d}.safetensors"
            incomplete = path.with_suffix(".incomplete")
            try:
                save_tensors(tensors, incomplete, {"policy_version": str(version)})
                self._digests[path] = read_fingerprint(incomplete)
                incomplete.rename(path)
                if number < len(bases) and bases[number][0] != path:  # a version may be repeated
                    base, base_digest = bases[number]
                    delta = write_delta(base, base_digest, path)
                    base.unlink()
                    if delta is not None:
                        deltas[str(delta)] = base_digest
            except (SafetensorError, OSError) as error:
                raise WeightUpdateError(
                    f"the weights of version {version} could not be written to {path} ({error});"
                    " make space there, or set rollout.weight_dir to a folder with room for the"
                    " whole model"
                ) from error

        self._remove_files(keep=[*self._digests, *map(Path, deltas)])
        self._offered += 1
        return WeightUpdate(
            version=version,
            kind=FILES,
            payload=[str(path) for path in self._digests],
            lasting=True,
            dtype=dtype,
            digests={path.name: digest for path, digest in self._digests.items()},
            deltas=deltas if self._full_every > 1 else None,
            probe=score_probe(self._config, params, self._probe_ids, dtype=dtype),
        )

    def release(self) -> None:
        """Remove the folder."""
        remove_temp_folder(self._folder)

    def _remove_files(self, *, keep: Collection[Path]) -> None:
        for file in self._folder.iterdir():
            if file not in keep:
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


class ShardTransport(WeightTransport):
    """Offers shards that every process of the learner writes, through a shared folder or bucket.

    Args:
        folder: gets a subfolder for the run.
        score_probe: None for a learner of several processes.
    """

    def __init__(
        self, folder: str, engines: Engines, score_probe: ScoreProbe | None = None
    ) -> None:
        self._engines = engines
        self._score_probe = score_probe
        self._root = f"{stored.address(folder)}weights-{secrets.token_hex(8)}/"
        self._newest: str | None = None

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Write a version, make it visible, and remove the previous one."""
        folder = stored.version_folder(self._root, version)
        dtype = self._engines.weight_dtype()
        if isinstance(learner, LeadingLearner):
            digest = learner.store(folder, dtype)
        else:
            digest = stored.store(folder, learner.params, dtype=dtype)
        previous_folder = self._newest
        self._newest = folder
        if previous_folder is not None and previous_folder != folder:
            stored.remove(previous_folder)

        probe = None
        if self._score_probe is not None:
            probe = self._score_probe(learner.params, dtype=dtype)
        return WeightUpdate(
            version=version,
            kind=SHARDS,
            payload=folder,
            lasting=True,
            dtype=dtype,
            digests={stored.MANIFEST: digest},
            probe=probe,
        )

    def release(self) -> None:
        stored.remove(self._root)


@dataclass
class PullTransport(WeightTransport):
    """Offers a copy of the weights on the learner's devices, for JAX engines of other processes.

    It is in the engines' precision, and stays until the next version, so that an engine that joins
    or is restarted can pull it.
    """

    engines: Engines
    score_probe: ScoreProbe | None = None
    _newest: OfferedParams | None = None

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        self.release()  # its memory is needed for the next copy
        kinds = self.engines.weight_payloads()
        if PULL not in kinds:
            raise WeightUpdateError(
                f"rollout.weight_transport={PULL} needs engines that pull weights, those of"
                f" rollout.urls take {sorted(kinds)}; serve the model with rollout.backend="
                "jetstream, or set rollout.weight_transport=files"
            )

        dtype = self.engines.weight_dtype()
        newest = OfferedParams(learner.params, version=version, dtype=dtype)
        self._newest = newest
        probe = None
        if self.score_probe is not None:
            probe = self.score_probe(learner.params, dtype=dtype)
        return WeightUpdate(
            version=version,
            kind=PULL,
            payload=newest,
            lasting=True,
            dtype=dtype,
            digests={OFFER: newest.digest},
            probe=probe,
        )

    def release(self) -> None:
        if self._newest is not None:
            self._newest.release()
            self._newest = None


@dataclass
class DeviceTransport(WeightTransport):
    """Offers tensors on one device, to vLLM engines.

    The device holds a copy of the weights, in the engines' precision, so that an engine that is
    restarted can take it.

    Args:
        kind: ``cuda_ipc``, for engines of this machine, or ``broadcast``.
        instead: offers the weights while an engine does not take this kind.
    """

    kind: str
    model: DecoderConfig
    engines: Engines
    score_probe: ScoreProbe
    instead: WeightTransport
    _newest: dict[str, jax.Array] = field(default_factory=dict)

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        self._newest.clear()  # the previous version, to which the newest update may still refer
        dtype = self.engines.weight_dtype()
        tensors = None
        if self.kind in self.engines.weight_payloads():
            tensors = device_tensors(self.model, learner.params, dtype=dtype)
        if tensors is None:
            return self.instead.offer(learner, version)

        self._newest = tensors
        probe = self.score_probe(learner.params, dtype=dtype)
        return WeightUpdate(
            version=version, kind=self.kind, payload=tensors, lasting=True, dtype=dtype, probe=probe
        )

    def release(self) -> None:
        self._newest.clear()
        self.instead.release()
