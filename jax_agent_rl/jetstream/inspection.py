"""What callers may ask of a running engine beside generation; its state and its table of programs stay as they are.

- Log-probs of given ids, and the likeliest ids beside them, for callers that distill from its
  model.
- Diagnosis: samples of its weights by published name, and its layers' outputs.

Scoring::

    ids ─► chunks of one length ─► prefill beside a cache of its own ─► logits of the chunk ─► log-probs, top k

Contexts are scored one at a time, between the engine's steps, by one program for each power of two
of their length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, empty_cache, from_cache
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import HEAD, tensor_names
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
        token_ids: the context.
        start: first id to score.
        top_k: likeliest ids to report at each.

    Raises:
        BackendError: the context is longer than the engine's, or the engine sleeps.
    """
    engine, params, count = scheduler.engine, scheduler.params, len(token_ids)
    if count > engine.shapes.max_model_len:
        raise BackendError(
            f"a context of {count} ids is longer than max_model_len={engine.shapes.max_model_len}"
        )
    if isinstance(params.embed, np.ndarray):
        raise BackendError("the engine sleeps: its weights are on the host; wake it to score")
    length = max(CHUNK, 1 << (count - 1).bit_length())
    cache = empty_cache(engine.config, 1, length, engine.dtype)  # exact: it holds but one context
    padded = np.zeros(length + 1, np.int32)
    padded[:count] = token_ids
    found: list[tuple[np.ndarray, ...]] = []
    for begin in range(0, count - 1, CHUNK):
        ids, following = padded[None, begin : begin + CHUNK], padded[begin + 1 : begin + CHUNK + 1]
        at = np.arange(begin + 1, begin + CHUNK + 1)
        wanted, starts = (at >= start) & (at < count), np.full(1, begin, np.int32)
        constants = (engine.config, engine.split, top_k)
        cache, scores = _score_chunk(*constants, params, cache, ids, following, wanted, starts)
        found.append(scores)
    log_probs, ids, top = (
        np.concatenate(x)[start - 1 : count - 1] for x in zip(*jax.device_get(found), strict=True)
    )
    return TokenScores(
        log_probs=tuple(log_probs.tolist()),
        top_ids=tuple(map(tuple, ids.tolist())) if top_k else (),
        top_log_probs=tuple(map(tuple, top.tolist())) if top_k else (),
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
    wanted: jax.Array,
    starts: jax.Array,
) -> tuple[KVCache, tuple[jax.Array, jax.Array, jax.Array]]:
    """Return the cache with the chunk, log-probs [T] of the ``following`` ids, and the likeliest [T, k] with theirs.

    They mean nothing where they are not ``wanted``, bool [T].
    """
    layers = prefill_chunks(config, params, cache, tokens, starts, mesh=mesh)
    size = min(BLOCK, len(following))

    def block(
        part: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, following, wanted = part  # [D, N], [N], [N]

        def scores() -> tuple[jax.Array, jax.Array, jax.Array]:
            logs = jax.nn.log_softmax(next_logits(config, params, x, mesh), axis=0).T  # [N, V]
            top, ids = jax.lax.top_k(logs, top_k)
            return jnp.take_along_axis(logs, following[:, None], axis=1)[:, 0], ids, top

        nothing = jnp.zeros((size, top_k))
        return jax.lax.cond(
            jnp.any(wanted), scores, lambda: (jnp.zeros(size), nothing.astype(jnp.int32), nothing)
        )

    hidden = jnp.moveaxis(
        layers[-1][0].reshape(-1, len(following) // size, size), 1, 0
    )  # [n, D, N]
    parts = (hidden, following.reshape(-1, size), wanted.reshape(-1, size))
    own, ids, top = (x.reshape(len(following), *x.shape[2:]) for x in jax.lax.map(block, parts))

    def place(whole: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), starts[0], axis)

    written = [
        LayerKV(
            keys=place(old.keys, new.keys, 3), values=place(old.values, new.values, 2), scales=None
        )
        for old, (_, new, _) in zip(cache.layers, layers, strict=True)
    ]
    return KVCache(tuple(written), cache.routed), (own, ids, top)


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
    if params.vision is not None:
        stored = zip(
            jax.tree.leaves(names["vision"], is_leaf=_is_list),
            jax.tree.leaves(params.vision),
            strict=True,
        )
        tower = [(name, np.asarray(x)) for name, x in stored]
        samples |= {name: TensorSample.of(array) for name, array in named_tensors(tower)}
    for i, layer in enumerate(params.layers):
        own = [(names["layers"][key][i], array) for key, array in _split(model, layer).items()]
        samples |= {name: TensorSample.of(array) for name, array in named_tensors(own)}
    return samples


def _is_list(names: Any) -> bool:
    return isinstance(names, list)


def layer_outputs(scheduler: Scheduler, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
    """Return the layers' outputs for a context prefilled in one chunk; empty for external engines."""
    params, engine = scheduler.params, scheduler.engine
    if not isinstance(params, EngineParams) or isinstance(params.embed, np.ndarray):  # asleep
        return []
    config, mesh = engine.config, engine.split
    ids = jnp.asarray(token_ids, jnp.int32)

    @jax.jit
    def run(
        params: EngineParams,
    ) -> tuple[jax.Array, list[tuple[jax.Array, LayerKV, jax.Array | None]]]:
        # An empty page: all of the context is in the chunk.
        cache: KVCache = empty_cache(config, 1, engine.shapes.page, engine.kv_dtype)
        layers = prefill_chunks(
            config, params, cache, ids[None], jnp.zeros(1, jnp.int32), mesh=mesh
        )
        return embed(config, params.embed, ids), layers

    embedded, layers = jax.device_get(run(params))
    outputs = [LayerOutput(hidden=np.asarray(embedded, np.float32))]
    for hidden, kept, _ in layers:
        keys, values = from_cache(kept, jnp.dtype(jnp.float32))
        outputs.append(
            LayerOutput(
                hidden=np.asarray(hidden, np.float32).T,
                keys=np.asarray(keys, np.float32)[0].transpose(2, 0, 1),
                values=np.asarray(values, np.float32)[0].transpose(1, 0, 2),
            )
        )
    return outputs


def _split(model: DecoderConfig, layer: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Undo the engine's fusion and repetition: return a layer's arrays in the learner's layout, on the host."""
    arrays = {
        name: (
            np.asarray(x.numbers, np.float32) * np.asarray(x.scale, np.float32)
            if isinstance(x, Quantized)
            else np.asarray(x)
        )
        for name, x in layer.items()
    }
    for fused, parts in (("qkv", ("q", "k", "v")), ("qkv_bias", ("q_bias", "k_bias", "v_bias"))):
        if fused in arrays:
            by_head = arrays.pop(fused)  # [K, (G + 2) h, ...]
            repeats, size = len(by_head) // model.num_kv_heads, model.head_dim
            queries, keys, values = np.split(
                by_head, [by_head.shape[1] - 2 * size, by_head.shape[1] - size], axis=1
            )
            for name, x in zip(parts, (queries, keys[::repeats], values[::repeats]), strict=True):
                arrays[name] = x.reshape(-1, *x.shape[2:])
    if "sinks" in arrays:
        arrays["sinks"] = arrays["sinks"].reshape(-1)
    if "gate_up" in arrays:
        arrays["gate"], arrays["up"] = arrays.pop("gate_up")
    return arrays | {name: transpose_matrices(arrays[name]) for name in EXPERTS & arrays.keys()}
