"""What callers may ask of a running engine besides generation.

- Log-probs of given ids, and the likeliest other ids, for callers that distill from its model.
- Diagnosis: samples of its weights by published name, and its layers' outputs.

The engine's state and its table of programs stay as they are. Scoring::

    ids ─► chunks of one length ─► prefill with a cache of their own ─► logits ─► log-probs, top k

Contexts are scored one at a time, between the engine's steps, by one program for each power of two
of their length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.forward import (
    EXPERTS,
    EngineParams,
    head_of,
    next_logits,
    prefill_chunks,
)
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, from_cache
from jax_agent_rl.jetstream.mixers.delta_net import ungroup
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.jetstream.recurrent_states import states_after_chunks
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import HEAD, tensor_names
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.models.layers import Quantized, embed
from jax_agent_rl.models.moe import transpose_matrices
from jax_agent_rl.models.tensors import LayerOutput, TensorSample, named_tensors
from jax_agent_rl.types import TokenScores

CHUNK = 256
"""Ids that are prefilled together."""
BLOCK = 64
"""Ids whose logits are in memory together, and are computed only if one of them is to be scored."""


def score(scheduler: Scheduler, token_ids: Sequence[int], *, start: int, top_k: int) -> TokenScores:
    """Score the ids of a context from ``start`` on, see :meth:`RolloutBackend.score`.

    Args:
        scheduler: holds the weights.
        start: index of the first id to score.
        top_k: how many of the likeliest ids to report at each.

    Raises:
        BackendError: the context is longer than the engine's, or the engine sleeps.
    """
    engine = scheduler.engine
    params = scheduler.params
    count = len(token_ids)
    if count > engine.shapes.max_model_len:
        raise BackendError(
            f"a context of {count} ids is longer than max_model_len={engine.shapes.max_model_len}"
        )
    if isinstance(params.embed, np.ndarray):
        raise BackendError("the engine sleeps: its weights are on the host; wake it to score")

    # In full precision: it holds but one context.
    length = max(CHUNK, 1 << (count - 1).bit_length())
    dtype = engine.context.dtype
    cache = empty_cache(engine.config, 1, length, dtype, num_states=1, state_dtype=dtype)
    padded = np.zeros(length + 1, np.int32)
    padded[:count] = token_ids

    chunk_scores: list[tuple[jax.Array, jax.Array, jax.Array]] = []
    for begin in range(0, count - 1, CHUNK):
        ids = padded[None, begin : begin + CHUNK]
        following = padded[begin + 1 : begin + CHUNK + 1]
        index = np.arange(begin + 1, begin + CHUNK + 1)
        is_scored = (index >= start) & (index < count)
        starts = np.full(1, begin, np.int32)
        constants = (engine.config, engine.context.split, top_k)
        cache, scores = _score_chunk(*constants, params, cache, ids, following, is_scored, starts)
        chunk_scores.append(scores)

    # One transfer for all chunks. The first row is of the second id.
    host_scores = jax.device_get(chunk_scores)
    scored = slice(start - 1, count - 1)
    log_probs = np.concatenate([chunk[0] for chunk in host_scores])[scored]
    if not top_k:
        return TokenScores(log_probs=tuple(log_probs.tolist()), top_ids=(), top_log_probs=())
    top_ids = np.concatenate([chunk[1] for chunk in host_scores])[scored]
    top_log_probs = np.concatenate([chunk[2] for chunk in host_scores])[scored]
    return TokenScores(
        log_probs=tuple(log_probs.tolist()),
        top_ids=tuple(tuple(ids) for ids in top_ids.tolist()),
        top_log_probs=tuple(tuple(row) for row in top_log_probs.tolist()),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _score_chunk(
    config: DecoderConfig,
    mesh: Mesh | None,
    top_k: int,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    following: jax.Array,
    is_scored: jax.Array,
    starts: jax.Array,
) -> tuple[KVCache, tuple[jax.Array, jax.Array, jax.Array]]:
    """Score a chunk.

    Returns:
        The cache with the chunk, and the scores: log-probs [T] of the ``following`` ids, and the
        likeliest ids [T, k] with their log-probs. Scores mean nothing where ``is_scored``,
        bool [T], is false.
    """
    # Padding comes after the last id that is scored.
    lengths = jnp.full(1, tokens.shape[1], jnp.int32) if cache.states else None
    layers = prefill_chunks(config, params, cache, tokens, starts, mesh=mesh, lengths=lengths)
    size = min(BLOCK, len(following))

    def score_block(
        block: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, following, is_scored = block  # [D, N], [N], [N]
        no_top = jnp.zeros((size, top_k))

        def scores() -> tuple[jax.Array, jax.Array, jax.Array]:
            logs = jax.nn.log_softmax(next_logits(config, params, x, mesh), axis=0).T  # [N, V]
            top, ids = jax.lax.top_k(logs, top_k)
            return jnp.take_along_axis(logs, following[:, None], axis=1)[:, 0], ids, top

        def zeros() -> tuple[jax.Array, jax.Array, jax.Array]:
            return jnp.zeros(size), no_top.astype(jnp.int32), no_top

        return jax.lax.cond(jnp.any(is_scored), scores, zeros)

    hidden = layers[-1][0].reshape(-1, len(following) // size, size)
    hidden = jnp.moveaxis(hidden, 1, 0)  # [n, D, N]
    blocks = (hidden, following.reshape(-1, size), is_scored.reshape(-1, size))
    log_probs, top_ids, top_log_probs = (
        x.reshape(len(following), *x.shape[2:]) for x in jax.lax.map(score_block, blocks)
    )

    def write(axis: int, cached: jax.Array, chunk: jax.Array) -> jax.Array:
        chunk = chunk.astype(cached.dtype)
        return jax.lax.dynamic_update_slice_in_dim(cached, chunk, starts[0], axis)

    chunks = cache.with_entries([chunk for _, chunk, _ in layers], cache.routed)
    layers_after: list[Any] = []
    for cached, chunk in zip(cache.layers, chunks.layers, strict=True):
        layers_after.append(None if cached is None else cached.by_position(write, chunk))
    cache = replace(cache, layers=tuple(layers_after), states=states_after_chunks(chunks.states))
    return cache, (log_probs, top_ids, top_log_probs)


def tensor_samples(model: DecoderConfig, scheduler: Scheduler) -> Mapping[str, TensorSample]:
    """Sample every tensor; empty for external engines.

    The head is what logits are read from, whatever the model says: its own tensor, or the
    embeddings.

    Args:
        model: with the learner's number of key/value heads.
        scheduler: holds the weights.
    """
    params = scheduler.params
    if not isinstance(params, EngineParams):
        return {}
    names = tensor_names(model)
    samples = {
        names["embed"]: TensorSample.of(np.asarray(params.embed)),
        names["final_norm"]: TensorSample.of(np.asarray(params.final_norm)),
        HEAD: TensorSample.of(np.asarray(head_of(params))),
    }

    for name, array in (params.per_layer or {}).items():
        samples[names[name]] = TensorSample.of(np.asarray(array))
    if params.vision is not None:
        tower_names = jax.tree.leaves(names["vision"], is_leaf=_is_list)
        arrays = [np.asarray(x) for x in jax.tree.leaves(params.vision)]
        for name, array in named_tensors(list(zip(tower_names, arrays, strict=True))):
            samples[name] = TensorSample.of(array)

    for i, layer in enumerate(params.layers):
        layer_arrays = []
        for key, array in _split(model, model.layer_kind(i), layer).items():
            index = model.layers_with(key).index(i)
            layer_arrays.append((names["layers"][key][index], array))
        for name, array in named_tensors(layer_arrays):
            samples[name] = TensorSample.of(array)
    return samples


def _is_list(names: Any) -> bool:
    return isinstance(names, list)


def layer_outputs(scheduler: Scheduler, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
    """Return the layers' outputs for a context prefilled in one chunk.

    They are empty for external engines, and while the engine sleeps.
    """
    params = scheduler.params
    engine = scheduler.engine
    if not isinstance(params, EngineParams) or isinstance(params.embed, np.ndarray):
        return []
    config = engine.config
    mesh = engine.context.split
    ids = jnp.asarray(token_ids, jnp.int32)

    @jax.jit
    def run(
        params: EngineParams,
    ) -> tuple[jax.Array, list[tuple[jax.Array, Any, jax.Array | None]]]:
        # An empty page: all of the context is in the chunk.
        cache = empty_cache(
            config,
            1,
            engine.shapes.page,
            engine.context.kv_dtype,
            num_states=1,
            state_dtype=engine.context.dtype,
        )
        lengths = jnp.full(1, len(ids), jnp.int32) if cache.states else None
        starts = jnp.zeros(1, jnp.int32)
        layers = prefill_chunks(
            config, params, cache, ids[None], starts, mesh=mesh, lengths=lengths
        )
        return embed(config, params.embed, ids), layers

    embedded, layers = jax.device_get(run(params))
    outputs = [LayerOutput(hidden=np.asarray(embedded, np.float32))]
    for hidden, cached, _ in layers:
        stream = np.asarray(hidden, np.float32).T
        if not isinstance(cached, LayerKV):
            outputs.append(LayerOutput(hidden=stream))
            continue
        keys, values = from_cache(cached, jnp.dtype(jnp.float32))
        outputs.append(
            LayerOutput(
                hidden=stream,
                keys=np.asarray(keys, np.float32)[0].transpose(2, 0, 1),
                values=np.asarray(values, np.float32)[0].transpose(1, 0, 2),
            )
        )
    return outputs


def _split(
    model: DecoderConfig, kind: LayerKind, layer: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return a layer's arrays in the learner's layout, on the host.

    Undoes the engine's fusion and repetition.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, x in layer.items():
        if isinstance(x, Quantized):
            arrays[name] = np.asarray(x.numbers, np.float32) * np.asarray(x.scale, np.float32)
        else:
            arrays[name] = np.asarray(x)

    if "k_b" in arrays:
        head_keys = arrays.pop("k_b").swapaxes(1, 2)  # [H, n, r]
        by_head = np.concatenate([head_keys, arrays.pop("v_b")], axis=1)
        arrays["kv_b"] = by_head.reshape(-1, by_head.shape[2])
    for fused in ("qkv", "global_qkv", "qkv_bias"):
        if fused not in arrays:
            continue
        by_head = arrays.pop(fused)  # [K, (G + 2) h, ...]; fewer without keys or values
        heads = model.heads(kind.mixer)
        repeats = len(by_head) // heads.num_kv_heads
        query_size = heads.head_dim
        if model.attention_gate:
            query_size *= 2  # each query is followed by its gate
        num_queries = model.num_heads // len(by_head) * query_size
        bounds = range(num_queries, by_head.shape[1], heads.head_dim)
        queries, *keys_and_values = np.split(by_head, bounds, axis=1)
        parts = [queries, *(x[::repeats] for x in keys_and_values)]
        # zip ends with the parts: a layer may have no values, or neither.
        for letter, x in zip("qkv", parts, strict=False):
            arrays[fused.replace("qkv", letter)] = x.reshape(-1, *x.shape[2:])

    if "k_norm" in arrays and model.qk_norm_over == "heads":
        by_head = arrays["k_norm"].reshape(-1, model.head_dim)
        repeats = len(by_head) // model.num_kv_heads
        arrays["k_norm"] = by_head[::repeats].reshape(-1)
    if "delta_conv" in arrays:
        arrays = ungroup(model, arrays)
    if "sinks" in arrays:
        arrays["sinks"] = arrays["sinks"].reshape(-1)
    for prefix in ("", "wide_", "shared_"):
        if f"{prefix}gate_up" in arrays:
            gate, up = arrays.pop(f"{prefix}gate_up")
            arrays[f"{prefix}gate"] = gate
            arrays[f"{prefix}up"] = up
    for name in EXPERTS & arrays.keys():
        arrays[name] = transpose_matrices(arrays[name])
    return arrays
