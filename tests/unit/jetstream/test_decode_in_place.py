"""Decode steps on pages where they lie, as a TPU (interpreted) and a CPU run them, against those on
gathered rows.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import DecodeBatch, make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, Extension, JaxEngine
from jax_agent_rl.jetstream.kv_cache import KVCache, gather_pages
from jax_agent_rl.jetstream.programs import Kernels, decode_program
from tests.tiny import TINY, tiny_params

STEPS = 6
needs_compiler = pytest.mark.skipif(
    cpu_kernels.kernels_digest() is None, reason="no C++ compiler on this machine"
)
ALL_KERNELS = [pytest.param(k, marks=needs_compiler) if k is Kernels.CPU else k for k in Kernels]
SHAPES = EngineShapes(
    max_model_len=96,
    max_concurrent_decodes=4,
    kv_cache_tokens=288,
    decode_steps=STEPS,
    prefill_buckets=(32,),
)


def three_slots() -> DecodeBatch:
    """Two contexts that begin alike, one of them about to need its next page, one that ends early,
    an unused slot.
    """
    slots = make_decode_batch(4, SHAPES.context_pages)
    slots.pages[:3] = [[4, 2, 9], [4, 7, NULL_PAGE], [1, NULL_PAGE, NULL_PAGE]]
    slots.tokens[:3] = 11, 12, 13
    slots.positions[:3] = 61, 40, 5
    slots.remaining[:3] = STEPS, STEPS, 2
    return slots


def decoded(kernels: Kernels, cache: KVCache, slots: DecodeBatch) -> tuple[KVCache, jax.Array]:
    engine = JaxEngine(TINY, SHAPES)
    params = engine.load_params(tiny_params())
    program = jax.jit(decode_program(TINY, STEPS, None, kernels))
    with (
        pltpu.force_tpu_interpret_mode(True)
        if kernels is Kernels.PALLAS
        else contextlib.nullcontext()
    ):
        return program(params, cache, slots, np.array([STEPS, 9], np.int32))


@pytest.mark.parametrize("kernels", ALL_KERNELS[1:])
def test_pages_read_where_they_lie_give_the_same_ids_and_the_same_cache(kernels: Kernels):
    empty = JaxEngine(TINY, SHAPES).init_cache()
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)
    slots = three_slots()
    updated, (ids, scores) = decoded(kernels, cache, slots)
    wanted, (wanted_ids, wanted_scores) = decoded(Kernels.NONE, cache, slots)
    np.testing.assert_array_equal(ids, wanted_ids)
    ran = np.asarray(ids) >= 0
    assert ran.sum(0).tolist() == [STEPS, STEPS, 2, 0]
    logprobs, exact = (np.asarray(x).view(np.float32)[ran] for x in (scores, wanted_scores))
    np.testing.assert_allclose(logprobs, exact, atol=1e-4)

    # Each slot's new ids are in its own pages; of the others nothing changed, page 0 is nobody's.
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    held = (
        gather_pages(cache, slots.pages, slots.positions + ran.sum(0))
        for cache in (updated, wanted)
    )
    jax.tree.map(close, *held)
    for held, initial in zip(jax.tree.leaves(updated), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(
            held[jnp.array([3, 4, 5, 6, 8])], initial[jnp.array([3, 4, 5, 6, 8])]
        )
        assert all(np.any(held[page] != initial[page]) for page in (1, 2, 7, 9))


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_pages_that_held_nans_serve_like_empty_ones(kernels: Kernels):
    """Pages of weights that went wrong are used again when right ones have come."""
    engine = JaxEngine(TINY, SHAPES)
    slots = make_decode_batch(2, SHAPES.context_pages)
    prompt = np.arange(3, 44, dtype=np.int32)
    params = engine.load_params(tiny_params())
    slots.pages[0] = (4, 2, 9)
    slots.tokens[0] = prompt[-1]
    slots.positions[0] = len(prompt) - 1
    slots.remaining[0] = STEPS

    def served(cache: KVCache) -> jax.Array:
        """Serve two chunks, the second of which begins within a page, and sample after them."""
        for part in (slice(0, 20), slice(20, -1)):
            cache = engine.extend(params, cache, [Extension((4, 2), part.start, prompt[part])])
        return decoded(kernels, cache, slots)[1]

    wanted = served(engine.init_cache())
    after_nans = served(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine.init_cache()))
    np.testing.assert_array_equal(after_nans[:, :, 0], wanted[:, :, 0])
