"""Qwen3.5 with experts: adapters of delta nets, gated attention and the shared expert."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.config.learner import LoraTarget
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.learner.parameterization import merge_adapters, new_adapters, with_adapters
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.lora import read_peft, save_peft
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.tiny import QWEN3_5_MOE, full_logits, logprobs_of, tiny_params

PARAMS = tiny_params(config=QWEN3_5_MOE)
PROMPT = np.random.default_rng(0).integers(3, QWEN3_5_MOE.vocab_size, 20).tolist()

OF_MIXERS: tuple[LoraTarget, ...] = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
)
OF_SHARED_EXPERTS: tuple[LoraTarget, ...] = ("gate_proj", "up_proj", "down_proj")
LORA = LoraConfig(rank=3, alpha=6.0, targets=OF_MIXERS + OF_SHARED_EXPERTS)


def drawn_adapters(lora: LoraConfig = LORA) -> Params:
    """Adapters whose ``b`` is not zero."""
    rng = np.random.default_rng(4)

    def draw(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal(x.shape) * 0.1, jnp.float32)

    return jax.tree.map(draw, new_adapters(lora, QWEN3_5_MOE))


def merged(adapters: Params, lora: LoraConfig = LORA) -> Params:
    return merge_adapters(with_adapters(lora, QWEN3_5_MOE, PARAMS, adapters))


def test_targets_name_the_matrices_of_both_mixers_and_of_the_shared_expert():
    adapters = drawn_adapters()["adapters"]
    assert {name: adapter["b"].shape for name, adapter in adapters.items()} == {
        "delta_qkv": (1, 64, 3),
        "delta_z": (1, 32, 3),
        "delta_b": (1, 4, 3),
        "delta_a": (1, 4, 3),
        "delta_out": (1, 32, 3),
        "q": (1, 64, 3),  # each head's query, and its gate
        "k": (1, 16, 3),
        "v": (1, 16, 3),
        "o": (1, 32, 3),
        "shared_gate": (2, 16, 3),
        "shared_up": (2, 16, 3),
        "shared_down": (2, 32, 3),
    }


def test_an_adapted_model_computes_what_the_merged_one_does():
    adapters = drawn_adapters()
    adapted = with_adapters(LORA, QWEN3_5_MOE, PARAMS, adapters)
    logits = adapted.logits(adapted(jnp.asarray([PROMPT]))[0])[0]
    expected = full_logits(merged(adapters), PROMPT, QWEN3_5_MOE)
    np.testing.assert_allclose(logits, expected, atol=5e-4 * np.abs(expected).max())
    assert np.abs(expected - full_logits(PARAMS, PROMPT, QWEN3_5_MOE)).max() > 0.1


def test_peft_reads_the_files_and_computes_the_merged_models_logits(tmp_path: Path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    import transformers

    # PEFT takes gate_proj, up_proj and down_proj for the experts' matrices.
    lora = LoraConfig(rank=3, alpha=6.0, targets=OF_MIXERS)
    adapters = drawn_adapters(lora)
    base = tmp_path / "base"
    save_hf(base, QWEN3_5_MOE, PARAMS)
    save_peft(tmp_path / "adapter", lora, QWEN3_5_MOE, adapters, base=str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        logits = adapted(torch.tensor([PROMPT])).logits[0].numpy()
    expected = full_logits(merged(adapters, lora), PROMPT, QWEN3_5_MOE)
    np.testing.assert_allclose(expected, logits, atol=2e-4 * np.abs(logits).max())


def test_an_engine_with_an_adapter_computes_what_the_merged_model_does(tmp_path: Path):
    adapters = drawn_adapters()
    save_peft(tmp_path / "adapter", LORA, QWEN3_5_MOE, adapters, base="x")
    adapter = read_peft(tmp_path / "adapter", QWEN3_5_MOE, key="adapter")
    shapes = EngineShapes(
        max_model_len=64,
        max_concurrent_decodes=2,
        kv_cache_tokens=256,
        decode_steps=4,
        prefill_buckets=(8,),  # the prompt is continued in chunks
    )
    engine = JaxEngine(QWEN3_5_MOE, shapes, adapters={"a": adapter})
    scheduler = Scheduler(engine, engine.load_params(PARAMS), version=1)
    for name in ("a", None):
        sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
        scheduler.submit(
            GenerateRequest(
                request_id=str(name), prompt_ids=tuple(PROMPT), sampling=sampling, lora=name
            )
        )
    outputs: dict[str, TokenOutput] = {}
    while len(outputs) < 2:
        for run, chunk in scheduler.step():
            if chunk.final is not None:
                outputs[run.request.request_id] = chunk.final

    for request_id, params in (("a", merged(adapters)), ("None", PARAMS)):
        output = outputs[request_id]
        expected = logprobs_of_model(params, output)
        np.testing.assert_allclose(output.log_probs, expected, atol=1e-4)
    assert outputs["a"].token_ids != outputs["None"].token_ids


def logprobs_of_model(params: Params, output: TokenOutput) -> np.ndarray:
    """Log-probs of an output behind the prompt by one pass of the learner's model."""
    return logprobs_of(params, PROMPT, output.token_ids, config=QWEN3_5_MOE)
