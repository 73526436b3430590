"""The kernels of a decode step on CPUs, against float64 numpy, and the engine that uses them
against XLA's path.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, Extension, JaxEngine
from jax_agent_rl.jetstream.kv_cache import LayerKV
from jax_agent_rl.jetstream.programs import Kernels
from jax_agent_rl.models.config import DecoderConfig, Rope
from jax_agent_rl.models.delta_net import DeltaTokens
from jax_agent_rl.models.layers import EightBits, Quantized, quantized
from tests.tiny import TINY, tiny_params

pytestmark = pytest.mark.skipif(
    cpu_kernels.kernels_digest() is None, reason="no C++ compiler on this machine"
)
SHAPES = EngineShapes(
    max_model_len=96,
    max_concurrent_decodes=3,
    kv_cache_tokens=288,
    decode_steps=8,
    prefill_buckets=(32,),
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normed(x: np.ndarray, weight: np.ndarray, config: DecoderConfig) -> np.ndarray:
    x = x.astype(np.float64)
    scaled = x / np.sqrt((x * x).mean(0) + config.rms_norm_eps)
    return scaled * (config.norm_offset + weight.astype(np.float64))[:, None]


ANY_SHAPE = [(1, 1), (13, 37), (50, 96), (100, 33), (31, 1100)]
"""Rows and numbers of each: whole vectors and parts of them, and more than stay in a cache."""


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 9, 16, 24, 31, 32, 48, 65])
@pytest.mark.parametrize(("rows", "size"), ANY_SHAPE)
def test_a_product_is_that_of_float64_for_any_shape(rows: int, size: int, columns: int):
    weight = normal(rows, size)
    x = normal(size, columns, seed=1)
    product = cpu_kernels.product(TINY, jnp.asarray(weight), jnp.asarray(x))
    np.testing.assert_allclose(product, weight.astype(np.float64) @ x, atol=1e-5 * size**0.5)


def in_float64(weight: Quantized) -> np.ndarray:
    return np.asarray(weight.numbers, np.float64) * np.asarray(weight.scale, np.float64)


@pytest.mark.parametrize("columns", [1, 3, 8, 9, 16, 24, 33])
@pytest.mark.parametrize(("rows", "size"), ANY_SHAPE)
def test_int8_weights_are_multiplied_as_their_scales_times_their_numbers_in_float64(
    rows: int, size: int, columns: int
):
    weight = quantized(jnp.asarray(normal(2, rows, size)), jnp.int8, axis=-1)
    x = normal(size, columns, seed=1)
    norm = normal(size, seed=2)
    product = cpu_kernels.product(TINY, weight, jnp.asarray(x), jnp.asarray(norm))
    wanted = in_float64(weight) @ normed(x, norm, TINY)
    np.testing.assert_allclose(product, wanted, atol=2e-5 * size**0.5)


@pytest.mark.parametrize("columns", [1, 8, 24])
def test_int8_weights_are_gated_as_floats_are(columns: int):
    weight = quantized(jnp.asarray(3 * normal(2, 29, 35)), jnp.int8, axis=-1)
    x = normal(35, columns, seed=1)
    norm = normal(35, seed=2)
    product = cpu_kernels.gated_product(TINY, weight, jnp.asarray(x), jnp.asarray(norm))
    gate, up = in_float64(weight) @ normed(x, norm, TINY)
    wanted = gated(TINY.activation, gate, up)
    np.testing.assert_allclose(product, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 2, 9, 33])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (50, 96), (100, 33)])
def test_each_column_is_multiplied_with_the_matrix_of_its_group(rows: int, size: int, columns: int):
    weight = normal(4, 2, rows, size)
    x = normal(size, columns, seed=1)
    group = (
        np.random.default_rng(2).integers(0, 4, columns).astype(np.int32)
    )  # 0: none, and nobody has the fourth
    weight[3] = np.nan
    product = cpu_kernels.grouped_product(jnp.asarray(weight), jnp.asarray(x), jnp.asarray(group))
    wanted = np.zeros((2, rows, columns))
    for column, group_index in enumerate(group):
        wanted[..., column] = (
            weight[group_index - 1].astype(np.float64) @ x[:, column] if group_index else 0
        )
    np.testing.assert_allclose(product, wanted, atol=1e-5 * size**0.5)


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (8, 6), (5, 37), (128, 128)])
def test_a_step_of_the_delta_rule_is_that_of_float64_and_leaves_idle_slots_alone(
    key_size: int, value_size: int
):
    slots = 3
    heads = 2
    running = np.array([True, False, True])
    tokens = DeltaTokens(
        q=normal(slots, heads, key_size),
        k=normal(slots, heads, key_size, seed=1) / key_size**0.5,
        v=normal(slots, heads, value_size, seed=2),
        log_decay=-abs(normal(slots, heads, seed=3)),
        beta=abs(normal(slots, heads, seed=4)),
    )
    states = normal(slots, heads, key_size, value_size, seed=5)
    tokens.q[1] = np.nan  # of an idle slot

    out, changed = cpu_kernels.delta_step(
        jax.tree.map(jnp.asarray, tokens), jnp.asarray(states), jnp.asarray(running)
    )
    q, k, v, log_decay, beta = (x.astype(np.float64) for x in tokens)
    faded = states * np.exp(log_decay)[..., None, None]
    correction = beta[..., None] * (v - np.einsum("bhk,bhkv->bhv", k, faded))
    expected = faded + np.einsum("bhk,bhv->bhkv", k, correction)
    expected[~running] = states[~running]
    expected_out = np.einsum("bhk,bhkv->bhv", q, expected)
    np.testing.assert_allclose(changed, expected, atol=2e-5)
    np.testing.assert_allclose(out[running], expected_out[running], atol=2e-4)
    np.testing.assert_array_equal(changed[1], states[1])
    np.testing.assert_array_equal(out[1], 0)


@pytest.mark.parametrize("columns", [1, 5, 24])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_applied_to_what_is_multiplied(offset: float, columns: int):
    config = dataclasses.replace(TINY, norm_offset=offset)
    weight = normal(2, 13, 41)
    x = normal(41, columns, seed=1)
    norm = normal(41, seed=2)
    product = cpu_kernels.product(config, jnp.asarray(weight), jnp.asarray(x), jnp.asarray(norm))
    np.testing.assert_allclose(
        product, weight.astype(np.float64) @ normed(x, norm, config), atol=5e-5
    )


def gated(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate = np.minimum(gate, 7)
    up = np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("columns", [1, 5, 24])
def test_a_gated_product_applies_the_models_activation(activation: str, columns: int):
    config = dataclasses.replace(TINY, activation=activation)
    weight = 3 * normal(2, 29, 35)
    x = normal(35, columns, seed=1)
    norm = normal(35, seed=2)
    product = cpu_kernels.gated_product(
        config, jnp.asarray(weight), jnp.asarray(x), jnp.asarray(norm)
    )
    gate, up = weight.astype(np.float64) @ normed(x, norm, config)
    wanted = gated(activation, gate, up)
    np.testing.assert_allclose(product, wanted, rtol=1e-4, atol=1e-4)


def attended(
    config: DecoderConfig,
    qkv: np.ndarray,
    position: int,
    keys: np.ndarray,
    values: np.ndarray,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Return [K, G, h] of one slot in float64: qkv [K, G + 2, h], rotated; cached keys and values
    [K, S, h].
    """
    window = config.sliding_window or position + 1
    visible = slice(max(0, position - window + 1), position)
    keys = np.concatenate([keys[:, visible], qkv[:, -2:-1]], axis=1)
    values = np.concatenate([values[:, visible], qkv[:, -1:]], axis=1)
    scores = np.einsum("kgh,ksh->kgs", qkv[:, :-2], keys) * config.score_scale
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[..., None] - peak)
    return np.einsum("kgs,ksh->kgh", weights / total, values)


def rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate [.., h] by the angles of [r/2]."""
    heads = heads.astype(np.float64).copy()
    pairs = len(cos)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    x = heads[..., first].copy()
    y = heads[..., second].copy()
    heads[..., first] = x * cos - y * sin
    heads[..., second] = y * cos + x * sin
    return heads


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("sinks", [None, 1.0], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "pairs"), [(1, 1, 8, 4), (3, 3, 64, 32), (2, 7, 20, 6)]
)
def test_attention_reads_what_each_slot_sees_in_its_own_pages(
    kv_heads: int,
    group: int,
    size: int,
    pairs: int,
    window: int | None,
    sinks: float | None,
    interleaved: bool,
):
    """Positions at both ends of pages, pages in no order; what no slot sees is NaN."""
    config = dataclasses.replace(
        TINY, num_kv_heads=kv_heads, num_heads=kv_heads * group, head_dim=size,
        rope=Rope(interleaved=interleaved), sliding_window=window,
    )  # fmt: skip
    positions = np.array([0, 31, 32, 77, 95], np.int32)
    pages = 1 + np.random.default_rng(5).permutation(15).astype(np.int32).reshape(5, 3)
    qkv = normal(kv_heads, group + 2, size, 5)
    angles = normal(pairs, 5, seed=1)
    cos = np.cos(angles)
    sin = np.sin(angles)
    keys = normal(5, kv_heads, 96, size, seed=2)
    values = normal(5, kv_heads, 96, size, seed=3)
    own_sinks = None if sinks is None else sinks * normal(kv_heads, group, seed=4)
    unseen = np.arange(96) >= positions[:, None]
    if window:
        unseen |= np.arange(96) <= positions[:, None] - window
    hidden = [
        np.where(unseen[:, None, :, None], np.nan, x).astype(np.float32) for x in (keys, values)
    ]
    paged = [np.zeros((16, kv_heads, 32, size), np.float32) for _ in hidden]
    for to, rows in zip(paged, hidden, strict=True):
        to[pages] = rows.reshape(5, kv_heads, 3, 32, size).swapaxes(1, 2)
    cached = LayerKV(jnp.asarray(paged[0].swapaxes(2, 3)), jnp.asarray(paged[1]))
    mixed, updated = jax.jit(
        cpu_kernels.decode_attention, static_argnums=0, static_argnames="windowed"
    )(config, qkv, cached, positions, pages, (cos, sin), own_sinks, windowed=window is not None)
    for slot, position in enumerate(positions):
        slot_qkv = qkv[..., slot].astype(np.float64)
        slot_qkv[:, :-1] = rotated(slot_qkv[:, :-1], cos[:, slot], sin[:, slot], interleaved)
        wanted = attended(config, slot_qkv, position, keys[slot], values[slot], own_sinks)
        np.testing.assert_allclose(mixed[..., slot], wanted, atol=2e-5)
        page = pages[slot, position // 32]
        np.testing.assert_allclose(
            updated.keys[page, :, :, position % 32], slot_qkv[:, -2], atol=1e-6
        )
        np.testing.assert_array_equal(updated.values[page, :, position % 32], qkv[:, -1, :, slot])
    unchanged = np.ones((16, 32), bool)
    unchanged[pages[np.arange(5), positions // 32], positions % 32] = False
    for new_values, old_values in (
        (updated.keys.swapaxes(2, 3), cached.keys.swapaxes(2, 3)),
        (updated.values, cached.values),
    ):
        np.testing.assert_array_equal(
            *(np.asarray(x).swapaxes(1, 2)[unchanged] for x in (new_values, old_values))
        )


@pytest.mark.parametrize("sinks", [None, 1.0], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_several_tokens_of_a_context_attend_as_one_after_the_other(
    window: int | None, sinks: float | None
):
    """Runs of 1, 7 and 4 tokens, the second across a page's end, beside an idle slot; later
    positions are NaN.
    """
    config = dataclasses.replace(
        TINY, num_kv_heads=3, num_heads=9, head_dim=20, sliding_window=window
    )
    starts = np.array([3, 60, 31, 0])
    counts = np.array([1, 7, 4, 1])
    slot = np.repeat(np.arange(4), counts)
    positions = np.concatenate(
        [s + np.arange(n) for s, n in zip(starts, counts, strict=True)]
    ).astype(np.int32)
    page_table = np.concatenate(
        [
            1 + np.random.default_rng(5).permutation(9).astype(np.int32).reshape(3, 3),
            np.zeros((1, 3), int),
        ]
    )
    qkv = normal(3, 5, 20, len(slot))
    angles = normal(10, len(slot), seed=1)
    keys = normal(10, 3, 32, 20, seed=2)
    values = normal(10, 3, 32, 20, seed=3)
    for context, start in enumerate(starts[:3]):
        for position in range(start, 96):
            for x in (keys, values):
                x[page_table[context, position // 32], :, position % 32] = np.nan
    cached = LayerKV(jnp.asarray(keys.swapaxes(2, 3)), jnp.asarray(values))
    own_sinks = None if sinks is None else sinks * normal(3, 3, seed=4)
    attend = jax.jit(cpu_kernels.decode_attention, static_argnums=0, static_argnames="windowed")

    def run(cached: LayerKV, columns: list[int]) -> tuple[jax.Array, LayerKV]:
        cos_and_sin = np.cos(angles[:, columns]), np.sin(angles[:, columns])
        pages = page_table[slot[columns]].astype(np.int32)
        inputs = (qkv[..., columns], cached, positions[columns], pages, cos_and_sin, own_sinks)
        return attend(config, *inputs, windowed=window is not None)

    mixed, updated = run(cached, list(range(len(slot))))
    for column in range(len(slot)):
        one_mixed, cached = run(cached, [column])
        np.testing.assert_allclose(mixed[..., column], one_mixed[..., 0], atol=1e-5)
    used = np.unique(page_table[:3])
    for together, one_by_one in ((updated.keys, cached.keys), (updated.values, cached.values)):
        np.testing.assert_array_equal(np.asarray(together)[used], np.asarray(one_by_one)[used])


VARIANTS: dict[str, tuple[DecoderConfig, EightBits | None]] = {
    "plain": (TINY, None),
    "biases": (dataclasses.replace(TINY, qkv_bias=True), None),
    "norms of queries and keys": (dataclasses.replace(TINY, qk_norm=True), None),
    "int8 weights": (TINY, "int8"),
}
"""Models, and the 8-bit type of their matrices."""


def sampled(engine: JaxEngine, config: DecoderConfig) -> tuple[np.ndarray, np.ndarray]:
    """Decode three contexts of different lengths after a prefill, over a page's end."""
    params = engine.load_params(tiny_params(config=config))
    cache = engine.init_cache()
    slots = make_decode_batch(3, SHAPES.context_pages)
    slots.pages[:] = 1 + np.arange(9).reshape(3, 3)
    prompts = [
        np.random.default_rng(n).integers(3, config.vocab_size, n).astype(np.int32)
        for n in (29, 5, 60)
    ]
    for begin, end in ((0, 3), (3, -1)):  # together more ids than a pass takes
        parts = zip(slots.pages, prompts, strict=True)
        cache = engine.extend(
            params, cache, [Extension(pages, begin, ids[begin:end]) for pages, ids in parts]
        )
    slots.tokens[:] = [ids[-1] for ids in prompts]
    slots.positions[:] = [len(ids) - 1 for ids in prompts]
    slots.remaining[:] = 8
    slots.temperature[:] = 1
    slots.seed[:] = np.arange(3)
    _, decoded = engine.decode(params, cache, slots, 8, 4)
    return decoded.ids, decoded.log_probs


@pytest.mark.parametrize(("config", "quantize"), VARIANTS.values(), ids=VARIANTS)
def test_the_engine_samples_the_same_ids_with_and_without_kernels(
    config: DecoderConfig, quantize: EightBits | None, monkeypatch
):
    native = JaxEngine(config, SHAPES, quantize=quantize)
    assert native.context.kernels is Kernels.CPU
    monkeypatch.setattr(cpu_kernels, "kernels_digest", lambda: None)
    plain = JaxEngine(config, SHAPES, quantize=quantize)
    ids, log_probs = sampled(plain, config)
    assert plain.context.kernels is Kernels.NONE
    monkeypatch.undo()
    native_ids, native_log_probs = sampled(native, config)
    np.testing.assert_array_equal(native_ids, ids)
    np.testing.assert_allclose(native_log_probs, log_probs, atol=1e-4)


def test_only_an_engine_of_float32_and_perhaps_int8_weights_on_one_cpu_uses_them():
    assert JaxEngine(TINY, SHAPES, dtype=jnp.bfloat16).context.kernels is Kernels.NONE
    assert JaxEngine(TINY, SHAPES, kv_dtype="int8").context.kernels is Kernels.NONE
    assert JaxEngine(TINY, SHAPES, quantize="fp8").context.kernels is Kernels.NONE
    assert JaxEngine(TINY, SHAPES, deterministic=True).context.kernels is Kernels.NONE


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A process that has built nothing yet, with an empty cache."""
    monkeypatch.setenv("JAX_AGENT_RL_CACHE", str(tmp_path))
    cpu_kernels.register_kernels.cache_clear()
    yield monkeypatch
    cpu_kernels.register_kernels.cache_clear()


def test_without_a_compiler_xla_decodes_and_the_log_says_so(unbuilt, tmp_path: Path, caplog):
    unbuilt.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert JaxEngine(TINY, SHAPES).context.kernels is Kernels.NONE
        assert JaxEngine(TINY, SHAPES).context.kernels is Kernels.NONE
    (line,) = [r.getMessage() for r in caplog.records if r.name == cpu_kernels.__name__]
    assert "no C++ compiler" in line
    assert "install one" in line


def test_a_compiler_that_fails_is_named_and_leaves_nothing_behind(unbuilt, tmp_path: Path, caplog):
    unbuilt.setattr(cpu_kernels, "FLAGS", ("--no-such-flag",))
    with caplog.at_level(logging.WARNING):
        assert cpu_kernels.kernels_digest() is None
    assert "could not build the decode kernels" in caplog.text
    assert "no-such-flag" in caplog.text
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_second_process_finds_the_library_built(unbuilt, tmp_path: Path):
    unbuilt.setattr(
        jax.ffi, "register_ffi_target", lambda *_, **__: None
    )  # this process has registered another copy
    digest = cpu_kernels.kernels_digest()
    (file,) = (tmp_path / "kernels").iterdir()
    built_at = file.stat().st_mtime_ns
    cpu_kernels.register_kernels.cache_clear()
    assert cpu_kernels.kernels_digest() == digest
    assert file.stat().st_mtime_ns == built_at
