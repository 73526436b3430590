"""Kernels as this machine's compiler makes them, against float64 numpy.

Every kernel is computed as a run computes it here: by Pallas on TPUs, by the C++ kernels on CPUs
where they apply, by XLA otherwise. An error is the largest difference over the largest number of
the reference.

Shapes: B slots, R rows, T tokens, K key/value heads, G queries of each, h head size, S positions of
a page.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement.report import product_precision
from jax_agent_rl.deploy.certify.machine import Machine
from jax_agent_rl.deploy.certify.report import CheckResult, Claim
from jax_agent_rl.jetstream import attention, cpu_kernels
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, gather_pages, to_cache
from jax_agent_rl.learner.linear_logprobs import linear_logprobs
from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import DTYPES
from jax_agent_rl.models.moe import grouped_product
from jax_agent_rl.models.tree_kernel import TreeMask

CLAIM = Claim(
    page="docs/engine.md",
    text="Every kernel computes what float64 numpy does, to rounding, forward and backward.",
)
LIMITS = {"float32": 2e-5, "tf32": 5e-3, "bfloat16": 2e-2}
"""Largest relative error by the precision of products; gradients, which multiply twice, may have
four times as much."""
PAGES = (32, 128)
HEADS = (64, 128, 256)
KINDS = ("float32", "bfloat16", "int8", "fp8")
"""Precisions of the cache. Queries of 8-bit caches are float32."""
KV_HEADS, GROUP, SLOTS, COUNT = 2, 3, 3, 3
Errors = Iterator[tuple[str, float]]
"""What was computed, and its error."""


def check_kernels(machine: Machine, record: CheckResult) -> None:
    """Compare every kernel with its reference, in all page and head sizes, forward and backward."""
    heads = sorted({*HEADS, machine.model.head_dim})
    parts: list[tuple[str, str, Callable[[], Errors]]] = []
    for dtype in ("float32", "bfloat16"):
        parts += [
            (f"tree attention, {dtype}", dtype, functools.partial(tree_errors, dtype, heads)),
            (f"log-probs of a head, {dtype}", dtype, functools.partial(logprob_errors, dtype)),
            (f"experts' products, {dtype}", dtype, functools.partial(expert_errors, dtype)),
        ]
    if machine.platform == "cpu" and cpu_kernels.kernels_digest() is not None:
        parts += [
            ("C++ decode attention", "float32", functools.partial(cpu_decode_errors, heads)),
            ("C++ products", "float32", cpu_product_errors),
        ]
    for kind in KINDS:
        dtype = "bfloat16" if kind == "bfloat16" else "float32"
        parts += [
            (
                f"decode attention, {kind} cache",
                dtype,
                functools.partial(decode_errors, machine, kind, heads),
            ),
            (
                f"attention of prompt chunks, {kind} cache",
                dtype,
                functools.partial(chunk_errors, kind, heads),
            ),
        ]
    for name, dtype, errors in parts:
        if not record.has_time(name):
            continue
        limit, found = LIMITS[product_precision(dtype, machine.platform)], list(errors())
        for title, factor, backward in ((name, 1, False), (f"{name}: gradients", 4, True)):
            if own := [(what, error) for what, error in found if what.startswith("d ") == backward]:
                # NaN, if there is any, is the worst.
                what, worst = max(own, key=lambda pair: np.inf if np.isnan(pair[1]) else pair[1])
                record(title, worst, high=factor * limit, detail=f"worst of {len(own)}: {what}")


# --- references, in float64 -----------------------------------------------------------------------


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, sink: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return softmax(q k.T) v of one head, [n, h], and the softmax's weights [n, m]."""
    scores = np.where(visible, q @ k.T, -np.inf)
    peak = (
        scores.max(axis=1, keepdims=True)
        if sink is None
        else np.maximum(scores.max(axis=1, keepdims=True), sink)
    )
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True) + (0 if sink is None else np.exp(sink - peak))
    return weights / total @ v, weights / total


def relative(found: Any, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest number of ``wanted``."""
    return float(np.abs(double(found) - wanted).max() / np.abs(wanted).max())


def double(x: Any) -> np.ndarray:
    """Return an array in float64."""
    return np.asarray(x).astype(np.float64)


def drawn(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Return normally distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def stored(cached: LayerKV) -> tuple[np.ndarray, np.ndarray]:
    """Return what a cache holds: keys [.., h, positions] and values [.., positions, h]."""
    keys, values = double(cached.keys), double(cached.values)
    if cached.scales is None:
        return keys, values
    scales = double(cached.scales)
    return keys * scales[:, :, :1], values * scales[:, :, 1, :, None]


# --- engine ---------------------------------------------------------------------------------------


def cached_pages(kind: str, head: int, page: int) -> tuple[LayerKV, np.ndarray, np.ndarray]:
    """Return a cache, the pages of each slot, and their positions: at a page's begin and end, and within one."""
    count = 1 + SLOTS * COUNT
    keys, values = drawn(1, count, KV_HEADS, head, page), drawn(2, count, KV_HEADS, page, head)
    pages = (
        np.random.default_rng(3)
        .permutation(np.arange(1, count))
        .reshape(SLOTS, COUNT)
        .astype(np.int32)
    )
    return (
        to_cache(keys, values, DTYPES.get(kind, kind)),
        pages,
        np.array([page, 2 * page - 1, 2 * page + 7], np.int32),
    )


def decoded(
    q: np.ndarray,
    cached: LayerKV,
    pages: np.ndarray,
    positions: np.ndarray,
    sinks: Any,
    window: int | None,
) -> np.ndarray:
    """Return [B, K, G, h] of slots whose tokens are in their pages."""
    keys, values = stored(cached)
    out = np.zeros(q.shape)
    for slot, head in itertools.product(range(len(q)), range(KV_HEADS)):
        own_keys = np.concatenate([keys[page, head] for page in pages[slot]], axis=1).T
        own_values = np.concatenate([values[page, head] for page in pages[slot]])
        distance = positions[slot] - np.arange(len(own_keys))
        visible = (distance >= 0) & (distance < (window or len(own_keys)))
        for query in range(q.shape[2]):
            sink = None if sinks is None else float(sinks[head, query])
            out[slot, head, query] = attend(
                q[slot, head, query][None], own_keys, own_values, visible[None], sink
            )[0]
    return out


def with_token(cached: LayerKV, new: LayerKV, pages: np.ndarray, positions: np.ndarray) -> LayerKV:
    """Return the cache with one position per slot written."""

    def write(axis: int, old: jax.Array, one: jax.Array) -> np.ndarray:
        changed = np.array(old)
        for slot, position in enumerate(positions):
            place, within = (
                pages[slot, position // cached.keys.shape[3]],
                position % cached.keys.shape[3],
            )
            changed[(place, *[slice(None)] * (axis - 1), within)] = np.asarray(one[slot]).squeeze(
                axis - 1
            )
        return changed

    return cached.by_position(write, new)


def in_rows(cached: LayerKV, pages: Any, positions: Any) -> LayerKV:
    """Return the slots' pages as rows, as engines without paged kernels read them."""
    return gather_pages(KVCache((cached,)), jnp.asarray(pages), jnp.asarray(positions) + 1).layers[
        0
    ]


def decode_errors(machine: Machine, kind: str, heads: Sequence[int]) -> Errors:
    """Yield errors of one decode step's attention and of what it writes to the cache."""
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    for head, page, limited in itertools.product(heads, PAGES, (False, True)):
        if limited and (head, page) != (heads[0], PAGES[0]):
            continue
        window, sinks = (page + 5, drawn(6, KV_HEADS, GROUP)) if limited else (None, None)
        cached, pages, positions = cached_pages(kind, head, page)
        q = drawn(4, SLOTS, KV_HEADS, GROUP, head, dtype=dtype) / head**0.5
        k, v = (
            drawn(5, SLOTS, KV_HEADS, head, dtype=dtype),
            drawn(7, SLOTS, KV_HEADS, head, dtype=dtype),
        )
        written = with_token(
            cached, to_cache(k[..., None], v[:, :, None], cached.keys.dtype), pages, positions
        )
        wanted = decoded(double(q), written, pages, positions, sinks, window)

        @jax.jit
        def run(
            q: Any, cached: LayerKV, new: Any, sinks: Any, pages: Any = pages, at: Any = positions
        ) -> Any:
            decode = functools.partial(attention.decode_attention, window=window)  # noqa: B023
            if machine.platform == "tpu":
                return decode(q, cached, new, jnp.asarray(at), jnp.asarray(pages), sinks)
            return decode(q, in_rows(cached, pages, at), new, jnp.asarray(at), None, sinks)

        out, after = run(q, cached, (k, v), sinks)
        kept, expected = stored(after), stored(written)
        if machine.platform != "tpu":
            expected = stored(
                jax.jit(in_rows)(jax.tree.map(jnp.asarray, written), pages, positions)
            )
        what = f"head {head}, page {page}{', window, sinks' if limited else ''}"
        yield what, relative(out, wanted)
        yield f"{what}, what is written", max(map(relative, kept, expected))


def cpu_decode_errors(heads: Iterable[int]) -> Errors:
    """Yield errors of the C++ kernel, which also scales queries and would rotate them."""
    for head, page in itertools.product(heads, PAGES):
        model = _model(head_dim=head, num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS)
        cached, pages, positions = cached_pages("float32", head, page)
        qkv = drawn(8, KV_HEADS, GROUP + 2, head, SLOTS)
        k, v = qkv[:, GROUP].transpose(2, 0, 1), qkv[:, GROUP + 1].transpose(2, 0, 1)
        written = with_token(
            cached, to_cache(k[..., None], v[:, :, None], jnp.dtype("float32")), pages, positions
        )
        q = double(qkv[:, :GROUP]).transpose(3, 0, 1, 2) * model.score_scale
        wanted = decoded(q, written, pages, positions, None, None)
        unturned = jnp.ones((head // 2, SLOTS)), jnp.zeros((head // 2, SLOTS))
        run = jax.jit(functools.partial(cpu_kernels.decode_attention, model))
        out, after = run(qkv, cached, jnp.asarray(positions), jnp.asarray(pages), unturned)
        yield f"head {head}, page {page}", relative(out.transpose(3, 0, 1, 2), wanted)
        yield (
            f"head {head}, page {page}, what is written",
            max(map(relative, stored(after), stored(written))),
        )


def cpu_product_errors() -> Errors:
    """Yield errors of the C++ products, by number of columns."""
    model = _model(activation="silu")
    for columns in (1, 8, 33):
        weight, x = drawn(1, 2, 192, 576), drawn(2, 576, columns)
        gate, up = double(weight) @ double(x)
        run, gated = (
            jax.jit(functools.partial(one, model))
            for one in (cpu_kernels.product, cpu_kernels.gated_product)
        )
        yield f"{columns} columns", relative(run(weight, x), np.stack([gate, up]))
        yield (
            f"{columns} columns, gated",
            relative(gated(weight, x), gate / (1 + np.exp(-gate)) * up),
        )


def _model(**fields: Any) -> DecoderConfig:
    """Return a model of which kernels read a few fields."""
    sizes: dict[str, Any] = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 8
    )
    sizes |= dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    return DecoderConfig(**{**sizes, "tie_word_embeddings": True, "eos_token_ids": (0,), **fields})


def chunk_errors(kind: str, heads: Iterable[int]) -> Errors:
    """Yield errors of prompt chunks over a cache."""
    dtype, length, count = "bfloat16" if kind == "bfloat16" else "float32", 256, 48
    starts = np.array([0, 100], np.int32)
    for head, window in itertools.product(heads, (None, 60)):
        rows = len(starts)
        keep = DTYPES.get(kind, kind)
        cached = to_cache(
            drawn(1, rows, KV_HEADS, head, length), drawn(2, rows, KV_HEADS, length, head), keep
        )
        new = to_cache(
            drawn(3, rows, KV_HEADS, head, count), drawn(4, rows, KV_HEADS, count, head), keep
        )
        q = drawn(5, KV_HEADS, GROUP, head, rows, count, dtype=dtype) / head**0.5
        out = jax.jit(functools.partial(attention.chunk_attention, window=window))(
            q, cached, new, starts
        )
        (keys, values), (own_keys, own_values), queries = stored(cached), stored(new), double(q)
        wanted = np.zeros(queries.shape)
        for row, kv_head in itertools.product(range(rows), range(KV_HEADS)):
            start = starts[row]
            k = np.concatenate([keys[row, kv_head, :, :start], own_keys[row, kv_head]], axis=1).T
            v = np.concatenate([values[row, kv_head, :start], own_values[row, kv_head]])
            distance = start + np.arange(count)[:, None] - np.arange(start + count)
            visible = (distance >= 0) & (distance < (window or start + count))
            for query in range(GROUP):
                wanted[kv_head, query, :, row] = attend(
                    queries[kv_head, query, :, row].T, k, v, visible
                )[0].T
        yield f"head {head}{'' if window is None else ', window'}", relative(out, wanted)


# --- learner --------------------------------------------------------------------------------------


def tree_errors(dtype: str, heads: Iterable[int]) -> Errors:
    """Yield errors of attention over a packed tree of a trunk and two branches, and of its gradients."""
    count, trunk, branch = 300, 100, 200
    ends = np.full(count, count, np.int32)
    ends[trunk:branch] = branch
    depths = np.arange(count, dtype=np.int32)
    depths[branch:] -= branch - trunk
    place = np.arange(count)
    for head, window in itertools.product(heads, (None, 60)):
        q, d_out = (
            drawn(seed, 1, KV_HEADS * GROUP, count, head, dtype=dtype) / head**0.5
            for seed in (1, 2)
        )
        k, v = (drawn(seed, 1, KV_HEADS, count, head, dtype=dtype) for seed in (3, 4))
        limit = None if window is None else jnp.int32(window)
        mask = TreeMask(jnp.asarray(ends[None]), jnp.asarray(depths[None]), limit)

        @jax.jit
        def run(q: Any, k: Any, v: Any, d_out: Any, mask: TreeMask = mask) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda q, k, v: tree_attention(q, k, v, mask), q, k, v)
            return out, *pull(d_out)

        visible = (place <= place[:, None]) & (place[:, None] < ends)
        if window is not None:
            visible &= depths[:, None] - depths < window
        queries, keys, values, d = map(double, (q, k, v, d_out))
        wanted = [np.zeros(x.shape) for x in (queries, queries, keys, values)]
        for one in range(KV_HEADS * GROUP):
            own, kv = queries[0, one], one // GROUP
            out, weights = attend(own, keys[0, kv], values[0, kv], visible)
            d_weights = d[0, one] @ values[0, kv].T
            d_scores = weights * (d_weights - (d[0, one] * out).sum(axis=1, keepdims=True))
            wanted[0][0, one], wanted[1][0, one] = out, d_scores @ keys[0, kv]
            wanted[2][0, kv] += d_scores.T @ own
            wanted[3][0, kv] += weights.T @ d[0, one]
        what = f"head {head}{'' if window is None else ', window'}"
        for name, found, expected in zip(
            ("output", "d q", "d k", "d v"), run(q, k, v, d_out), wanted, strict=True
        ):
            yield f"{name}, {what}", relative(found, expected)


def logprob_errors(dtype: str) -> Errors:
    """Yield errors of log-probs and entropies under a head of more than one block, and of their gradients."""
    vocabulary, size, temperature = 3000, 64, 0.8
    hidden, head = drawn(1, 2, 40, size, dtype=dtype), drawn(2, vocabulary, size, dtype=dtype) / 4
    ids = np.random.default_rng(3).integers(0, vocabulary, (2, 40)).astype(np.int32)
    d_logprob, d_entropy = drawn(4, 2, 40), drawn(5, 2, 40)

    @jax.jit
    def run(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, ...]:
        made: Any = jax.vjp(
            lambda x, w: linear_logprobs(x, w, ids, ids >= 0, temperature), hidden, head
        )
        (log_probs, entropies), pull = made
        return log_probs, entropies, *pull((d_logprob, d_entropy))

    x, w, chosen = double(hidden).reshape(-1, size), double(head), ids.reshape(-1)
    scores = x @ w.T / temperature
    peak = scores.max(axis=1, keepdims=True)
    logs = scores - peak - np.log(np.exp(scores - peak).sum(axis=1, keepdims=True))
    entropy = -(np.exp(logs) * logs).sum(axis=1)
    picked = np.arange(vocabulary) == chosen[:, None]
    d_one, d_two = double(d_logprob).reshape(-1, 1), double(d_entropy).reshape(-1, 1)
    d_scores = (
        d_one * (picked - np.exp(logs)) - d_two * np.exp(logs) * (logs + entropy[:, None])
    ) / temperature
    wanted = {
        "log-probs": logs[picked].reshape(ids.shape),
        "entropies": entropy.reshape(ids.shape),
        "d hidden": (d_scores @ w).reshape(hidden.shape),
        "d head": d_scores.T @ x,
    }
    for (name, expected), found in zip(wanted.items(), run(hidden, head), strict=True):
        yield name, relative(found, expected)


def expert_errors(dtype: str) -> Errors:
    """Yield errors of rows times the matrices of their experts, one of which has no row, and of their gradients."""
    sizes = np.array([100, 0, 37, 119], np.int32)
    rows, group = int(sizes.sum()), np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    x, d_out = drawn(1, rows, 128, dtype=dtype), drawn(3, rows, 256, dtype=dtype)
    weight = drawn(2, len(sizes), 256, 128, dtype=dtype)

    @jax.jit
    def run(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(
            lambda x, w: grouped_product(x, w, jnp.asarray(sizes), jnp.asarray(group)), x, weight
        )
        return out, *pull(d_out)

    one, matrices, d = double(x), double(weight), double(d_out)
    wanted = {
        "output": np.einsum("ni,noi->no", one, matrices[group]),
        "d rows": np.einsum("no,noi->ni", d, matrices[group]),
        "d matrices": np.stack([d[group == e].T @ one[group == e] for e in range(len(sizes))]),
    }
    for (name, expected), found in zip(wanted.items(), run(x, weight), strict=True):
        yield name, relative(found, expected)
