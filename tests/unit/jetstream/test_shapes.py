"""Static shapes chosen for a run."""

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens, prefill_buckets


@given(longest=st.integers(1, 100_000))
def test_chosen_chunks_ascend_to_one_that_holds_the_prompt_or_the_longest(longest):
    buckets = prefill_buckets(longest)
    assert list(buckets) == sorted(set(buckets))
    assert min(longest, 2048) <= buckets[-1] <= 2048
    assert len(buckets) == 1 or buckets[-2] < longest, "a bucket that nothing needs"


@given(longest=st.integers(16, 40_000))
def test_pages_hold_the_longest_context_and_those_of_long_ones_are_whole_tiles(longest):
    shapes = EngineShapes(
        max_model_len=longest,
        max_concurrent_decodes=4,
        kv_cache_tokens=4 * longest,
        decode_steps=4,
        prefill_buckets=prefill_buckets(longest),
    )
    assert shapes.span_buckets[-1] == shapes.cache_length
    assert longest <= shapes.cache_length < longest + shapes.page
    assert shapes.page * shapes.pages <= max(shapes.kv_cache_tokens, shapes.cache_length)
    if longest >= 1024:
        assert not any(span % 128 for span in (*shapes.span_buckets, *shapes.prefill_spans))


@given(longest=st.integers(16, 40_000), slots=st.integers(1, 64), in_flight=st.integers(1, 256))
def test_left_to_itself_a_cache_lets_every_slot_run_to_its_end(longest, slots, in_flight):
    shapes = EngineShapes(
        max_model_len=longest,
        max_concurrent_decodes=slots,
        kv_cache_tokens=kv_cache_tokens(longest, slots, in_flight),
        decode_steps=4,
        prefill_buckets=(32,),
    )
    assert (
        slots * shapes.context_pages <= shapes.pages <= max(slots, in_flight) * shapes.context_pages
    )
