"""Whether an update's weights are those of the model served, and how files become arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jax_agent_rl.checksums import check_files
from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.jetstream.layout import parameter_places
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_params
from jax_agent_rl.rollout.protocol import WeightUpdate


class ServedWeights:
    """Shapes and types of the parameters an engine serves.

    Args:
        params: the first ones; not kept.
        mesh: the engine's: of files each device reads its part.
    """

    def __init__(self, config: DecoderConfig, params: Params, mesh: Mesh) -> None:
        self._config = config
        self._places = parameter_places(config, mesh)
        self._structure = jax.tree.map(lambda x: (x.shape, x.dtype), params)

    def read(self, update: WeightUpdate) -> WeightUpdate:
        """Files to arrays in the learner's layout, which an engine then takes like any.

        Raises:
            WeightUpdateError: they are not those that were sent, or not of this model.
        """
        check_files(update.payload, update.digests)
        dtype = self._structure["embed"][1]
        try:
            params = load_params(update.payload, self._config, dtype=dtype, shardings=self._places)
        except ModelError as error:
            raise WeightUpdateError(f"the update does not fit the model served: {error}") from error
        return replace(update, kind="arrays", payload=params)

    def check(self, update: WeightUpdate, version: int) -> None:
        """Whether an update can follow ``version``.

        Raises:
            WeightUpdateError: it cannot; says why.
        """
        if update.kind != "arrays" or update.partial:
            kind = f"kind={update.kind!r}, partial={update.partial}"
            raise WeightUpdateError(
                f"the jetstream backend takes whole updates of 'arrays' or 'safetensors', got {kind}"
            )
        if update.version <= version:
            raise WeightUpdateError(f"version {update.version} is not newer than {version}, which is served")
        structure = jax.tree.map(lambda x: (x.shape, x.dtype), update.payload)
        if structure != self._structure:
            what = _difference(self._structure, structure)
            raise WeightUpdateError(f"the update does not fit the model served: {what}")


def _difference(old: Any, new: Any) -> str:
    """The first parameter in which two trees of (shape, dtype) differ, in words."""
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    before = {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(old, is_leaf=is_leaf)}
    after = {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(new, is_leaf=is_leaf)}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            return f"{name} is {after.get(name, 'missing')}, served is {before.get(name, 'nothing')}"
    return "the trees are nested differently"
