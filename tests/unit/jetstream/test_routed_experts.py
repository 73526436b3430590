"""The engine says which experts every position it fed chose, however its keys and values were
computed.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import RoutedExperts, SamplingParams, StopReason, TokenOutput
from tests.driven_engine import finished
from tests.tiny import EXPERTS, TINY, tiny_params

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=384,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
PROMPTS = [
    np.random.default_rng(i).integers(3, TINY.vocab_size, n).tolist()
    for i, n in enumerate((9, 21, 30))
]


@functools.cache
def programs(shapes: EngineShapes) -> ProgramTable:
    """Compiled once for all tests."""
    return ProgramTable()


def scheduler(shapes: EngineShapes = SHAPES) -> Scheduler:
    engine = JaxEngine(EXPERTS, shapes, program_table=programs(shapes))
    return Scheduler(engine, engine.load_params(tiny_params(config=EXPERTS)), version=1)


def submit(
    on: Scheduler, number: int, *, prompt: list[int] | None = None, count: int = 20, **fields
) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=number, ignore_eos=True)
    ids = tuple(PROMPTS[number] if prompt is None else prompt)
    on.submit(GenerateRequest(request_id=str(number), prompt_ids=ids, sampling=sampling, **fields))


def routed(output: TokenOutput) -> RoutedExperts:
    assert output.routed_experts is not None
    return output.routed_experts


def array(output: TokenOutput) -> np.ndarray:
    return np.reshape(routed(output).numbers, routed(output).shape)


def prefilled(context: list[int]) -> np.ndarray:
    """The choices of a context but for its last id, read as one prompt by an engine of its own."""
    on = scheduler()
    submit(on, 0, prompt=context, count=1)
    return array(finished(on)["0"])[:-1]


def test_decoding_a_context_and_reading_it_as_a_prompt_choose_alike():
    on = scheduler()
    for number in range(3):
        submit(on, number)
    for number, output in finished(on).items():
        context = [*PROMPTS[int(number)], *output.token_ids]
        assert routed(output).start == 0
        assert routed(output).shape == (len(context) - 1, 2, 2)
        np.testing.assert_array_equal(array(output), prefilled(context))
    assert len(np.unique(prefilled(context))) == 8, "a test of one expert proves nothing"


def test_a_cached_prefix_keeps_its_choices_and_reports_what_was_asked_for():
    on = scheduler()
    submit(on, 0, session_id="s")
    first = finished(on)["0"]
    context = [*PROMPTS[0], *first.token_ids, 50, 51, 52]
    submit(on, 1, prompt=context, session_id="s", routed_experts_prompt_start=routed(first).end)
    submit(on, 2, prompt=context)  # another sample of it, which knows nothing yet
    outputs = finished(on)
    assert outputs["1"].cached_tokens >= len(context) - 4
    assert outputs["2"].cached_tokens >= len(context) - 4
    for number, start in ("1", routed(first).end), ("2", 0):
        expected = prefilled([*context, *outputs[number].token_ids])
        assert routed(outputs[number]).start == start
        np.testing.assert_array_equal(array(outputs[number]), expected[start:])


def test_a_page_that_two_contexts_share_in_part_keeps_the_choices_of_both():
    on = scheduler()
    for number, end in (0, 60), (1, 61):  # contexts that differ in the middle of a page
        submit(on, number, prompt=[*PROMPTS[2][:20], end])
        output = finished(on)[str(number)]
        np.testing.assert_array_equal(
            array(output), prefilled([*PROMPTS[2][:20], end, *output.token_ids])
        )
    assert output.cached_tokens == 20


def test_who_is_preempted_reports_the_choices_its_ids_were_sampled_with():
    tight = scheduler(replace(SHAPES, kv_cache_tokens=160))
    for number in range(3):
        submit(tight, number, count=30)
    outputs = finished(tight)
    assert sum(output.num_preempted for output in outputs.values()) > 0
    for number, output in outputs.items():
        np.testing.assert_array_equal(
            array(output), prefilled([*PROMPTS[int(number)], *output.token_ids])
        )


def test_what_is_aborted_reports_what_it_fed_and_before_it_ran_nothing():
    on = scheduler()
    submit(on, 0)
    assert on.abort("0")[1].final.routed_experts is None
    submit(on, 1)
    on.step()
    output = on.abort("1")[1].final
    assert output.stop_reason is StopReason.ABORTED
    assert 0 < len(output.token_ids) < 20
    context = [*PROMPTS[1], *output.token_ids]
    np.testing.assert_array_equal(array(output), prefilled(context))


def test_new_weights_in_flight_leave_the_choices_of_what_was_sampled_before():
    on = scheduler()
    params = tiny_params(1, EXPERTS)
    submit(on, 1)
    ((_, chunk),) = on.step()
    context = [*PROMPTS[1], *chunk.token_ids]
    on.set_weights(on.engine.load_params(params, on.params), 2)
    output = finished(on)["1"]
    fed = len(context) - 1
    np.testing.assert_array_equal(array(output)[:fed], prefilled(context))
    assert routed(output).end == len(PROMPTS[1]) + 19


def test_more_than_256_experts_take_two_bytes():
    assert EXPERTS.experts is not None
    many_experts = replace(EXPERTS, experts=replace(EXPERTS.experts, count=300))
    engine = JaxEngine(many_experts, SHAPES)
    on = Scheduler(engine, engine.load_params(tiny_params(config=many_experts)))
    submit(on, 2)
    experts = routed(finished(on)["2"])
    assert experts.wide
    assert max(experts.numbers) >= 256


@pytest.mark.parametrize("model", [TINY, EXPERTS], ids=["dense", "experts"])
def test_an_engine_declares_what_it_reports(model):
    backend = JetStreamBackend(model, tiny_params(config=model), SHAPES)

    async def sampled() -> TokenOutput:
        await backend.start()
        try:
            sampling = SamplingParams(max_tokens=2, ignore_eos=True)
            return await backend.generate(
                GenerateRequest(request_id="r", prompt_ids=(5, 6), sampling=sampling)
            )
        finally:
            await backend.close()

    assert backend.capabilities.routed_experts == (
        asyncio.run(sampled()).routed_experts is not None
    )
    assert backend.capabilities.routed_experts == (model is EXPERTS)
