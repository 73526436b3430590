"""The learner's parameters as safetensors files for engines in other processes, with log-probs to verify them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, LogprobProbe, file_digest, write_delta

GIB = 1 << 30
_MEMORY = Path("/dev/shm")


class WeightFiles:
    """A folder in shared memory that holds the newest weights.

    Args:
        config: the model.
        probe_ids: sequences whose log-probs prove that an engine loaded the weights correctly; any text will do.
        folder: where to make the folder; None: shared memory (``/dev/shm``) where there is some, so that no byte goes
            to a disk, else the temporary folder.
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
            raise ConfigError(f"rollout.weight_dir={str(folder)!r} does not exist; every engine must see it, too")
        memory = _MEMORY if _MEMORY.is_dir() else None
        self._config = config
        self._probe_ids = tuple(tuple(ids) for ids in probe_ids)
        self._shard_bytes = shard_bytes
        self._folder = make_temp_folder("jax_agent_rl-weights-", Path(folder) if folder else memory)
        self.digests: dict[str, str] = {}
        """Of the newest version's files, by name."""
        self.deltas: dict[str, str] = {}
        """Paths of what changed in each file since the version before, with the digest of the file that changed."""

    def write(self, params: Params, version: int, *, dtype: str = AS_THEY_ARE, delta: bool = False) -> list[str]:
        """Write all parameters, remove the files of the version before, and return the paths.

        A file appears under its name when it is whole.

        Args:
            params: the parameters.
            version: their policy version.
            dtype: what they are rounded to.
            delta: also write what changed since the version before, if there is one and not too much did.

        Raises:
            WeightUpdateError: they could not be written.
        """
        before = self.digests if delta else {}
        self._clear(before)
        self.digests, self.deltas = {}, {}
        metadata = {"format": "pt", "policy_version": str(version), **self.probe(params, dtype=dtype).to_metadata()}
        paths = []
        for number, tensors in enumerate(self._shards(params, dtype)):
            path = self._folder / f"v{version}-{number:05d}.safetensors"
            begun = path.with_suffix(".begun")
            try:
                save_file(tensors, begun, metadata=metadata)
                self.digests[path.name] = file_digest(begun)
                begun.rename(path)
                self._write_delta(path, number, before)
            except (SafetensorError, OSError) as error:
                raise WeightUpdateError(
                    f"the weights of version {version} could not be written to {path} ({error}); make space there, or "
                    "set rollout.weight_dir to a folder with room for the whole model"
                ) from error
            paths.append(str(path))
        if len(self.deltas) < len(paths):
            self.deltas = {}
        self._clear({Path(file).name for file in (*paths, *self.deltas)})
        return paths

    def probe(self, params: Params, *, dtype: str = AS_THEY_ARE) -> LogprobProbe:
        """Score the probe sequences by the learner's own forward pass, with the parameters rounded to ``dtype``."""
        return score_probe(self._config, params, self._probe_ids, dtype=dtype)

    def close(self) -> None:
        """Remove the folder."""
        remove_temp_folder(self._folder)

    def _write_delta(self, path: Path, number: int, before: Mapping[str, str]) -> None:
        """Write what changed in a file, and delete the one before: memory holds one version and a file."""
        old = next((name for name in before if name.endswith(f"-{number:05d}.safetensors")), None)
        if old is None or old == path.name:  # the latter: a version is written again
            return
        if (delta := write_delta(self._folder / old, before[old], path)) is not None:
            self.deltas[str(delta)] = before[old]
        (self._folder / old).unlink()

    def _clear(self, keep: Collection[str]) -> None:
        for file in self._folder.iterdir():
            if file.name not in keep:
                file.unlink()

    def _shards(self, params: Params, dtype: str) -> Iterator[dict[str, np.ndarray]]:
        shard: dict[str, np.ndarray] = {}
        size = 0
        for name, tensor in hf_tensors(self._config, params, dtype=dtype):
            if shard and size + tensor.nbytes > self._shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[name] = tensor
            size += tensor.nbytes
        yield shard
