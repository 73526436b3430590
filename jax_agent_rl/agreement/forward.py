"""The learner's model without packing: one context per row, and every setting that might be wrong an argument.

Positions, rotary tables, windows and keys and values of other weights are arrays here, so that one compiled program
serves almost every hypothesis. Its layers are the learner's own (``models.decoder``).

Shapes: B contexts, T ids, D hidden, K key/value heads, h head size, L layers, S compared tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_agent_rl.generation import decode_supports
from jax_agent_rl.learner.linear_logprobs import NEGATIVE
from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.config import DecoderConfig, Params, Rope
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.layers import embed, rms_norm, rope_tables
from jax_agent_rl.models.tree_kernel import TreeMask
from jax_agent_rl.types import Support

TOKENS_PER_CHUNK = 32  # whose logits are in memory together


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows of ids, as numpy arrays.

    Attributes:
        token_ids: int32 [B, T], padded at the end.
        positions: int32 [B, T].
        fresh: bool [B, T], ids whose keys and values are of these weights.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    fresh: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Outputs of the layers: ``hidden`` [L, B, T, D] after each, its ``keys`` and ``values`` [L, B, K, T, h]."""

    embedded: jax.Array
    hidden: jax.Array
    keys: jax.Array
    values: jax.Array


def hidden_states(config: DecoderConfig, params: Params, inputs: Inputs, old: Activations | None = None) -> jax.Array:
    """Return the final hidden states [B, T, D], after the last norm.

    Args:
        config: the model's hyperparameters.
        params: its weights.
        inputs: rows of ids.
        old: activations whose keys and values are attended to where ``inputs.fresh`` is false.
    """
    return _run(config, params, inputs, old, keep=False)[0]


def activations(config: DecoderConfig, params: Params, inputs: Inputs) -> Activations:
    """Return the activations between the layers."""
    _, (hidden, keys, values) = _run(config, params, inputs, None, keep=True)
    return Activations(
        embedded=embed(config, params["embed"], jnp.asarray(inputs.token_ids)), hidden=hidden, keys=keys, values=values
    )


def logprobs(
    params: Params,
    hidden: jax.Array,
    ids: np.ndarray,
    temperatures: tuple[float, ...] | np.ndarray,
    supports: Sequence[Support | None] = (),
) -> np.ndarray:
    """Compute log-probs at several temperatures.

    Args:
        params: of the output head.
        hidden: [S, D].
        ids: int [S].
        temperatures: C numbers that divide the logits.
        supports: of the draws, S of them; empty if none was restricted.

    Returns:
        float64 [C, S].
    """
    head = params.get("lm_head", params["embed"])
    masks = _chunks(jnp.asarray(decode_supports(supports, len(head)))) if supports else None
    parts = (_chunks(hidden), head, _chunks(jnp.asarray(ids, jnp.int32)), masks)
    return np.asarray(_chosen_logprobs(*parts, jnp.asarray(temperatures, jnp.float32)), np.float64)[:, : len(ids)]


def sorted_mass(params: Params, hidden: jax.Array, temperature: float, ks: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Compute the probability mass of the likeliest ids.

    Args:
        params: of the output head.
        hidden: [S, D].
        temperature: divides the logits.
        ks: int [C].
        mass: float [S].

    Returns:
        float64 [C + 3, S]: that of the k likeliest ids for each k; then of the number of ids whose mass is nearest to
        ``mass`` that number, their mass, and the mass of one id less.
    """
    head = params.get("lm_head", params["embed"])
    arguments = (_chunks(hidden), head, jnp.float32(temperature), jnp.asarray(ks, jnp.int32))
    return np.asarray(_mass(*arguments, _chunks(jnp.asarray(mass, jnp.float32))), np.float64)[:, : len(hidden)]


def _run(
    config: DecoderConfig, params: Params, inputs: Inputs, old: Activations | None, *, keep: bool
) -> tuple[jax.Array, Any]:
    length = inputs.token_ids.shape[1]
    positions = jnp.asarray(inputs.positions)
    ropes = (config.rope, config.local_rope or config.rope)
    full, local = (rope_tables(rope, config.head_dim, positions) for rope in ropes)
    windowed = [config.is_windowed(i) for i in range(config.num_layers)]
    everything = 2 * length + int(inputs.positions.max(initial=0))
    windows = [config.sliding_window if w and config.sliding_window else everything for w in windowed]
    # Arguments are no part of the program: other settings run the same one.
    rope = Rope(interleaved=config.rope.interleaved)
    fixed = replace(config, rope=rope, local_rope=None, sliding_window=None, windowed_layers=(), vision=None)
    params = {name: x for name, x in params.items() if name != "vision"}
    tables = tuple(jnp.stack(pair) for pair in zip(full, local, strict=True))
    layers = (jnp.asarray(windowed, jnp.int32), jnp.asarray(windows, jnp.int32))
    ids, fresh = jnp.asarray(inputs.token_ids), jnp.asarray(inputs.fresh)
    old_kv = None if old is None else (old.keys, old.values)
    return _layers(fixed, params, ids, positions, tables, layers, old_kv, fresh, keep=keep)


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def _layers(
    config: DecoderConfig,
    params: Params,
    ids: jax.Array,
    positions: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    settings: tuple[jax.Array, jax.Array],
    old: tuple[jax.Array, jax.Array] | None,
    fresh: jax.Array,
    *,
    keep: bool,
) -> tuple[jax.Array, Any]:
    ends = jnp.full(ids.shape, ids.shape[1], jnp.int32)
    model = Decoder.from_params(config, params)
    graphdef, state = nnx.split(model.layers)

    def body(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
        layer, (local, window), seen = scanned
        own: list[jax.Array] = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            kv = (k, v)
            own.extend(kv)
            if seen is not None:
                kv = tuple(jnp.where(fresh[:, None, :, None], x, old) for x, old in zip(kv, seen, strict=True))
            return tree_attention(q, *kv, TreeMask(ends, positions, window), sinks)

        x, _ = nnx.merge(graphdef, layer)(x, tables[0][local], tables[1][local], attend)
        return x, (x, *own) if keep else None

    x, kept = jax.lax.scan(body, embed(config, model.embed[...], ids), (state, settings, old))
    return rms_norm(config, x, model.final_norm[...]), kept


def _chunks(x: jax.Array) -> jax.Array:
    """Reshape [S, ...] to [chunks, TOKENS_PER_CHUNK, ...], padded with zeros."""
    padded = jnp.pad(x, ((0, -len(x) % TOKENS_PER_CHUNK),) + ((0, 0),) * (x.ndim - 1))
    return padded.reshape(-1, TOKENS_PER_CHUNK, *x.shape[1:])


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.einsum("sd,vd->sv", hidden, head, preferred_element_type=jnp.float32)


@jax.jit
def _chosen_logprobs(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, masks: jax.Array | None, temperatures: jax.Array
) -> jax.Array:
    def chunk(part: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        hidden, ids, mask = part
        scores = _logits(hidden, head)
        chosen = jnp.take_along_axis(scores, ids[:, None], axis=1)[:, 0]
        if mask is not None:
            bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
            scores = jnp.where(bits.reshape(len(mask), -1)[:, : len(head)] == 1, scores, NEGATIVE)

        def at(temperature: jax.Array) -> jax.Array:
            return chosen / temperature - jax.nn.logsumexp(scores / temperature, axis=-1)

        return jax.lax.map(at, temperatures)

    return jnp.moveaxis(jax.lax.map(chunk, (hidden, ids, masks)), 0, 1).reshape(len(temperatures), -1)


@jax.jit
def _mass(hidden: jax.Array, head: jax.Array, temperature: jax.Array, ks: jax.Array, mass: jax.Array) -> jax.Array:
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        probabilities = jax.nn.softmax(_logits(part[0], head) / temperature, axis=-1)
        total = jnp.cumsum(-jnp.sort(-probabilities, axis=-1), axis=-1)
        last = total.shape[1] - 1
        nearest = jnp.argmin(jnp.abs(total - part[1][:, None]), axis=-1)
        reached, below = (
            jnp.take_along_axis(total, jnp.maximum(nearest - less, 0)[:, None], axis=1)[:, 0] for less in (0, 1)
        )
        by_k = total[:, jnp.clip(ks - 1, 0, last)].T
        return jnp.concatenate([by_k, jnp.stack([nearest + 1.0, reached, jnp.where(nearest > 0, below, 0.0)])])

    return jnp.moveaxis(jax.lax.map(chunk, (hidden, mass)), 0, 1).reshape(len(ks) + 3, -1)
