"""Validation of weight updates, and reading them from files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.jetstream.layout import parameter_places
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_params
from jax_agent_rl.models.stored import MANIFEST, StoredParams
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.utils.weight_checks import check_files

FILES = frozenset({"safetensors", "tensorstore"})
WEIGHT_PAYLOADS = FILES | {"arrays"}


class ServedWeights:
    """Shapes and types of the parameters an engine serves.

    Args:
        config: the model.
        params: the first ones; not kept.
        mesh: the engine's; each device reads its part of files.
    """

    def __init__(self, config: DecoderConfig, params: Params, mesh: Mesh) -> None:
        self._config = config
        self._places = parameter_places(config, mesh)
        self._structure = jax.tree.map(lambda x: (x.shape, x.dtype), params)

    def read(self, update: WeightUpdate) -> WeightUpdate:
        """Read files, or a folder of shards, into arrays in the learner's layout.

        Raises:
            WeightUpdateError: they are damaged, or of another model.
        """
        dtype = self._structure["embed"][1]
        if update.kind == "tensorstore":
            return replace(update, kind="arrays", payload=self._read_stored(update, dtype))
        check_files(update.payload, update.digests)
        try:
            params = load_params(update.payload, self._config, dtype=dtype, shardings=self._places)
        except ModelError as error:
            raise WeightUpdateError(f"the update does not fit the model served: {error}") from error
        return replace(update, kind="arrays", payload=params)

    def _read_stored(self, update: WeightUpdate, dtype: jnp.dtype) -> Params:
        if not isinstance(update.payload, str):
            raise WeightUpdateError(f"payload must be the address of a folder, got {type(update.payload).__name__}")
        stored = StoredParams(update.payload, manifest_digest=update.digests.get(MANIFEST))
        return stored.read(self._config.parameter_shapes(), dtype=dtype, shardings=self._places)

    def check(self, update: WeightUpdate, version: int) -> None:
        """Check that an update can follow ``version``.

        Raises:
            WeightUpdateError: it cannot.
        """
        if update.kind != "arrays" or update.partial:
            kind = f"kind={update.kind!r}, partial={update.partial}"
            raise WeightUpdateError(
                f"the jetstream backend takes whole updates of {sorted(WEIGHT_PAYLOADS)}, got {kind}"
            )
        if update.version <= version:
            raise WeightUpdateError(f"version {update.version} is not newer than {version}, which is served")
        structure = jax.tree.map(lambda x: (x.shape, x.dtype), update.payload)
        if structure != self._structure:
            what = _difference(self._structure, structure)
            raise WeightUpdateError(f"the update does not fit the model served: {what}")


def _difference(old: Any, new: Any) -> str:
    """Describe the first parameter in which two trees of (shape, dtype) differ."""
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    before = {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(old, is_leaf=is_leaf)}
    after = {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(new, is_leaf=is_leaf)}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            return f"{name} is {after.get(name, 'missing')}, served is {before.get(name, 'nothing')}"
    return "the trees are nested differently"
