"""Keys, values and weights in 8 bits: as rounded by hand, in the memory that is promised, and
however they come in.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.attention import decode_attention
from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, Extension, JaxEngine
from jax_agent_rl.jetstream.forward import engine_params
from jax_agent_rl.jetstream.kv_cache import LayerKV, from_cache, gather_pages, to_cache
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.models.config import DecoderConfig, Experts, Params
from jax_agent_rl.models.layers import DTYPES
from tests.tiny import LATENT, TINY, full_logits, tiny_params

EXPERTS = replace(TINY, experts=Experts(count=4, per_token=2, intermediate_size=24, normalize=True))
assert EXPERTS.experts is not None
SHARED = replace(
    EXPERTS,
    experts=replace(
        EXPERTS.experts, scoring="sigmoid", correction=True, shared_size=16, shared_gated=True
    ),
)
SHAPES = EngineShapes(
    max_model_len=60,
    max_concurrent_decodes=2,
    kv_cache_tokens=128,
    decode_steps=4,
    prefill_buckets=(8, 64),
)
IDS = np.random.default_rng(7).integers(3, TINY.vocab_size, 48).tolist()
LARGEST = {"int8": 127.0, "fp8": 448.0}
BOTH = pytest.mark.parametrize("kind", ["int8", "fp8"])


def scored(
    config: DecoderConfig, params: Params, *, kv: str | None = None, weights: str | None = None
) -> np.ndarray:
    """Log-probs of IDS, fed one by one."""
    slots = make_decode_batch(1, 2)
    count = len(IDS) - 1
    slots.pages[:] = [2, 1]
    slots.tokens[:] = IDS[0]
    slots.remaining[:] = count
    slots.temperature[:] = 1.0
    decode = jax.jit(programs.decode_program(config, count, None, programs.Kernels.NONE))
    held = engine_params(config, params, dtype=jnp.float32, quantize=weights and DTYPES[weights])
    cache = empty_cache(config, 3, 32, DTYPES[kv] if kv else jnp.float32)
    _, out = decode(held, cache, slots, np.array([count, 2]), np.array(IDS[1:], np.int32)[:, None])
    return np.asarray(out)[1, :, 0].view(np.float32)


def in_floats(config: DecoderConfig, params: Params) -> np.ndarray:
    """The same by one full pass of the learner's model."""
    return np.asarray(jax.nn.log_softmax(full_logits(params, IDS, config)))[
        np.arange(len(IDS) - 1), IDS[1:]
    ]


def rounded(x: jax.Array, kind: str) -> jax.Array:
    """What is left of vectors along the last axis, by numpy."""
    scale = np.abs(x).max(-1, keepdims=True) / LARGEST[kind]
    parts = np.asarray(x) / scale
    return jnp.asarray(
        (np.round(parts) if kind == "int8" else parts.astype(ml_dtypes.float8_e4m3fn)) * scale
    )


def rounded_by_head(kv_b: jax.Array, config: DecoderConfig, kind: str) -> jax.Array:
    """Heads' key matrices are rounded transposed, as an engine multiplies queries with them."""
    assert config.latent is not None
    by_head = kv_b.reshape(len(kv_b), config.num_heads, -1, config.latent.kv_rank)
    keys = rounded(by_head[:, :, : config.latent.nope_dim].mT, kind).mT
    values = rounded(by_head[:, :, config.latent.nope_dim :], kind)
    return jnp.concatenate([keys, values], axis=2).reshape(kv_b.shape)


@pytest.mark.parametrize(
    "config",
    [TINY, EXPERTS, SHARED, LATENT],
    ids=["dense", "experts", "shared expert", "latent"],
)
@BOTH
def test_log_probs_are_those_of_the_rounded_matrices(kind, config):
    params = tiny_params(config=config)
    layers = {}
    for name, x in params["layers"].items():
        if name == "kv_b":
            layers[name] = rounded_by_head(x, config, kind)
        elif x.ndim > 2 and "router" not in name:
            layers[name] = rounded(x, kind)
        else:
            layers[name] = x
    log_probs = scored(config, params, weights=kind)
    np.testing.assert_allclose(log_probs, in_floats(config, params | {"layers": layers}), atol=2e-4)
    assert (
        1e-3 < np.abs(log_probs - in_floats(config, params)).mean() < (0.2 if kind == "int8" else 1)
    )


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_a_cache_keeps_each_vector_to_a_part_of_its_largest_number(kind, bound):
    keys, values = (
        jnp.asarray(np.random.default_rng(i).standard_normal((2, 3, 16, 16)), jnp.float32)
        for i in (0, 1)
    )
    quantized = to_cache(keys, values, DTYPES[kind])
    assert quantized.scales.shape == (2, 3, 2, 16)
    for got, wanted, axis in zip(
        from_cache(quantized, jnp.float32), (keys, values), (2, 3), strict=True
    ):
        assert (
            np.abs(got - wanted) <= 1.001 * bound * np.abs(wanted).max(axis, keepdims=True)
        ).all()


@BOTH
def test_attention_is_that_over_what_the_cache_restores(kind):
    def drawn(seed: int, *shape: int) -> jax.Array:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)

    cached = to_cache(drawn(0, 3, 2, 8, 20), drawn(1, 3, 2, 20, 8), DTYPES[kind])
    q = drawn(2, 3, 2, 4, 8)
    k = drawn(3, 3, 2, 8)
    v = drawn(4, 3, 2, 8)
    at = jnp.array([0, 7, 19])
    mixed, written = decode_attention(q, cached, (k, v), at)
    floats = LayerKV(*from_cache(written, jnp.float32))
    current_kv = floats.keys[jnp.arange(3), :, :, at], floats.values[jnp.arange(3), :, at]
    np.testing.assert_allclose(mixed, decode_attention(q, floats, current_kv, at)[0], atol=1e-5)
    np.testing.assert_allclose(current_kv[0], k, atol=0.1)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.1), ("fp8", 0.4)])
def test_log_probs_over_a_cache_stay_near_those_of_floats(kind, bound):
    """The model's distributions are far from uniform, as a trained model's are."""
    params = tiny_params()
    assert 1e-4 < np.abs(scored(TINY, params, kv=kind) - in_floats(TINY, params)).mean() < bound


def test_a_cache_and_matrices_take_the_memory_of_8_bits():
    engine = JaxEngine(TINY, SHAPES, kv_dtype="int8", quantize="int8")
    floats = JaxEngine(TINY, SHAPES)

    def taken(tree) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    # Of each head's 8 numbers one byte each and 4 of a scale, in place of 4 each.
    assert taken(engine.init_cache()) * 32 == taken(floats.init_cache()) * 12
    served, plain = (e.load_params(tiny_params()).layers[0] for e in (engine, floats))
    for name in ("qkv", "o", "gate_up", "down"):
        assert served[name].numbers.nbytes * 4 == plain[name].nbytes
        assert taken(served[name]) * 4 == plain[name].nbytes * (1 + 4 / plain[name].shape[-1])


def test_a_prompt_is_kept_alike_however_it_is_cut():
    engine = JaxEngine(TINY, SHAPES, kv_dtype="int8")
    params = engine.load_params(tiny_params())
    ids = np.array(IDS, np.int32)
    at_once = engine.extend(params, engine.init_cache(), [Extension((1, 2), 0, ids)])
    cut = engine.init_cache()
    for begin in range(0, len(ids), 8):
        cut = engine.extend(params, cut, [Extension((1, 2), begin, ids[begin : begin + 8])])

    def compare(axis: int, a: jax.Array, b: jax.Array) -> None:
        held, again = (
            np.asarray(jax.lax.slice_in_dim(x, 0, len(ids), axis=axis), float) for x in (a, b)
        )
        # A float that is off by its last bit may fall on the other side of a half, and be felt in
        # the layers above.
        assert np.abs(held - again).mean() < 0.05

    whole_row, cut_row = (
        gather_pages(cache, jnp.array([[1, 2]]), jnp.array([len(ids)])) for cache in (at_once, cut)
    )
    for a, b in zip(whole_row.layers, cut_row.layers, strict=True):
        a.by_position(compare, b)


def test_new_weights_are_rounded_by_their_own_scales_and_compile_nothing():
    engine = JaxEngine(TINY, SHAPES, quantize="int8")
    first = engine.load_params(tiny_params(0))
    engine.program_table.end_warm_up()
    larger = jax.tree.map(lambda x: 3 * x, tiny_params(0))
    second = engine.load_params(larger, first)
    assert engine.program_table.recompilations == 0
    jax.tree.map(
        np.testing.assert_array_equal,
        second,
        JaxEngine(TINY, SHAPES, quantize="int8").load_params(larger),
    )
