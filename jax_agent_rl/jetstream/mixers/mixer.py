"""What an engine asks of a sequence mixer.

Shapes as in ``jetstream.forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.models.vision_context import ImageInputs


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What is fixed when a layer is compiled.

    Attributes:
        config: the model, with the engine's ``num_kv_heads``.
        mesh: the engine's mesh, if it has more than one device.
        windowed: the layer sees ``config.sliding_window`` positions only.
        kind: what the layer computes.
    """

    config: DecoderConfig
    mesh: Mesh | None
    windowed: bool
    kind: LayerKind


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """What the layers of a decode step share: one token of each of B slots.

    Attributes:
        shared: what the mixer's ``prepare`` returned.
        positions: int32 [B].
        pages: int32 [B, n], pages of each slot; None if the cache has a row for each slot.
        running: bool [B], slots whose states advance; None for models without states.
    """

    shared: Any
    positions: jax.Array
    pages: jax.Array | None
    running: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkInputs:
    """What the layers of a prefill share: a chunk of T tokens of each of R contexts.

    Attributes:
        shared: what the mixer's ``prepare`` returned.
        starts: int32 [R], position of each chunk's first token.
        lengths: int32 [R], tokens of each chunk, without its padding; None for models without
            states.
        source_chunk: that layer's cache of the chunks, if the layer reads another layer's.
    """

    shared: Any
    starts: jax.Array
    lengths: jax.Array | None = None
    source_chunk: Any = None


@dataclass(frozen=True, kw_only=True)
class EngineMixer:
    """A sequence mixer in an engine.

    Attributes:
        prepare: from a model, rotary positions int32 [B] and perhaps images (with rotary positions
            [.., 3] of the same tokens) to what all layers share, a tree of arrays.
        decode: from a layer, its input [D, B] before the norm and its cache to the output [D, B],
            without the residual, and the cache with the tokens. A layer that shares another
            layer's keys is given that layer's cache, with the tokens, and returns it.
        chunk: the same for chunks: from [D, R T] and a cache of R rows to [D, R T] and a cache of R
            rows that hold the chunks alone.
        empty_cache: from a model, the number of a layer, a number of pages, their positions and a
            dtype to the layer's empty cache.
        cache_sharding: of the caches of all layers; a prefix of their tree.
        is_recurrent: the cache is a state of each slot (``KVCache.states``) instead of pages.
            ``decode`` and ``chunk`` get a row for each slot or context, ``decode`` changes the rows
            that run, ``chunk`` returns a ``recurrent_states.StateChunk``, and ``empty_cache`` gets
            a number of slots.
    """

    prepare: Callable[[DecoderConfig, jax.Array, ImageInputs | None], Any]
    decode: Callable[
        [LayerSettings, AdaptedLayer, jax.Array, Any, DecodeInputs], tuple[jax.Array, Any]
    ]
    chunk: Callable[
        [LayerSettings, AdaptedLayer, jax.Array, Any, ChunkInputs], tuple[jax.Array, Any]
    ]
    empty_cache: Callable[[DecoderConfig, int, int, int, jnp.dtype], Any]
    cache_sharding: Callable[[Mesh], Any]
    is_recurrent: bool = False
