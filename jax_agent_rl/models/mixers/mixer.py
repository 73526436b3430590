"""What a decoder asks of a sequence mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.vision_context import ImageInputs


@dataclass(frozen=True, kw_only=True)
class TokenTrees:
    """Where the tokens of packed rows stand: B rows of T tokens, each row a forest.

    Attributes:
        positions: int32 [B, T], depth of each token in its tree.
        subtree_end: int32 [B, T], index one past a token's last descendant. Token i sees j iff
            ``j <= i < subtree_end[j]``.
        images: their rotary positions take the place of ``positions``; None for text alone.
    """

    positions: jax.Array
    subtree_end: jax.Array
    images: ImageInputs | None = None


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A sequence mixer: what lets the tokens of a row see each other.

    Attributes:
        prepare: from a decoder, whether layers are windowed, and the tokens to what all such layers
            share: a tree of arrays, computed once for them.
        mix: from a layer, its normalized input [B, T, D] and what it shares to its output [B, T,
            D], which is added to the residual stream.
        keys_and_values: what other layers may read of a layer, from the same arguments; None if
            there is no such thing.
        mix_with: ``mix`` with the keys and values of another layer as a further argument.
    """

    prepare: Callable[[DecoderConfig, bool, TokenTrees], Any]
    mix: Callable[[LayerWeights, jax.Array, Any], jax.Array]
    keys_and_values: Callable[[LayerWeights, jax.Array, Any], Any] | None = None
    mix_with: Callable[[LayerWeights, jax.Array, Any, Any], jax.Array] | None = None
