"""Which tokens of a packed row see which."""

from __future__ import annotations

from typing import NamedTuple

import jax

MASK_VALUE = -1e30  # masks a score; finite, so that a row of padding stays free of NaN


class TreeMask(NamedTuple):
    """Which tokens a token sees: i sees j iff ``j <= i < subtree_end[j]`` and j is within the window.

    Attributes:
        subtree_end: int32 [B, T].
        positions: int32 [B, T], depth of each token in its tree; needed for a window.
        window: int32 []: ``positions[i] - positions[j] < window``; None for no window.
        offset: int32 []: where in the row the first query stands; None where all tokens of the row are queries.
    """

    subtree_end: jax.Array
    positions: jax.Array | None = None
    window: jax.Array | None = None
    offset: jax.Array | None = None
