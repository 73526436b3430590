"""Gemma 4 in the engine, on every path of a request.

Layers share keys and values, heads have two sizes, there are per-layer inputs, and experts beside
dense networks. Expected log-probs are those of one full pass of the learner's model.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.kv_cache import LayerKV
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.driven_engine import finished
from tests.tiny import (
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    logprobs_of,
    tiny_adapter,
    tiny_params,
    with_adapter,
)
from tests.unit.jetstream.test_speculation import KERNELS, Eager, Known

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=128,
    decode_steps=4,
    prefill_buckets=(16,),
)
SHARED = np.random.default_rng(9).integers(3, 97, 33).tolist()
MODELS = pytest.mark.parametrize(
    "config", [GEMMA4, GEMMA4_SMALL, GEMMA4_EXPERTS], ids=["heads", "shared keys", "experts"]
)
SMALL_AND_EXPERTS = pytest.mark.parametrize(
    "config", [GEMMA4_SMALL, GEMMA4_EXPERTS], ids=["shared keys", "experts"]
)


def scheduler(config: DecoderConfig, kernels: str, shapes: EngineShapes = SHAPES, **options: Any):
    engine = JaxEngine(
        config,
        shapes,
        program_table=ProgramTable(),
        use_cpu_kernels=kernels == "cpu",
        **options,
    )
    return Scheduler(engine, engine.load_params(tiny_params(config=config)), version=1)


def submit(on: Scheduler, name: str, prompt: list[int], *, count: int = 27, **fields: Any) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=1.0, seed=len(name), ignore_eos=True)
    request = GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=sampling, **fields
    )
    on.submit(request)


def assert_scored(
    config: DecoderConfig, prompt: list[int], output: TokenOutput, params: Params | None = None
) -> None:
    if params is None:
        params = tiny_params(config=config)
    expected = logprobs_of(params, prompt, output.token_ids, config=config)
    np.testing.assert_allclose(output.log_probs, expected, atol=2e-4)


@MODELS
@pytest.mark.parametrize("kernels", KERNELS)
def test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored(config, kernels):
    prompts = {"a": [*SHARED, 5], "bb": [*SHARED, 6], "ccc": SHARED[:2:-1]}
    on = scheduler(config, kernels)
    for name, prompt in prompts.items():
        submit(on, name, prompt)
    outputs = finished(on)
    assert outputs["bb"].cached_tokens >= 32
    assert sum(output.num_preempted for output in outputs.values()) > 0
    for name, prompt in prompts.items():
        assert_scored(config, prompt, outputs[name])


@pytest.mark.parametrize("kernels", KERNELS)
@SMALL_AND_EXPERTS
def test_speculated_ids_are_those_of_plain_decoding(config: DecoderConfig, kernels: str):
    wanted = {}
    for drafts in (0, 4):
        shapes = replace(SHAPES, num_speculative_tokens=drafts, kv_cache_tokens=192)
        on = scheduler(config, kernels, shapes)
        if drafts:
            on.speculation = Eager(on.engine, Known(wanted), on.counters)
        submit(on, "a", SHARED[:20])
        submit(on, "bb", SHARED[5:17])
        outputs = finished(on)
        if drafts:
            assert on.metrics().accepted_tokens > 20
        wanted = wanted or outputs
        for name, prompt in (("a", SHARED[:20]), ("bb", SHARED[5:17])):
            assert outputs[name].token_ids == wanted[name].token_ids
            assert_scored(config, prompt, outputs[name])


@SMALL_AND_EXPERTS
def test_pages_come_back_from_the_host_with_all_heads(config: DecoderConfig):
    page_bytes = sum(x.nbytes for x in jax.tree.leaves(pages(config, 1)))
    shapes = replace(
        SHAPES,
        max_concurrent_decodes=1,
        kv_cache_tokens=64,
        kv_offloading_bytes=8 * page_bytes,
    )
    on = scheduler(config, "xla", shapes)
    submit(on, "a", SHARED, count=3, session_id="a")
    first = finished(on)["a"]
    submit(on, "other", SHARED[::-1], count=20, session_id="other")
    finished(on)
    context = [*SHARED, *first.token_ids, 7]
    submit(on, "a", context, count=9, session_id="a")
    second = finished(on)["a"]
    assert on.metrics().restored_pages > 0
    assert second.cached_tokens >= 32
    assert_scored(config, context, second)


def pages(config: DecoderConfig, count: int) -> Any:
    return empty_cache(config, count, 32, jnp.float32, num_states=0, state_dtype=jnp.float32).layers


def test_layers_that_share_keys_hold_none_and_others_have_heads_of_their_own():
    layers = pages(GEMMA4_SMALL, 2)
    shapes = [None if layer is None else layer.keys.shape for layer in layers]
    assert shapes == [(2, 1, 8, 32), (2, 1, 12, 32), (2, 1, 8, 32), None, None]
    assert all(layer is None or isinstance(layer, LayerKV) for layer in layers)


@MODELS
def test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do(config):
    adapter = tiny_adapter(config)
    assert {"q", "global_q", "global_o"} < adapter.weights.keys()
    merged = with_adapter(tiny_params(config=config), adapter)

    on = scheduler(config, "xla", adapters={"tuned": adapter})
    submit(on, "a", SHARED[:20])
    submit(on, "b", SHARED[:20], lora="tuned")
    outputs = finished(on)
    assert outputs["a"].token_ids != outputs["b"].token_ids
    assert_scored(config, SHARED[:20], outputs["a"])
    assert_scored(config, SHARED[:20], outputs["b"], merged)


@functools.cache
def greedy(config: DecoderConfig, weights: str, kv: str) -> TokenOutput:
    options = {"quantize": weights, "kv_dtype": kv}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value != "none"}
    on = scheduler(config, "xla", **chosen)
    submit(on, "a", SHARED[:20], count=8)
    return finished(on)["a"]


@SMALL_AND_EXPERTS
@pytest.mark.parametrize(("weights", "kv"), [("int8", "none"), ("fp8", "none"), ("none", "int8")])
def test_eight_bits_round_weights_and_keys_only_a_little(
    config: DecoderConfig, weights: str, kv: str
):
    exact = greedy(config, "none", "none")
    rounded = greedy(config, weights, kv)
    difference = abs(np.array(exact.log_probs[0]) - rounded.log_probs[0])
    assert 0 < difference < 0.5
