"""The engine's attention as a TPU runs it, interpreted, against the plain products of other
machines.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream import attention
from jax_agent_rl.jetstream import decode_kernel as decode_kernel_module
from jax_agent_rl.jetstream.decode_kernel import decode_kernel, write_kernel
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, gather_pages, to_cache
from jax_agent_rl.models.layers import DTYPES
from tests.examples import examples

LENGTH = 300  # of a row
PAGE = 64
COUNT = 5
PAGES = jnp.array(
    [[7, 2, 9, 11, 4], [7, 2, 1, 3, 12], [5, 8, 10, 6, 13]]
)  # of three slots; two begin alike


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def kept(kind: str, seed: int, length: int, rows: int = 3) -> LayerKV:
    """Random rows (or pages) of two heads, as a cache of that type keeps them."""
    keys = drawn(seed, rows, 2, 8, length)
    values = drawn(seed + 1, rows, 2, length, 8)
    return to_cache(keys, values, DTYPES.get(kind, jnp.float32))


def in_rows(cached: LayerKV, counts: jax.Array) -> LayerKV:
    """The slots' pages up to there, as other machines see them."""
    return gather_pages(KVCache((cached,)), PAGES, counts).layers[0]


def lost_behind(cached: LayerKV, counts: jax.Array) -> LayerKV:
    """Pages that hold only what slots see, and numbers of no use else."""
    held = np.zeros((len(cached.keys), PAGE), bool)
    for pages, count in zip(np.asarray(PAGES), np.asarray(counts), strict=True):
        held[pages] |= np.arange(COUNT * PAGE).reshape(COUNT, PAGE) < count

    def lost(axis: int, x: jax.Array) -> jax.Array:
        nothing = 99 if x.dtype == jnp.int8 else jnp.nan
        return jnp.where(
            np.expand_dims(held, [i for i in (1, 2, 3) if i != axis]),
            x,
            jnp.array(nothing, x.dtype),
        )

    return cached.by_position(lost)


@functools.partial(jax.jit, static_argnames="window")
def decoded_by_kernel(q, cached, positions, sinks=None, *, window):
    with pltpu.force_tpu_interpret_mode(True):
        return decode_kernel(q, cached, PAGES, positions, sinks, window=window)


@jax.jit
def written_by_kernel(cached, new, positions):
    with pltpu.force_tpu_interpret_mode(True):
        return write_kernel(cached, new, PAGES, positions)


@functools.partial(jax.jit, static_argnames="window")
def chunk_by_kernel(q, cached, new, starts, sinks=None, *, window):
    with pltpu.force_tpu_interpret_mode(True):
        return attention.chunk_by_kernel(q, cached, new, starts, sinks, window=window)


plain_decode = jax.jit(attention.decode_attention, static_argnames="window")
plain_chunk = jax.jit(attention.chunk_attention, static_argnames="window")


own_positions = st.integers(2 * PAGE, COUNT * PAGE - 1)  # behind what two slots share


@pytest.mark.parametrize(
    ("kind", "window"), [("float32", None), ("float32", 1), ("int8", 150), ("fp8", None)]
)
@settings(max_examples=examples(10))
@given(positions=st.tuples(own_positions, own_positions, st.integers(0, COUNT * PAGE - 1)))
def test_a_slot_writes_its_token_and_sees_its_pages_up_to_there(kind, window, positions):
    q = drawn(0, 3, 2, 4, 8)
    cached = kept(kind, 1, PAGE, rows=14)
    at = jnp.array(positions, jnp.int32)
    k = drawn(3, 3, 2, 8)
    v = drawn(4, 3, 2, 8)
    wanted, written = plain_decode(q, in_rows(cached, at), (k, v), at, window=window)
    cached = written_by_kernel(cached, to_cache(k[..., None], v[:, :, None], cached.keys.dtype), at)
    jax.tree.map(np.testing.assert_array_equal, in_rows(cached, at + 1), written)
    np.testing.assert_allclose(decoded_by_kernel(q, cached, at, window=window), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("most_bytes", [0, 1 << 30])  # a slot per step, or all
def test_whole_tiles_are_written_together_as_each_alone(kind, most_bytes, monkeypatch):
    monkeypatch.setattr(decode_kernel_module, "MAX_WRITE_BYTES", most_bytes)
    dtype = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}[kind]
    cached, new = (
        to_cache(drawn(seed, rows, 2, 128, length), drawn(seed + 1, rows, 2, length, 128), dtype)
        for seed, rows, length in ((1, 9, 256), (3, 4, 1))
    )
    at = jnp.array([7, 2, 5, 8])
    within = jnp.array([255, 0, 130, 31])
    with pltpu.force_tpu_interpret_mode(True):
        alone = jax.jit(decode_kernel_module.write_each)(at, within, cached, new)
        together = jax.jit(lambda *x: decode_kernel_module.write_together(*x))(
            at, within, cached, new
        )
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    changed = np.argwhere(np.asarray(alone.values != cached.values).any((1, 3)))
    assert changed.tolist() == [[2, 0], [5, 130], [7, 255], [8, 31]]


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_what_a_slot_does_not_see_is_not_read(kind):
    q = drawn(0, 3, 2, 4, 8)
    cached = kept(kind, 1, PAGE, rows=14)
    at = jnp.array([200, 200, 200])
    wanted = decoded_by_kernel(q, cached, at, window=50)
    seen = PAGES[:, 2:4].reshape(-1)  # the window begins in the third page, and ends in the fourth

    def lost(axis: int, x: jax.Array) -> jax.Array:
        """Replace what no slot sees."""
        nothing = jnp.full_like(x, jnp.nan if x.dtype != jnp.int8 else 99)
        lost = nothing.at[seen].set(x[seen])
        within = jnp.arange(PAGE).reshape([-1 if i == axis else 1 for i in range(4)])
        return lost.at[PAGES[:, 3]].set(jnp.where(within > 200 % PAGE, nothing[:3], x[PAGES[:, 3]]))

    np.testing.assert_array_equal(
        decoded_by_kernel(q, cached.by_position(lost), at, window=50), wanted
    )


@pytest.mark.parametrize("kind", ["float32", "int8", "fp8"])
def test_what_pages_held_before_is_lost_on_rows(kind):
    """NaNs in pages of weights that went wrong, say."""
    cached = kept(kind, 1, PAGE, rows=14)
    at = jnp.array([200, 128, 130])
    clean = in_rows(cached, jnp.full(3, COUNT * PAGE))
    dirty = in_rows(lost_behind(cached, at), at)
    one_token = (drawn(3, 3, 2, 8), drawn(4, 3, 2, 8))
    chunk = kept(kind, 5, 50)
    for wanted, got in (
        (
            plain_decode(drawn(0, 3, 2, 4, 8), row, one_token, at, window=None)[0]
            for row in (clean, dirty)
        ),
        (
            plain_chunk(drawn(0, 2, 3, 8, 3, 50), row, chunk, at, window=None)
            for row in (clean, dirty)
        ),
        (
            chunk_by_kernel(drawn(0, 2, 3, 8, 3, 50), row, chunk, at, window=None)
            for row in (clean, dirty)
        ),
    ):
        assert np.isfinite(wanted).all()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("kind", "window"), [("float32", None), ("float32", 40), ("int8", 40)])
@settings(max_examples=examples(10))
@given(starts=st.tuples(*[st.integers(0, LENGTH)] * 3))
def test_a_chunk_sees_the_cache_before_it_and_itself(kind, window, starts):
    q = drawn(0, 2, 3, 8, 3, 50)
    at = jnp.array(starts, jnp.int32)
    cached = kept(kind, 1, LENGTH)
    new = kept(kind, 3, 50)
    wanted = plain_chunk(q, cached, new, at, window=window)
    np.testing.assert_allclose(
        chunk_by_kernel(q, cached, new, at, window=window), wanted, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 40])
def test_a_sink_takes_its_share_in_kernels_and_products(window):
    """Against a softmax with a column more, without a value, as transformers computes it."""
    sinks = 3 * drawn(9, 2, 4)
    q = drawn(0, 3, 2, 4, 8)
    cached = kept("float32", 1, PAGE, rows=14)
    at = jnp.array([200, 128, 130])
    k = drawn(3, 3, 2, 8)
    v = drawn(4, 3, 2, 8)
    mixed, rows = plain_decode(q, in_rows(cached, at), (k, v), at, None, sinks, window=window)
    written = written_by_kernel(cached, to_cache(k[..., None], v[:, :, None], jnp.float32), at)
    distance = at[:, None] - jnp.arange(rows.values.shape[2])
    visible = (distance >= 0) & (distance < (window or PAGE * COUNT))
    scores = jnp.where(
        visible[:, None, None], jnp.einsum("bkgh,bkhs->bkgs", q, rows.keys), -jnp.inf
    )
    column = jnp.broadcast_to(sinks[None, ..., None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), axis=-1)[..., :-1]
    expected = jnp.einsum("bkgs,bksh->bkgh", weights, rows.values)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    np.testing.assert_allclose(
        decoded_by_kernel(q, written, at, sinks, window=window), expected, atol=1e-5
    )

    q = drawn(0, 2, 4, 8, 3, 50)
    rows = kept("float32", 1, LENGTH)
    chunk = kept("float32", 3, 50)
    products = plain_chunk(q, rows, chunk, at, sinks, window=window)
    np.testing.assert_allclose(
        chunk_by_kernel(q, rows, chunk, at, sinks, window=window), products, atol=1e-5
    )
    # The first token of a chunk attends as one that is decoded there.
    first = (chunk.keys[..., 0], chunk.values[:, :, 0])
    decoded, _ = plain_decode(
        q[..., 0].transpose(3, 0, 1, 2), rows, first, at, None, sinks, window=window
    )
    np.testing.assert_allclose(products[..., 0].transpose(3, 0, 1, 2), decoded, atol=1e-5)
