"""What the scheduler counts."""

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.tiny import TINY, tiny_params

SHAPES = EngineShapes(
    max_model_len=64, max_concurrent_decodes=3, cache_tokens=192, decode_steps=4, prefill_buckets=(32,)
)


def test_lanes_without_a_context_count_as_idle():
    engine = JaxEngine(TINY, SHAPES)
    on = Scheduler(engine, engine.load_params(tiny_params()))
    for name, count in (("short", 4), ("long", 8)):
        sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
        on.submit(GenerateRequest(request_id=name, prompt_ids=(5, 6, 7), sampling=sampling))
    while on.running or on.waiting:
        on.step()
    metrics = on.metrics()
    # Four steps of two contexts, and four of one, in a program of two lanes.
    assert (metrics.generated_tokens, metrics.lane_steps) == (12, 16)
