"""An engine of a mixture whose first layers are dense: its log-probs, choices, adapters and copies.

Log-probs are compared with the learner's; choices with another reading of the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.inspection import layer_outputs, score, tensor_samples
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import Params, Rope
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.models.lora import PeftAdapter
from jax_agent_rl.models.tensors import TensorSample
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.tiny import EXPERTS, TINY, logprobs_of, tiny_adapter, tiny_params

assert EXPERTS.experts is not None
MODEL = replace(
    EXPERTS,
    family="glm4_moe",
    num_layers=3,
    rope=Rope(partial_rotary=0.5),
    experts=replace(
        EXPERTS.experts,
        first_dense_layers=1,
        scoring="sigmoid",
        correction=True,
        groups=4,
        groups_per_token=2,
        scale=2.0,
        shared_size=24,
        shared_gated=True,
    ),
)
PARAMS = tiny_params(config=MODEL)
SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=384,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
PROMPT = np.random.default_rng(0).integers(3, TINY.vocab_size, 23).tolist()


def scheduler(adapters: Mapping[str, PeftAdapter] | None = None) -> Scheduler:
    engine = JaxEngine(MODEL, SHAPES, adapters=adapters or {})
    return Scheduler(engine, engine.load_params(PARAMS), version=1)


def finished(on: Scheduler, prompt: list[int], *, lora: str | None = None) -> TokenOutput:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    name = f"{len(prompt)} {lora}"
    request = GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=sampling, lora=lora
    )
    on.submit(request)
    while True:
        for _, chunk in on.step():
            if chunk.final is not None:
                return chunk.final


def expected_logprobs(params: Params, context: list[int], count: int) -> np.ndarray:
    return logprobs_of(params, context[:-count], context[-count:], config=MODEL)


def test_it_computes_what_the_learner_does_and_reports_the_layers_with_experts():
    on = scheduler()
    output = finished(on, PROMPT)
    context = [*PROMPT, *output.token_ids]
    np.testing.assert_allclose(output.log_probs, expected_logprobs(PARAMS, context, 12), atol=1e-4)
    routed = output.routed_experts
    assert routed is not None
    assert routed.shape == (len(context) - 1, 2, 2)

    continued = finished(on, context)  # pages of the first request are read again
    assert continued.cached_tokens > len(PROMPT)
    again = continued.routed_experts
    assert again is not None
    choices = np.reshape(routed.numbers, routed.shape)
    np.testing.assert_array_equal(np.reshape(again.numbers, again.shape)[: len(choices)], choices)

    scored = score(on, context, start=len(PROMPT), top_k=0)
    np.testing.assert_allclose(scored.log_probs, output.log_probs, atol=1e-4)


def test_an_adapter_is_added_in_the_layers_that_have_its_matrix():
    adapter = tiny_adapter(MODEL)
    assert adapter.weights["gate"][0].shape[0] == 1  # layers
    assert adapter.weights["shared_gate"][0].shape[0] == 2
    output = finished(scheduler({"a": adapter}), PROMPT, lora="a")
    layers = dict(PARAMS["layers"])
    for name, (a, b) in adapter.weights.items():
        layers[name] = layers[name] + jnp.einsum("lor,lri->loi", b, a)
    adapted = PARAMS | {"layers": layers}
    context = [*PROMPT, *output.token_ids]
    np.testing.assert_allclose(output.log_probs, expected_logprobs(adapted, context, 12), atol=1e-4)


def test_its_weights_and_layers_can_be_inspected_by_published_name():
    on = scheduler()
    samples = tensor_samples(MODEL, on)
    for name, tensor in hf_tensors(MODEL, PARAMS):
        expected = TensorSample.of(tensor)
        np.testing.assert_array_equal(samples[name].values, expected.values, err_msg=name)
    assert len(layer_outputs(on, PROMPT)) == 1 + MODEL.num_layers
