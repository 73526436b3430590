"""Layers that read the keys and values of another one, in an engine, beside what else attention may
have: gates, biases, sinks, norms, experts behind it, keys as values. Log-probs are compared with
the learner's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig, GlobalAttention
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.driven_engine import finished
from tests.tiny import EXPERTS, FOUR_SLOTS, TINY, logprobs_of, tiny_params
from tests.unit.jetstream.test_speculation import KERNELS

ONE_MIXER = replace(
    EXPERTS,
    num_layers=4,
    windowed_layers=(True, False, True, True),
    sliding_window=6,
    shared_kv_layers=1,
    attention_gate=True,
    attention_sinks=True,
    qkv_bias=True,
)
KEYS_AS_VALUES = replace(
    TINY,
    num_layers=4,
    windowed_layers=(True, False, False, True),
    sliding_window=6,
    shared_kv_layers=2,
    global_attention=GlobalAttention(num_kv_heads=1, head_dim=12, keys_as_values=True),
    attention_gate=True,
)
PROMPT = np.random.default_rng(0).integers(3, TINY.vocab_size, 23).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("config", [ONE_MIXER, KEYS_AS_VALUES], ids=["one mixer", "two"])
def test_an_engine_computes_what_the_learner_does(config: DecoderConfig, kernels: str):
    params = tiny_params(config=config)
    engine = JaxEngine(config, FOUR_SLOTS, use_cpu_kernels=kernels == "cpu")
    on = Scheduler(engine, engine.load_params(params), version=1)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    on.submit(GenerateRequest(request_id="a", prompt_ids=tuple(PROMPT), sampling=sampling))
    output = finished(on)["a"]
    expected = logprobs_of(params, PROMPT, output.token_ids, config=config)
    np.testing.assert_allclose(output.log_probs, expected, atol=1e-4)
