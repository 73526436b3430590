"""The model as the engine runs it: one prompt chunk, or one token for each of many lanes.

Shapes: B lanes, T chunk tokens, D hidden, H query heads, K key/value heads, h head size, F feed-forward, V
vocabulary, S cache positions. The learner's parameters (``models.llama``) are turned once per weight update into
:class:`EngineParams`: one set of arrays per layer with q/k/v and gate/up fused, so a step reads each weight once.

Decoding keeps activations feature-major, [D, B], and multiplies as ``W[out, in] @ x[in, B]``: for few lanes this is
two to three times faster on CPUs than ``x @ W`` and costs nothing elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_agent_rl.models.llama import LlamaConfig, rope_frequencies

NEGATIVE = -1e30  # masks a score; finite, so a fully masked lane stays free of NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer: ``qkv`` [(H+2K)h, D], ``o`` [D, Hh], ``gate_up`` [2F, D], ``down`` [D, F], two norms [D]."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array
    input_norm: jax.Array
    post_attention_norm: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineParams:
    """All weights in the engine's layout; ``head`` is ``embed`` itself when embeddings are tied."""

    embed: jax.Array
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array
    head: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys [N, K, h, S] and values [N, K, S, h] per layer, N rows: the layouts their products read in order."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def length(self) -> int:
        return self.keys[0].shape[-1]


def engine_params(params: dict) -> EngineParams:
    """The learner's parameter tree in the engine's layout (a pure function: jit it, nothing leaves the device)."""
    layers = params["layers"]
    count = layers["q"].shape[0]
    return EngineParams(
        # + 0 makes a new buffer: the learner donates its own to the next optimizer step.
        embed=params["embed"] + 0,
        layers=tuple(
            LayerParams(
                qkv=jnp.concatenate([layers["q"][i], layers["k"][i], layers["v"][i]]),
                o=layers["o"][i],
                gate_up=jnp.concatenate([layers["gate"][i], layers["up"][i]]),
                down=layers["down"][i],
                input_norm=layers["input_norm"][i],
                post_attention_norm=layers["post_attention_norm"][i],
            )
            for i in range(count)
        ),
        final_norm=params["final_norm"] + 0,
        head=params["lm_head"] + 0 if "lm_head" in params else None,
    )


def empty_cache(config: LlamaConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """A cache of zeros."""
    heads, size = config.num_kv_heads, config.head_dim
    return KVCache(
        keys=tuple(jnp.zeros((rows, heads, size, length), dtype) for _ in range(config.num_layers)),
        values=tuple(jnp.zeros((rows, heads, length, size), dtype) for _ in range(config.num_layers)),
    )


def decode_step(
    config: LlamaConfig, params: EngineParams, cache: KVCache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Feeds one token per lane and returns the logits of the next.

    Args:
        cache: one row per lane; positions below ``positions`` hold the context.
        tokens: int32 [B].
        positions: int32 [B], where each token goes.

    Returns:
        logits float32 [V, B] and the cache with the tokens' keys and values written.
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    lanes = tokens.shape[0]
    lane = jnp.arange(lanes)
    x = params.embed[tokens].T  # [D, B]
    cos, sin = (table.T for table in _rope(config, positions))  # [h/2, B]
    visible = jnp.arange(cache.length) <= positions[:, None]  # [B, S]
    keys, values = [], []
    for layer, k_cache, v_cache in zip(params.layers, cache.keys, cache.values, strict=True):
        normed = _norm(x, layer.input_norm, config.rms_norm_eps, axis=0)
        qkv = _matmul(layer.qkv, normed).reshape(heads + 2 * kv_heads, size, lanes)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads))
        q, k = _rotate(q, cos, sin, axis=1), _rotate(k, cos, sin, axis=1)
        k_cache = k_cache.at[lane, :, :, positions].set(k.transpose(2, 0, 1).astype(k_cache.dtype))
        v_cache = v_cache.at[lane, :, positions].set(v.transpose(2, 0, 1).astype(v_cache.dtype))
        q = q.reshape(kv_heads, heads // kv_heads, size, lanes).transpose(3, 0, 1, 2) * size**-0.5
        scores = jnp.einsum("bkgh,bkhs->bkgs", q, k_cache, preferred_element_type=jnp.float32)
        scores = jnp.where(visible[:, None, None], scores, NEGATIVE)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_cache.dtype)
        mixed = jnp.einsum("bkgs,bksh->bkgh", weights, v_cache).reshape(lanes, heads * size).T
        x = x + _matmul(layer.o, mixed)
        x = x + _feed_forward(layer, _norm(x, layer.post_attention_norm, config.rms_norm_eps, axis=0))
        keys.append(k_cache)
        values.append(v_cache)
    x = _norm(x, params.final_norm, config.rms_norm_eps, axis=0)
    head = params.embed if params.head is None else params.head
    logits = jnp.einsum("vd,db->vb", head, x, preferred_element_type=jnp.float32)
    return logits, KVCache(tuple(keys), tuple(values))


def prefill_chunks(
    config: LlamaConfig, params: EngineParams, cache: KVCache, tokens: jax.Array, starts: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Keys and values of one chunk of each of R contexts, given the positions before it. No logits: decoding begins
    with the context's last token, so whoever shares a prompt needs no prefill at all.

    Args:
        cache: R rows holding the positions below ``starts``.
        tokens: int32 [R, T], padded at the end; what padding writes is overwritten before it is ever visible.
        starts: int32 [R], position of ``tokens[:, 0]``.

    Returns:
        per layer: keys [R, K, h, T] and values [R, K, T, h].
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    rows, count = tokens.shape
    x = params.embed[tokens.reshape(-1)].T  # [D, R T]
    positions = (starts[:, None] + jnp.arange(count)).reshape(-1)
    cos, sin = (table.T for table in _rope(config, positions))  # [h/2, R T]
    # The chunk is attended to directly, the cache only below ``starts``.
    before = jnp.broadcast_to((jnp.arange(cache.length) < starts[:, None])[:, None], (rows, count, cache.length))
    within = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (rows, count, count))
    visible = jnp.concatenate([before, within], axis=2)[:, None, None]  # [R, 1, 1, T, S + T]
    new = []
    for layer, k_cache, v_cache in zip(params.layers, cache.keys, cache.values, strict=True):
        normed = _norm(x, layer.input_norm, config.rms_norm_eps, axis=0)
        qkv = _matmul(layer.qkv, normed).reshape(heads + 2 * kv_heads, size, rows * count)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads))
        q = _rotate(q, cos, sin, axis=1).reshape(kv_heads, heads // kv_heads, size, rows, count) * size**-0.5
        k = _rotate(k, cos, sin, axis=1).reshape(kv_heads, size, rows, count)
        k = k.transpose(2, 0, 1, 3).astype(k_cache.dtype)  # [R, K, h, T]
        v = v.reshape(kv_heads, size, rows, count).transpose(2, 0, 3, 1).astype(v_cache.dtype)  # [R, K, T, h]
        all_keys = jnp.concatenate([k_cache, k], axis=3)
        all_values = jnp.concatenate([v_cache, v], axis=2)
        scores = jnp.einsum("kghrt,rkhs->rkgts", q, all_keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, scores, NEGATIVE), axis=-1).astype(v_cache.dtype)
        mixed = jnp.einsum("rkgts,rksh->kghrt", weights, all_values).reshape(heads * size, rows * count)
        x = x + _matmul(layer.o, mixed)
        x = x + _feed_forward(layer, _norm(x, layer.post_attention_norm, config.rms_norm_eps, axis=0))
        new.append((k, v))
    return tuple(new)


def _matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("od,db->ob", weight, x)


def _feed_forward(layer: LayerParams, x: jax.Array) -> jax.Array:
    """SwiGLU on [D, B]."""
    gate, up = jnp.split(_matmul(layer.gate_up, x), 2)
    return _matmul(layer.down, jax.nn.silu(gate) * up)


def _norm(x: jax.Array, weight: jax.Array, epsilon: float, *, axis: int) -> jax.Array:
    """RMS norm over ``axis`` in float32, as Hugging Face computes it."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + epsilon)
    shape = [1] * x.ndim
    shape[axis] = -1
    return weight.reshape(shape) * scaled.astype(x.dtype)


def _rope(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [.., h/2] of the rotary angles."""
    angles = positions[:, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, axis: int) -> jax.Array:
    """Rotates halves along ``axis`` (Hugging Face's layout)."""
    first, second = jnp.split(x, 2, axis=axis)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return rotated.astype(x.dtype)
