"""When the scheduler ends a dispatch, and what it counts."""

import dataclasses

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.tiny import TINY, tiny_params

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=192,
    decode_steps=4,
    prefill_buckets=(32,),
)


def test_slots_without_a_context_count_as_idle():
    engine = JaxEngine(TINY, SHAPES)
    on = Scheduler(engine, engine.load_params(tiny_params()))
    for name, count in (("short", 4), ("long", 8)):
        sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
        on.submit(GenerateRequest(request_id=name, prompt_ids=(5, 6, 7), sampling=sampling))
    while on.running or on.waiting:
        on.step()
    metrics = on.metrics()
    # Four steps of two contexts, and four of one, in a program of two slots.
    assert (metrics.generated_tokens, metrics.slot_steps) == (12, 16)


def test_a_dispatch_ends_when_a_quarter_of_its_contexts_have_finished():
    shapes = dataclasses.replace(
        SHAPES, max_concurrent_decodes=8, kv_cache_tokens=512, decode_steps=8
    )
    engine = JaxEngine(TINY, shapes)
    on = Scheduler(engine, engine.load_params(tiny_params()))
    for index, count in enumerate((1, 3, 5, 8, 8, 8, 8, 8)):
        sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
        on.submit(GenerateRequest(request_id=str(index), prompt_ids=(5, 6, 7), sampling=sampling))
    sampled = []
    while on.running or on.waiting:
        sampled.append([len(chunk.token_ids) for _, chunk in on.step()])
    # Two of eight have finished after three steps; one of the six that are left after two more.
    assert sampled == [[1, 3, 3, 3, 3, 3, 3, 3], [2, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3]]


def test_a_dispatch_ends_when_a_program_of_fewer_slots_will_do():
    shapes = dataclasses.replace(
        SHAPES, max_concurrent_decodes=12, kv_cache_tokens=768, decode_steps=8
    )
    engine = JaxEngine(TINY, shapes)
    on = Scheduler(engine, engine.load_params(tiny_params()))
    for index, count in enumerate((2, *[6] * 8)):
        sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
        on.submit(GenerateRequest(request_id=str(index), prompt_ids=(5, 6, 7), sampling=sampling))
    on.step()
    assert on.metrics().slot_steps == 2 * 12
    on.step()
    assert on.metrics().slot_steps == 2 * 12 + 4 * 8
