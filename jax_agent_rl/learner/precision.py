"""Mixed precision: float32 master parameters, products in another type (Micikevicius et al. 2018, arXiv 1710.03740).

The cast is part of the differentiated program, so gradients come back in float32 and are summed and applied in it: an
update smaller than half a bfloat16 step (1/256 of a weight) is kept by the master parameters and counts in the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.models.config import Params

FLOAT32_ALWAYS = frozenset({"value_head"})  # values are regressed to, not sampled from: they are read in full


def compute_params(params: Params, dtype: str) -> Params:
    """The parameters as the forward pass reads them; float32 gives back the very same arrays."""
    target = jnp.dtype(dtype)

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        return x if x.dtype == target or path[-1].key in FLOAT32_ALWAYS else x.astype(target)

    return jax.tree_util.tree_map_with_path(cast, params)
