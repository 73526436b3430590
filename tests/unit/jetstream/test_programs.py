"""The table of programs, and when an engine compiles which."""

import jax
import numpy as np
import pytest

from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.driver_interface import JetStreamEngine
from jax_agent_rl.jetstream.engine import EngineShapes, Extension, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.models.sharding import replicated
from tests.tiny import TINY, tiny_params

SHAPES = EngineShapes(
    max_model_len=256,
    max_concurrent_decodes=4,
    kv_cache_tokens=512,
    decode_steps=4,
    prefill_buckets=(16, 32),
)


@pytest.fixture
def engine() -> JaxEngine:
    return JaxEngine(TINY, SHAPES)


@pytest.fixture(scope="module")
def place() -> jax.sharding.NamedSharding:
    return replicated(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1]))


def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def test_on_a_cpu_a_program_is_compiled_when_needed_together_with_the_next_one(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_kernels, "kernels_digest", lambda: None)
    params = engine.load_params(tiny_params())
    cache = engine.warm_up(params, engine.init_cache())
    compiled = len(engine.program_table)
    slots = make_decode_batch(3, SHAPES.context_pages, 10)
    cache, _ = engine.decode(params, cache, slots, 4, 1)
    assert len(engine.program_table) == compiled + 2  # 64 positions, and 128
    cache, _ = engine.decode(params, cache, make_decode_batch(3, SHAPES.context_pages, 100), 4, 1)
    assert len(engine.program_table) == compiled + 2
    cache = engine.extend(
        params, cache, [Extension(pages=(1,), start=0, ids=np.arange(3, 12, dtype=np.int32))]
    )
    assert len(engine.program_table) == compiled + 4  # what computes a chunk, and what writes it
    assert engine.program_table.recompilations == 0


@pytest.mark.skipif(cpu_kernels.kernels_digest() is None, reason="no C++ compiler on this machine")
def test_with_kernels_for_cpus_one_program_serves_contexts_of_all_lengths(engine: JaxEngine):
    params = engine.load_params(tiny_params())
    cache = engine.warm_up(params, engine.init_cache())
    compiled = len(engine.program_table)
    for position in (10, 100, 250):
        cache, _ = engine.decode(
            params, cache, make_decode_batch(3, SHAPES.context_pages, position), 4, 1
        )
        assert (
            len(engine.program_table) == compiled + 2
        )  # four slots, and two, to which these soon fall
    for start, count in ((0, 9), (0, 16), (9, 7)):
        ids = np.arange(3, 3 + count, dtype=np.int32)
        cache = engine.extend(params, cache, [Extension(pages=(1,), start=start, ids=ids)])
        assert len(engine.program_table) == compiled + 3
    assert engine.program_table.recompilations == 0


def test_ahead_all_programs_are_compiled_that_the_shapes_allow():
    small = EngineShapes(
        max_model_len=24,
        max_concurrent_decodes=1,
        kv_cache_tokens=32,
        decode_steps=2,
        prefill_buckets=(8,),
    )
    engine = JaxEngine(TINY, small, compile_ahead=True)
    params = engine.load_params(tiny_params())
    compiled = len(engine.program_table)
    cache = engine.warm_up(params, engine.init_cache())
    assert len(engine.program_table) - compiled == len(engine.program_keys()) + 1  # the empty cache
    engine.decode(params, cache, make_decode_batch(1, small.context_pages, 3), 2, 1)
    assert engine.program_table.recompilations == 0


def test_a_program_the_shapes_do_not_allow_counts_as_a_recompilation(engine: JaxEngine):
    params = engine.load_params(tiny_params())
    engine.warm_up(params, engine.init_cache())
    driven = JetStreamEngine(engine)
    driven.prefill(
        params=params, padded_tokens=np.arange(3, 20), true_length=17
    )  # in a cache of one context
    assert engine.program_table.recompilations > 0


def test_a_program_that_will_follow_is_compiled_once_and_gives_its_own_result(
    place: jax.sharding.NamedSharding,
):
    program_table = ProgramTable()
    small = np.ones(2, np.float32)
    large = np.ones(3, np.float32)
    first = program_table.call(
        ("a",),
        doubled,
        (),
        small,
        default_sharding=place,
        out=place,
        next_call=lambda: (("b",), (large,)),
    )
    assert len(program_table) == 2
    assert first.tolist() == [2, 2]
    again = program_table.call(
        ("b",),
        doubled,
        (),
        large,
        default_sharding=place,
        out=place,
        next_call=lambda: pytest.fail("it is there"),
    )
    assert len(program_table) == 2
    assert again.tolist() == [2, 2, 2]
