"""Supports of restricted draws in packed rows. Shapes: R rows, M targets, V vocabulary.

They stay encoded until a micro-batch is made: their masks take V / 8 bytes a target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_agent_rl.types import Support
from jax_agent_rl.utils.sampling_support import decode_supports, mask_words


@dataclass(frozen=True, kw_only=True)
class RowSupports:
    """The supports of R rows' targets.

    Attributes:
        supports: of each row's valid targets in order; None: all ids.
        vocab_size: V.
    """

    supports: tuple[tuple[Support | None, ...], ...]
    vocab_size: int

    def micro_batch(self, begin: int, rows: int, targets: int) -> dict[str, np.ndarray]:
        """Return ``target_support``, uint32 [rows, targets, ceil(V / 32)], of ``rows`` rows from ``begin`` on.

        Args:
            begin: the first row.
            rows: count; rows beyond the last one have all bits set, as have targets that are not valid.
            targets: M.

        Raises:
            ValueError: a support is of another vocabulary.
        """
        masks = np.full((rows, targets, mask_words(self.vocab_size)), 0xFFFFFFFF, np.uint32)
        for mask, supports in zip(masks, self.supports[begin : begin + rows], strict=False):
            mask[: len(supports)] = decode_supports(supports, self.vocab_size)
        return {"target_support": masks}


def row_supports(supports: list[tuple[Support | None, ...]], vocab_size: int | None) -> RowSupports | None:
    """Return the supports of rows; None if no draw was restricted.

    Raises:
        ValueError: there are supports, and the vocabulary's size is not known.
    """
    if all(support is None for row in supports for support in row):
        return None
    if vocab_size is None:
        raise ValueError("trajectories with supports are packed for a vocabulary; give its size")
    return RowSupports(supports=tuple(supports), vocab_size=vocab_size)
