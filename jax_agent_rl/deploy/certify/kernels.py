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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement.report import product_precision
from jax_agent_rl.deploy.certify.machine import Machine
from jax_agent_rl.deploy.certify.report import CheckResult, Claim
from jax_agent_rl.jetstream import attention
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, gather_pages, to_cache
from jax_agent_rl.learner.linear_logprobs import linear_logprobs
from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.delta_net import DeltaTokens, l2_normalized
from jax_agent_rl.models.delta_tree import tree_delta_rule
from jax_agent_rl.models.layers import DTYPES, quantized
from jax_agent_rl.models.moe import grouped_product
from jax_agent_rl.models.token_forest import plan_forest
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
KV_HEADS = 2
GROUP = 3
"""Queries of each key/value head."""
SLOTS = 3
SLOT_PAGES = 3
"""Pages of each slot."""
Errors = Iterator[tuple[str, float]]
"""What was computed, and its error; gradients begin with ``d ``."""


class KernelCheck(NamedTuple):
    """The comparison of one kernel with its reference.

    Attributes:
        dtype: of the products, which decides on the limit.
        errors: computes the kernel and its reference.
    """

    name: str
    dtype: str
    errors: Callable[[], Errors]


def check_kernels(machine: Machine, record: CheckResult) -> None:
    """Compare every kernel with its reference, in all page and head sizes, forward and backward."""
    for check in _kernel_checks(machine):
        if not record.has_time(check.name):
            continue
        limit = LIMITS[product_precision(check.dtype, machine.platform)]
        outputs = []
        gradients = []
        for what, error in check.errors():
            if what.startswith("d "):
                gradients.append((what, error))
            else:
                outputs.append((what, error))
        _record_worst(record, check.name, outputs, limit)
        _record_worst(record, f"{check.name}: gradients", gradients, 4 * limit)


def _kernel_checks(machine: Machine) -> list[KernelCheck]:
    """Return the comparisons that this machine can make."""
    partial = functools.partial
    heads = sorted({*HEADS, machine.model.head_dim})
    checks = []
    for dtype in ("float32", "bfloat16"):
        checks.append(
            KernelCheck(f"tree attention, {dtype}", dtype, partial(tree_errors, dtype, heads))
        )
        checks.append(
            KernelCheck(f"log-probs of a head, {dtype}", dtype, partial(logprob_errors, dtype))
        )
        checks.append(
            KernelCheck(f"experts' products, {dtype}", dtype, partial(expert_errors, dtype))
        )

    # Its products and sums are float32, whatever the model's precision.
    checks.append(KernelCheck("delta rule", "float32", delta_errors))

    if machine.platform == "cpu" and cpu_kernels.kernels_digest() is not None:
        checks.append(
            KernelCheck("C++ decode attention", "float32", partial(cpu_decode_errors, heads))
        )
        checks.append(KernelCheck("C++ products", "float32", cpu_product_errors))
        checks.append(KernelCheck("C++ step of the delta rule", "float32", cpu_delta_errors))

    for kind in KINDS:
        dtype = _query_dtype(kind)
        decode = partial(decode_errors, machine, kind, heads)
        chunks = partial(chunk_errors, kind, heads)
        checks.append(KernelCheck(f"decode attention, {kind} cache", dtype, decode))
        checks.append(KernelCheck(f"attention of prompt chunks, {kind} cache", dtype, chunks))
    return checks


def _record_worst(
    record: CheckResult, name: str, errors: Sequence[tuple[str, float]], limit: float
) -> None:
    """Record the largest error, if there are any; NaN is larger than any number."""
    if not errors:
        return
    what, worst = max(errors, key=lambda pair: np.inf if np.isnan(pair[1]) else pair[1])
    record(name, worst, high=limit, detail=f"worst of {len(errors)}: {what}")


def _query_dtype(kind: str) -> str:
    """Return the dtype of queries over a cache of this precision."""
    return "bfloat16" if kind == "bfloat16" else "float32"


# --- references, in float64 -----------------------------------------------------------------------


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, sink: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return softmax(q k.T) v of one head, [n, h], and the softmax's weights [n, m]."""
    scores = np.where(visible, q @ k.T, -np.inf)
    peak = scores.max(axis=1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    exponentials = np.exp(scores - peak)
    total = exponentials.sum(axis=1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - peak)
    weights = exponentials / total
    return weights @ v, weights


def relative_error(result: Any, expected: np.ndarray) -> float:
    """Return the largest difference over the largest number of ``expected``."""
    return float(np.abs(double(result) - expected).max() / np.abs(expected).max())


def double(array: Any) -> np.ndarray:
    """Return an array in float64."""
    return np.asarray(array).astype(np.float64)


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Return normally distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def contents(cached: LayerKV) -> tuple[np.ndarray, np.ndarray]:
    """Return what a cache holds: keys [.., h, positions] and values [.., positions, h]."""
    keys = double(cached.keys)
    values = double(cached.values)
    if cached.scales is None:
        return keys, values
    scales = double(cached.scales)
    return keys * scales[:, :, :1], values * scales[:, :, 1, :, None]


# --- engine ---------------------------------------------------------------------------------------


def cached_pages(kind: str, head: int, page: int) -> tuple[LayerKV, np.ndarray, np.ndarray]:
    """Return a cache, the pages of each slot, and the position of its newest token.

    The positions are the beginning of a page, the end of one, and one within.
    """
    count = 1 + SLOTS * SLOT_PAGES
    keys = normal(1, count, KV_HEADS, head, page)
    values = normal(2, count, KV_HEADS, page, head)
    cached = to_cache(keys, values, DTYPES.get(kind, kind))

    numbers = np.random.default_rng(3).permutation(np.arange(1, count))
    pages = numbers.reshape(SLOTS, SLOT_PAGES).astype(np.int32)
    positions = np.array([page, 2 * page - 1, 2 * page + 7], np.int32)
    return cached, pages, positions


def decode_reference(
    q: np.ndarray,
    cached: LayerKV,
    pages: np.ndarray,
    positions: np.ndarray,
    sinks: Any,
    window: int | None,
) -> np.ndarray:
    """Return the attention [B, K, G, h] of slots whose tokens are in their pages."""
    keys, values = contents(cached)
    out = np.zeros(q.shape)
    for slot, head in itertools.product(range(len(q)), range(KV_HEADS)):
        slot_keys = np.concatenate([keys[page, head] for page in pages[slot]], axis=1).T
        slot_values = np.concatenate([values[page, head] for page in pages[slot]])
        distance = positions[slot] - np.arange(len(slot_keys))
        visible = (distance >= 0) & (distance < (window or len(slot_keys)))
        for query in range(q.shape[2]):
            sink = None if sinks is None else float(sinks[head, query])
            attended, _ = attend(
                q[slot, head, query][None], slot_keys, slot_values, visible[None], sink
            )
            out[slot, head, query] = attended
    return out


def with_token(cached: LayerKV, new: LayerKV, pages: np.ndarray, positions: np.ndarray) -> LayerKV:
    """Return the cache with one position per slot written."""
    page_size = cached.keys.shape[3]

    def write(axis: int, old: jax.Array, added: jax.Array) -> np.ndarray:
        changed = np.array(old)
        for slot, position in enumerate(positions):
            page = pages[slot, position // page_size]
            in_page = position % page_size
            index = (page, *[slice(None)] * (axis - 1), in_page)
            changed[index] = np.asarray(added[slot]).squeeze(axis - 1)
        return changed

    return cached.by_position(write, new)


def in_rows(cached: LayerKV, pages: Any, positions: Any) -> LayerKV:
    """Return the slots' pages as rows, as engines without paged kernels read them."""
    cache = KVCache((cached,))
    rows = gather_pages(cache, jnp.asarray(pages), jnp.asarray(positions) + 1)
    return rows.layers[0]


def decode_errors(machine: Machine, kind: str, heads: Sequence[int]) -> Errors:
    """Yield errors of one decode step's attention and of what it writes to the cache."""
    for head, page in itertools.product(heads, PAGES):
        yield from _decode_errors(machine, kind, head, page, windowed=False)
        if (head, page) == (heads[0], PAGES[0]):  # once is enough
            yield from _decode_errors(machine, kind, head, page, windowed=True)


def _decode_errors(machine: Machine, kind: str, head: int, page: int, *, windowed: bool) -> Errors:
    """Yield errors of decoding with one head and page size; ``windowed`` has attention sinks."""
    dtype = _query_dtype(kind)
    what = f"head {head}, page {page}"
    window = None
    sinks = None
    if windowed:
        what += ", window, sinks"
        window = page + 5
        sinks = normal(6, KV_HEADS, GROUP)
    cached, pages, positions = cached_pages(kind, head, page)
    q = normal(4, SLOTS, KV_HEADS, GROUP, head, dtype=dtype) / head**0.5
    k = normal(5, SLOTS, KV_HEADS, head, dtype=dtype)
    v = normal(7, SLOTS, KV_HEADS, head, dtype=dtype)
    token = to_cache(k[..., None], v[:, :, None], cached.keys.dtype)
    expected_cache = with_token(cached, token, pages, positions)
    expected = decode_reference(double(q), expected_cache, pages, positions, sinks, window)

    @jax.jit
    def run(q: Any, cached: LayerKV, new: Any, sinks: Any) -> Any:
        decode = functools.partial(attention.decode_attention, window=window)
        if machine.platform == "tpu":
            return decode(q, cached, new, jnp.asarray(positions), jnp.asarray(pages), sinks)
        rows = in_rows(cached, pages, positions)
        return decode(q, rows, new, jnp.asarray(positions), None, sinks)

    out, written = run(q, cached, (k, v), sinks)
    if machine.platform != "tpu":
        on_device = jax.tree.map(jnp.asarray, expected_cache)
        expected_cache = jax.jit(in_rows)(on_device, pages, positions)
    yield what, relative_error(out, expected)
    cache_errors = map(relative_error, contents(written), contents(expected_cache))
    yield f"{what}, what is written", max(cache_errors)


def cpu_decode_errors(heads: Iterable[int]) -> Errors:
    """Yield errors of the C++ kernel, which also scales queries and would rotate them."""
    for head, page in itertools.product(heads, PAGES):
        model = _model(head_dim=head, num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS)
        cached, pages, positions = cached_pages("float32", head, page)
        qkv = normal(8, KV_HEADS, GROUP + 2, head, SLOTS)
        k = qkv[:, GROUP].transpose(2, 0, 1)
        v = qkv[:, GROUP + 1].transpose(2, 0, 1)
        token = to_cache(k[..., None], v[:, :, None], jnp.dtype("float32"))
        expected_cache = with_token(cached, token, pages, positions)
        q = double(qkv[:, :GROUP]).transpose(3, 0, 1, 2) * model.score_scale
        expected = decode_reference(q, expected_cache, pages, positions, None, None)

        cosines = jnp.ones((head // 2, SLOTS))
        sines = jnp.zeros((head // 2, SLOTS))  # nothing is rotated
        run = jax.jit(functools.partial(cpu_kernels.decode_attention, model))
        out, written = run(
            qkv, cached, jnp.asarray(positions), jnp.asarray(pages), (cosines, sines)
        )
        what = f"head {head}, page {page}"
        yield what, relative_error(out.transpose(3, 0, 1, 2), expected)
        cache_errors = map(relative_error, contents(written), contents(expected_cache))
        yield f"{what}, what is written", max(cache_errors)


def cpu_product_errors() -> Errors:
    """Yield errors of the C++ products, by number of columns."""
    model = _model(activation="silu")
    product = jax.jit(functools.partial(cpu_kernels.product, model))
    gated_product = jax.jit(functools.partial(cpu_kernels.gated_product, model))
    for columns in (1, 8, 33):
        weight = normal(1, 2, 192, 576)
        x = normal(2, 576, columns)
        gate, up = double(weight) @ double(x)
        silu = gate / (1 + np.exp(-gate))
        yield f"{columns} columns", relative_error(product(weight, x), np.stack([gate, up]))
        yield f"{columns} columns, gated", relative_error(gated_product(weight, x), silu * up)

        int8_weight = quantized(weight, jnp.dtype("int8"), axis=-1)
        restored = double(int8_weight.numbers) * double(int8_weight.scale)
        expected = restored @ double(x)
        yield f"{columns} columns, int8", relative_error(product(int8_weight, x), expected)


def cpu_delta_errors() -> Errors:
    """Yield errors of the C++ step of the delta rule; heads have 128 keys and values."""
    size = 128
    tokens = DeltaTokens(
        q=normal(1, SLOTS, KV_HEADS, size) / size**0.5,
        k=l2_normalized(normal(2, SLOTS, KV_HEADS, size)),
        v=normal(3, SLOTS, KV_HEADS, size),
        log_decay=-jnp.abs(normal(4, SLOTS, KV_HEADS)),
        beta=jax.nn.sigmoid(normal(5, SLOTS, KV_HEADS)),
    )
    states = normal(6, SLOTS, KV_HEADS, size, size)
    running = jnp.ones(SLOTS, bool)
    outputs, new_states = jax.jit(cpu_kernels.delta_step)(tokens, states, running)

    numbers: Any = jax.tree.map(double, tokens)
    faded = double(states) * np.exp(numbers.log_decay)[..., None, None]
    answer = np.einsum("bhk,bhkv->bhv", numbers.k, faded)
    correction = numbers.beta[..., None] * (numbers.v - answer)
    expected = faded + numbers.k[..., :, None] * correction[..., None, :]
    yield "output", relative_error(outputs, np.einsum("bhk,bhkv->bhv", numbers.q, expected))
    yield "state", relative_error(new_states, expected)


def _model(**fields: Any) -> DecoderConfig:
    """Return a model of which kernels read a few fields."""
    sizes: dict[str, Any] = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 8
    )
    sizes |= dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    return DecoderConfig(**{**sizes, "tie_word_embeddings": True, "eos_token_ids": (0,), **fields})


def chunk_errors(kind: str, heads: Iterable[int]) -> Errors:
    """Yield errors of prompt chunks over a cache."""
    length = 256
    count = 48  # tokens of a chunk
    starts = np.array([0, 100], np.int32)
    rows = len(starts)
    dtype = _query_dtype(kind)
    cache_dtype = DTYPES.get(kind, kind)
    for head, window in itertools.product(heads, (None, 60)):
        cached = to_cache(
            normal(1, rows, KV_HEADS, head, length),
            normal(2, rows, KV_HEADS, length, head),
            cache_dtype,
        )
        new = to_cache(
            normal(3, rows, KV_HEADS, head, count),
            normal(4, rows, KV_HEADS, count, head),
            cache_dtype,
        )
        q = normal(5, KV_HEADS, GROUP, head, rows, count, dtype=dtype) / head**0.5
        run = jax.jit(functools.partial(attention.chunk_attention, window=window))
        out = run(q, cached, new, starts)

        keys, values = contents(cached)
        new_keys, new_values = contents(new)
        queries = double(q)
        expected = np.zeros(queries.shape)
        for row, kv_head in itertools.product(range(rows), range(KV_HEADS)):
            start = starts[row]
            k = np.concatenate([keys[row, kv_head, :, :start], new_keys[row, kv_head]], axis=1).T
            v = np.concatenate([values[row, kv_head, :start], new_values[row, kv_head]])
            distance = start + np.arange(count)[:, None] - np.arange(start + count)
            visible = (distance >= 0) & (distance < (window or start + count))
            for query in range(GROUP):
                attended, _ = attend(queries[kv_head, query, :, row].T, k, v, visible)
                expected[kv_head, query, :, row] = attended.T
        yield _head_and_window(head, window), relative_error(out, expected)


def _head_and_window(head: int, window: int | None) -> str:
    if window is None:
        return f"head {head}"
    return f"head {head}, window"


# --- learner --------------------------------------------------------------------------------------


def tree_errors(dtype: str, heads: Iterable[int]) -> Errors:
    """Yield errors of attention over a packed tree, and of its gradients.

    The tree is a trunk with two branches.
    """
    count = 300
    trunk_end = 100
    branch_end = 200  # of the first branch; the second one ends with the row
    ends = np.full(count, count, np.int32)
    ends[trunk_end:branch_end] = branch_end
    depths = np.arange(count, dtype=np.int32)
    depths[branch_end:] -= branch_end - trunk_end
    indices = np.arange(count)
    heads_q = KV_HEADS * GROUP
    for head, window in itertools.product(heads, (None, 60)):
        q = normal(1, 1, heads_q, count, head, dtype=dtype) / head**0.5
        d_out = normal(2, 1, heads_q, count, head, dtype=dtype) / head**0.5
        k = normal(3, 1, KV_HEADS, count, head, dtype=dtype)
        v = normal(4, 1, KV_HEADS, count, head, dtype=dtype)
        limit = None if window is None else jnp.int32(window)
        mask = TreeMask(jnp.asarray(ends[None]), jnp.asarray(depths[None]), limit)

        @jax.jit
        def run(q: Any, k: Any, v: Any, d_out: Any, mask: TreeMask = mask) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda q, k, v: tree_attention(q, k, v, mask), q, k, v)
            return out, *pull(d_out)

        visible = (indices <= indices[:, None]) & (indices[:, None] < ends)
        if window is not None:
            visible &= depths[:, None] - depths < window
        expected = _tree_reference(double(q), double(k), double(v), double(d_out), visible)
        what = _head_and_window(head, window)
        names = ("output", "d q", "d k", "d v")
        results = run(q, k, v, d_out)
        for name, result, reference in zip(names, results, expected, strict=True):
            yield f"{name}, {what}", relative_error(result, reference)


def _tree_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the output of attention, and the gradients of q, k and v."""
    out = np.zeros(q.shape)
    d_q = np.zeros(q.shape)
    d_k = np.zeros(k.shape)
    d_v = np.zeros(v.shape)
    for head in range(KV_HEADS * GROUP):
        kv_head = head // GROUP
        attended, weights = attend(q[0, head], k[0, kv_head], v[0, kv_head], visible)
        d_weights = d_out[0, head] @ v[0, kv_head].T
        projected = (d_out[0, head] * attended).sum(axis=1, keepdims=True)
        d_scores = weights * (d_weights - projected)
        out[0, head] = attended
        d_q[0, head] = d_scores @ k[0, kv_head]
        d_k[0, kv_head] += d_scores.T @ q[0, head]
        d_v[0, kv_head] += weights.T @ d_out[0, head]
    return out, d_q, d_k, d_v


def delta_errors() -> Errors:
    """Yield errors of the delta rule over a packed tree, and of its gradients.

    A trunk has two branches, and a second tree follows; heads have 128 keys and values.
    """
    count = 400
    trunk_end = 150
    branch_end = 260  # of the first branch
    tree_end = 330
    size = 128
    parents = np.arange(count) - 1
    parents[branch_end] = trunk_end - 1
    parents[tree_end] = -1
    ends = np.full(count, count, np.int32)
    ends[:tree_end] = tree_end
    ends[trunk_end:branch_end] = branch_end

    rng = np.random.default_rng(1)
    tokens = DeltaTokens(
        q=normal(2, 1, count, KV_HEADS, size) / size**0.5,
        k=l2_normalized(normal(3, 1, count, KV_HEADS, size)),
        v=normal(4, 1, count, KV_HEADS, size),
        log_decay=-jnp.asarray(rng.gamma(0.2, size=(1, count, KV_HEADS)), jnp.float32),
        beta=jnp.asarray(rng.random((1, count, KV_HEADS)), jnp.float32),
    )
    d_out = normal(5, 1, count, KV_HEADS, size)

    @jax.jit
    def run(tokens: DeltaTokens) -> tuple[jax.Array, DeltaTokens]:
        chunk = delta_kernel.CHUNK
        forest = plan_forest(jnp.asarray(ends[None]), chunk=chunk)
        outputs, pull = jax.vjp(lambda tokens: tree_delta_rule(tokens, forest), tokens)
        return outputs, pull(d_out)[0]

    outputs, gradients = run(tokens)
    numbers: Any = jax.tree.map(lambda x: double(x)[0], tokens)
    expected, expected_gradients = _delta_reference(numbers, double(d_out)[0], parents)
    yield "output", relative_error(outputs, expected[None])
    for name in DeltaTokens._fields:
        reference = getattr(expected_gradients, name)[None]
        yield f"d {name}", relative_error(getattr(gradients, name), reference)


def _delta_reference(tokens: Any, d_out: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return the outputs [T, H, v] of tokens [T, H, ..], and the gradients of the tokens."""
    count, heads = tokens.beta.shape
    out = np.zeros(tokens.v.shape)
    gradients = jax.tree.map(np.zeros_like, tokens)
    for head in range(heads):
        q, k, v, log_decay, beta = (x[:, head] for x in tokens)
        faded = np.zeros((count, k.shape[1], v.shape[1]))
        states = np.zeros((count + 1, k.shape[1], v.shape[1]))  # the last one stays: of a root
        misses = np.zeros(v.shape)
        for t in range(count):
            faded[t] = states[parents[t]] * np.exp(log_decay[t])
            misses[t] = v[t] - k[t] @ faded[t]
            states[t] = faded[t] + np.outer(k[t], beta[t] * misses[t])
            out[t, head] = q[t] @ states[t]

        d_states = np.zeros(states.shape)
        for t in reversed(range(count)):
            d_state = d_states[t] + np.outer(q[t], d_out[t, head])
            d_correction = k[t] @ d_state
            d_miss = beta[t] * d_correction
            d_faded = d_state - np.outer(k[t], d_miss)
            gradients.q[t, head] = states[t] @ d_out[t, head]
            gradients.k[t, head] = d_state @ (beta[t] * misses[t]) - faded[t] @ d_miss
            gradients.v[t, head] = d_miss
            gradients.log_decay[t, head] = np.sum(d_faded * faded[t])
            gradients.beta[t, head] = d_correction @ misses[t]
            if parents[t] >= 0:
                d_states[parents[t]] += d_faded * np.exp(log_decay[t])
    return out, gradients


def logprob_errors(dtype: str) -> Errors:
    """Yield errors of log-probs and entropies, and of their gradients.

    The head has more than one block.
    """
    vocabulary = 3000
    size = 64
    temperature = 0.8
    hidden = normal(1, 2, 40, size, dtype=dtype)
    head = normal(2, vocabulary, size, dtype=dtype) / 4
    ids = np.random.default_rng(3).integers(0, vocabulary, (2, 40)).astype(np.int32)
    d_logprob = normal(4, 2, 40)
    d_entropy = normal(5, 2, 40)

    @jax.jit
    def run(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, ...]:
        vjp: Any = jax.vjp(
            lambda x, w: linear_logprobs(x, w, ids, ids >= 0, temperature), hidden, head
        )
        (log_probs, entropies), pull = vjp
        return log_probs, entropies, *pull((d_logprob, d_entropy))

    x = double(hidden).reshape(-1, size)
    w = double(head)
    scores = x @ w.T / temperature
    peak = scores.max(axis=1, keepdims=True)
    log_probs = scores - peak - np.log(np.exp(scores - peak).sum(axis=1, keepdims=True))
    probs = np.exp(log_probs)
    entropy = -(probs * log_probs).sum(axis=1)
    is_id = np.arange(vocabulary) == ids.reshape(-1)[:, None]

    by_logprob = double(d_logprob).reshape(-1, 1) * (is_id - probs)
    by_entropy = double(d_entropy).reshape(-1, 1) * probs * (log_probs + entropy[:, None])
    d_scores = (by_logprob - by_entropy) / temperature
    expected = {
        "log-probs": log_probs[is_id].reshape(ids.shape),
        "entropies": entropy.reshape(ids.shape),
        "d hidden": (d_scores @ w).reshape(hidden.shape),
        "d head": d_scores.T @ x,
    }
    for (name, reference), result in zip(expected.items(), run(hidden, head), strict=True):
        yield name, relative_error(result, reference)


def expert_errors(dtype: str) -> Errors:
    """Yield errors of rows times the matrices of their experts, and of their gradients.

    One expert has no row.
    """
    sizes = np.array([100, 0, 37, 119], np.int32)
    rows = int(sizes.sum())
    experts = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)  # of each row
    x = normal(1, rows, 128, dtype=dtype)
    weight = normal(2, len(sizes), 256, 128, dtype=dtype)
    d_out = normal(3, rows, 256, dtype=dtype)

    @jax.jit
    def run(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(
            lambda x, w: grouped_product(x, w, jnp.asarray(sizes), jnp.asarray(experts)), x, weight
        )
        return out, *pull(d_out)

    inputs = double(x)
    matrices = double(weight)[experts]
    d = double(d_out)
    d_matrices = []
    for expert in range(len(sizes)):
        of_expert = experts == expert
        d_matrices.append(d[of_expert].T @ inputs[of_expert])
    expected = {
        "output": np.einsum("ni,noi->no", inputs, matrices),
        "d rows": np.einsum("no,noi->ni", d, matrices),
        "d matrices": np.stack(d_matrices),
    }
    for (name, reference), result in zip(expected.items(), run(x, weight), strict=True):
        yield name, relative_error(result, reference)
