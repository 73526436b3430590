"""The model as the engine runs it: one prompt chunk, or one token for each of many lanes.

Shapes: B lanes, T chunk tokens, D hidden, H query heads, K key/value heads (as the engine keeps them), G = H / K, h
head size, F feed-forward, V vocabulary, S cache positions. The learner's parameters (``models.decoder``) are turned
once per weight update into :class:`EngineParams`: one set of arrays per layer with q/k/v and gate/up fused, so a step
reads each weight once.

Decoding keeps activations feature-major, [D, B], and multiplies as ``W[out, in] @ x[in, B]``: for few lanes this is
two to three times faster on CPUs than ``x @ W`` and costs nothing elsewhere.

On a mesh (``jetstream.layout``) heads, feed-forward units, experts and the vocabulary lie apart, activations are the
same on every device, and the devices add up twice per layer. No split or reshape below cuts across devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.jetstream.adapters import AdapterStacks, LayerAdapters, add_low_rank, one_hot
from jax_agent_rl.jetstream.attention import DEVICES, chunk_attention, decode_attention
from jax_agent_rl.jetstream.kv import KVCache, LayerKV, stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import embed
from jax_agent_rl.models.layers import ACTIVATIONS, picture_rope_tables, place_features, rms_norm, rope_tables, rotate
from jax_agent_rl.models.mesh import constrain
from jax_agent_rl.models.moe import mixture_of_experts, replicated_mixture_of_experts
from jax_agent_rl.models.pictures import PictureInputs
from jax_agent_rl.models.quantized import product, quantized

QUANTIZED = frozenset({"qkv", "o", "gate_up", "down", "expert_gate", "expert_up", "expert_down"})
"""A layer's matrices, [..., in], which 8 bits are enough for; a router's choices are not smooth."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineParams:
    """All weights in the engine's layout. There is no ``head`` when embeddings are tied, and no ``vision`` (the
    learner's subtree, for ``models.vision``) in a model of text.

    A layer is a dict of the learner's arrays for that layer, but ``qkv`` [K, (G+2)h, D] (and ``qkv_bias`` [K, (G+2)h])
    in place of q, k, v: for each key/value head its queries, its keys, its values. ``gate_up`` [2, F, D] is in place of
    gate and up. Those of ``QUANTIZED`` may be ``models.quantized.Quantized``.
    """

    embed: jax.Array
    layers: tuple[Params, ...]
    final_norm: jax.Array
    head: jax.Array | None
    vision: Params | None = None


def engine_params(
    config: DecoderConfig, params: Params, *, dtype: jnp.dtype, quantize: jnp.dtype | None = None
) -> EngineParams:
    """The learner's parameter tree in the engine's layout (a pure function: jit it, nothing leaves the device).

    Args:
        config: with ``num_kv_heads`` as the engine keeps them: a multiple of the parameters', which are repeated.
        dtype: of all that is not quantised.
        quantize: int8 or float8 for the matrices of layers, a scale for each output; None keeps them in ``dtype``.
    """
    layers = params["layers"]
    rest = jax.tree.map(lambda x: x.astype(dtype), {name: x for name, x in params.items() if name != "layers"})

    def layer(i: int) -> Params:
        fused = _fuse(config, {name: x[i] for name, x in layers.items()})
        return {
            name: x.astype(dtype) if quantize is None or name not in QUANTIZED else quantized(x, quantize, axis=-1)
            for name, x in fused.items()
        }

    return EngineParams(
        # + 0 makes a new buffer: the learner donates its own to the next optimizer step.
        embed=rest["embed"] + 0,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm=rest["final_norm"] + 0,
        head=rest["lm_head"] + 0 if "lm_head" in rest else None,
        vision=jax.tree.map(lambda x: x + 0, rest["vision"]) if "vision" in rest else None,
    )


def _fuse(config: DecoderConfig, layer: Params) -> Params:
    layer = dict(layer)
    for fused, parts in (("qkv", ("q", "k", "v")), ("qkv_bias", ("q_bias", "k_bias", "v_bias"))):
        if parts[0] in layer:
            layer[fused] = jnp.concatenate([_by_kv_head(config, layer.pop(part)) for part in parts], axis=1)
    if "gate" in layer:
        layer["gate_up"] = jnp.stack([layer.pop("gate"), layer.pop("up")])
    return layer


def _by_kv_head(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """[n h, ...] -> [K, m h, ...]: m = n / K query heads each; or of fewer than K key/value heads one, repeated."""
    heads = len(x) // config.head_dim
    kv_heads = min(heads, config.num_kv_heads)
    return jnp.repeat(x.reshape(kv_heads, -1, *x.shape[1:]), config.num_kv_heads // kv_heads, axis=0)


def decode_step(
    config: DecoderConfig,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    positions: jax.Array,
    rope_offsets: jax.Array | None = None,
    mesh: Mesh | None = None,
    pages: jax.Array | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Feeds one token per lane and returns the logits of the next.

    Args:
        cache: one row per lane, or pages; positions below ``positions`` hold the context.
        tokens: int32 [B].
        positions: int32 [B], where each token goes.
        rope_offsets: int32 [B], how much further each token stands in rotary positions, for contexts with pictures
            (``models.pictures.rope_positions``); the token itself is text. None: no further.
        mesh: the engine's, if it has more than one device.
        pages: int32 [B, n], those of each lane, in place of rows; for TPUs.
        adapters: those of the engine, None where it has none.
        adapter: int32 [B], the adapter of each lane, see ``jetstream.adapters.one_hot``.

    Returns:
        logits float32 [V, B] (whole on every device) and the cache with the tokens' keys and values written.
    """
    heads, size, lanes = config.num_heads, config.head_dim, len(tokens)
    x = constrain(embed_tokens(config, params, tokens).T, mesh)  # [D, B]
    tables = _rope(config, positions if rope_offsets is None else positions + rope_offsets)
    windows = (None, config.sliding_window)
    multipliers = _multipliers(params, adapters, adapter)
    layers = []
    for i, (layer, cached) in enumerate(zip(params.layers, cache.layers, strict=True)):
        window, multiply = windows[config.is_windowed(i)], multipliers[i]
        q, k, v = _project(config, layer, multiply, x, *tables[config.is_windowed(i)])
        q, new = q.transpose(3, 0, 1, 2), (k.transpose(2, 0, 1), v.transpose(2, 0, 1))
        mixed, cached = decode_attention(q, cached, new, positions, pages, window=window, mesh=mesh)
        mixed = mixed.reshape(lanes, heads * size).T
        x = _finish_layer(config, layer, multiply, x, multiply("o", mixed), mesh)
        layers.append(cached)
    x = rms_norm(config, x, params.final_norm, axis=0)
    head = params.embed if params.head is None else params.head
    logits = jnp.einsum("vd,db->vb", head, x, preferred_element_type=jnp.float32)
    logits = constrain(logits, mesh, DEVICES)  # or XLA might rather gather the head than its product
    return constrain(logits, mesh), KVCache(tuple(layers))


def prefill_chunks(
    config: DecoderConfig,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    pictures: PictureInputs | None = None,
    mesh: Mesh | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
) -> tuple[LayerKV, ...]:
    """Keys and values of one chunk of each of R contexts, given the positions before it. No logits: decoding begins
    with the context's last token, so whoever shares a prompt needs no prefill at all.

    Args:
        cache: R rows holding the positions below ``starts``.
        tokens: int32 [R, T], padded at the end; what padding writes is overwritten before it is ever visible.
        starts: int32 [R], position of ``tokens[:, 0]``.
        pictures: what the chunks show, and rotary positions [R, T, 3] of their tokens; None for text whose rotary
            positions are its cache positions.
        mesh: the engine's, if it has more than one device.
        adapters: those of the engine, None where it has none.
        adapter: int32 [R], the adapter of each context.

    Returns:
        per layer, as the cache keeps them: keys [R, K, h, T] and values [R, K, T, h].
    """
    layers = chunk_layers(config, params, cache, tokens, starts, pictures, mesh, adapters, adapter)
    return tuple(own for _, own in layers)


def chunk_layers(
    config: DecoderConfig,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    pictures: PictureInputs | None = None,
    mesh: Mesh | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
) -> Iterator[tuple[jax.Array, LayerKV]]:
    """Compute :func:`prefill_chunks` layer by layer: yield the residual stream [D, R T] behind each, and its KV."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    rows, count = tokens.shape
    x = embed_tokens(config, params, tokens.reshape(-1))
    if pictures is not None:
        x = place_features(x.reshape(rows, count, -1), pictures).reshape(rows * count, -1)
    x = constrain(x.T, mesh)  # [D, R T]
    if pictures is None:
        tables = _rope(config, (starts[:, None] + jnp.arange(count)).reshape(-1))
    else:
        tables = _picture_rope(config, pictures.rope_positions.reshape(-1, 3))
    windows = (None, config.sliding_window)
    multipliers = _multipliers(params, adapters, None if adapter is None else jnp.repeat(adapter, count))
    for i, (layer, cached) in enumerate(zip(params.layers, cache.layers, strict=True)):
        window, multiply = windows[config.is_windowed(i)], multipliers[i]
        q, k, v = _project(config, layer, multiply, x, *tables[config.is_windowed(i)])
        q = q.reshape(*q.shape[:-1], rows, count)
        k = k.reshape(kv_heads, size, rows, count).transpose(2, 0, 1, 3)  # [R, K, h, T]
        v = v.reshape(kv_heads, size, rows, count).transpose(2, 0, 3, 1)  # [R, K, T, h]
        own = stored(k, v, cached.keys.dtype)
        mixed = chunk_attention(q, cached, own, starts, window=window, mesh=mesh)
        mixed = mixed.reshape(heads * size, rows * count)
        x = _finish_layer(config, layer, multiply, x, multiply("o", mixed), mesh)
        yield x, own


Multiply = Callable[[str, jax.Array], jax.Array]
"""A layer's matrix, by name, times x [in, B] -> [..., out, B], with the adapters of the lanes."""


def _multipliers(params: EngineParams, adapters: AdapterStacks | None, adapter: jax.Array | None) -> list[Multiply]:
    """Return for every layer what multiplies with its matrices; ``adapter`` is int32 [B]."""
    if adapters is None or adapter is None:
        return [lambda name, x, layer=layer: product(layer[name], x) for layer in params.layers]
    chosen = one_hot(adapter, adapters, params.embed.dtype)

    def multiply(layer: Params, own: LayerAdapters, name: str, x: jax.Array) -> jax.Array:
        out = product(layer[name], x)
        return add_low_rank(out, own[name], x, chosen) if name in own else out

    pairs = zip(params.layers, adapters.layers, strict=True)
    return [functools.partial(multiply, layer, own) for layer, own in pairs]


def _project(
    config: DecoderConfig, layer: Params, multiply: Multiply, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated and scaled queries [K, G, h, B], rotated keys and values [K, h, B] of x [D, B]; cos and sin [h/2, B]."""
    qkv = multiply("qkv", rms_norm(config, x, layer["input_norm"], axis=0))
    if config.qkv_bias:
        qkv = qkv + layer["qkv_bias"][..., None]
    qkv = qkv.reshape(config.num_kv_heads, -1, config.head_dim, x.shape[1])
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if config.qk_norm:
        q = rms_norm(config, q, layer["q_norm"], axis=2)
        k = rms_norm(config, k, layer["k_norm"], axis=1)
    return rotate(q, cos, sin, axis=2) * config.score_scale, rotate(k, cos, sin, axis=1), v


def _finish_layer(
    config: DecoderConfig, layer: Params, multiply: Multiply, x: jax.Array, mixed: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """Residual, feed-forward, residual on [D, B]."""
    mixed = constrain(mixed, mesh)
    if not config.sandwich_norms:
        x = x + mixed
        normed = rms_norm(config, x, layer["post_attention_norm"], axis=0)
        return x + _feed_forward(config, layer, multiply, normed, mesh)
    x = x + rms_norm(config, mixed, layer["post_attention_norm"], axis=0)
    normed = rms_norm(config, x, layer["pre_feedforward_norm"], axis=0)
    out = _feed_forward(config, layer, multiply, normed, mesh)
    return x + rms_norm(config, out, layer["post_feedforward_norm"], axis=0)


def _feed_forward(
    config: DecoderConfig, layer: Params, multiply: Multiply, x: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """The gated network, or the mixture of experts, on [D, B]."""
    activation = ACTIVATIONS[config.activation]
    if config.experts is not None and mesh is not None:
        return replicated_mixture_of_experts(config.experts, layer, x.T, activation, mesh).T
    if config.experts is not None:
        return mixture_of_experts(config.experts, layer, x.T, activation).T
    gate, up = multiply("gate_up", x)
    return constrain(multiply("down", activation(gate) * up), mesh)


def embed_tokens(config: DecoderConfig, params: EngineParams, tokens: jax.Array) -> jax.Array:
    """Embeddings [B, D] of int32 [B]."""
    return embed(config, {"embed": params.embed}, tokens)


def _rope(config: DecoderConfig, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """cos and sin [h/2, B] of full layers, and of windowed ones."""
    ropes = (config.rope, config.local_rope or config.rope)
    tables = (rope_tables(rope, config.head_dim, positions) for rope in ropes)
    return tuple((cos.T, sin.T) for cos, sin in tables)


def _picture_rope(config: DecoderConfig, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """The same at positions [B, 3]; no model that reads pictures has windowed layers."""
    cos, sin = picture_rope_tables(config.rope, config.head_dim, positions)
    return ((cos.T, sin.T),)
