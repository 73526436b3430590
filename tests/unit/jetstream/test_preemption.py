"""A cache too small for all who run: the last ones wait, and sample what they would have."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, StopReason
from tests.driven_engine import finished
from tests.messages import raises
from tests.tiny import TINY, logprobs_of, tiny_params

SMALL = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=160,
    decode_steps=4,
    prefill_buckets=(32,),
)
LARGE = replace(SMALL, kv_cache_tokens=192)
PROMPTS = [
    np.random.default_rng(i).integers(3, TINY.vocab_size, n).tolist()
    for i, n in enumerate((20, 25, 30))
]


@functools.cache
def programs(shapes: EngineShapes) -> ProgramTable:
    """Compiled once for all tests."""
    return ProgramTable()


def scheduler(shapes: EngineShapes) -> Scheduler:
    engine = JaxEngine(TINY, shapes, program_table=programs(shapes))
    return Scheduler(engine, engine.load_params(tiny_params()), version=1)


def submit(
    on: Scheduler,
    number: int,
    *,
    priority: int = 0,
    count: int = 30,
    prompt: list[int] | None = None,
) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=number, ignore_eos=True)
    ids = tuple(PROMPTS[number] if prompt is None else prompt)
    on.submit(
        GenerateRequest(
            request_id=str(number), prompt_ids=ids, sampling=sampling, priority=priority
        )
    )


def test_who_is_preempted_samples_what_it_would_have():
    tight = scheduler(SMALL)
    roomy = scheduler(LARGE)
    for on in (tight, roomy):
        for number in range(3):
            submit(on, number)
    outputs = finished(tight)
    wanted = finished(roomy)
    assert not any(output.num_preempted for output in wanted.values())
    assert outputs["0"].num_preempted == 0
    assert outputs["2"].num_preempted > 0
    for name, output in wanted.items():
        assert outputs[name].token_ids == output.token_ids
        assert outputs[name].context_digest == output.context_digest
        np.testing.assert_allclose(outputs[name].log_probs, output.log_probs, atol=1e-5, rtol=1e-5)
        assert outputs[name].policy_versions == (1,) * 30
        exact = logprobs_of(tiny_params(), PROMPTS[int(name)], output.token_ids)
        np.testing.assert_allclose(outputs[name].log_probs, exact, atol=2e-5)
    assert tight.counters.generated_tokens == roomy.counters.generated_tokens == 90


def test_requests_of_later_priority_wait_for_earlier_ones():
    on = scheduler(replace(SMALL, kv_cache_tokens=96))
    submit(on, 0, priority=1)
    on.step()
    submit(on, 1)
    outputs = finished(on)
    assert outputs["0"].num_preempted
    assert not outputs["1"].num_preempted


def test_who_waits_with_what_it_has_can_be_aborted():
    on = scheduler(SMALL)
    for number in range(3):
        submit(on, number)
    while not any(run.num_preempted for _, run in on.queue):
        on.step()
    (run,) = (run for _, run in on.queue if run.num_preempted)
    name = run.request.request_id
    had = tuple(run.token_ids)
    _, chunk = on.abort(name)
    assert chunk.final.stop_reason is StopReason.ABORTED
    assert chunk.final.token_ids == had != ()
    assert name not in finished(on)


def test_members_of_a_group_keep_their_prompt_once():
    """Three contexts of 60 ids that begin with the same 32, in four pages of 32."""
    prompt = (PROMPTS[2] * 2)[:33]
    on = scheduler(replace(SMALL, kv_cache_tokens=128))
    for number in range(3):
        submit(on, number, prompt=prompt, count=27)
    outputs = finished(on)
    assert not any(output.num_preempted for output in outputs.values())
    assert sorted(output.cached_tokens for output in outputs.values()) == [0, 32, 32]


@pytest.mark.parametrize("tokens", [64, 160, 1000])
def test_a_cache_takes_the_memory_of_its_tokens(tokens: int):
    cache = JaxEngine(TINY, replace(SMALL, kv_cache_tokens=tokens)).init_cache()
    position = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert num_bytes == (1 + tokens // 32) * 32 * position, "in whole pages, and nobody's"


def test_a_cache_that_holds_no_context_is_refused():
    tree = {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}}
    with raises(ConfigError, key=("kv_cache_tokens", "rollout.max_model_len"), value=(512, 1024)):
        build(tree | {"rollout": {"jetstream": {"kv_cache_tokens": 512}}})
