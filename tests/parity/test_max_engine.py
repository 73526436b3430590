"""MaxText's own MaxEngine, driven by our backend, against our full forward passes. Needs maxtext
and JetStream 0.3.0 from source (examples/maxtext_engine/README.md); no environment of
``./launch/test.sh`` has them, so it skips this file. In one that has: ``python -m pytest
tests/parity/test_max_engine.py``.
"""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("maxtext")

from examples.maxtext_engine import engine as example
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.external_engine import ExternalBackend
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams
from tests.tiny import TINY, full_logits, logprobs_of, tiny_params

SHAPES = EngineShapes(
    max_model_len=48,
    max_concurrent_decodes=3,
    kv_cache_tokens=192,
    decode_steps=4,
    prefill_buckets=(16,),
)
MODELS = {
    "llama": replace(TINY, tie_word_embeddings=False),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True),
}


@contextlib.asynccontextmanager
async def running(model: DecoderConfig, monkeypatch):
    monkeypatch.setattr(example, "DTYPE", "float32")
    monkeypatch.setattr(example, "MAX_NEW_TOKENS", 32)
    backend = ExternalBackend(
        model, tiny_params(config=model), SHAPES, make_external=example.make, version=1
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def request(name: str, prompt: list[int], **sampling) -> GenerateRequest:
    settings = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12} | sampling
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(**settings)
    )


@pytest.mark.parametrize("family", MODELS)
async def test_log_probs_are_those_of_full_passes_also_after_an_update_in_flight(
    family: str, monkeypatch
):
    model = MODELS[family]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.vocab_size, n).tolist() for n in (1, 5, 16, 17, 30)]
    old = tiny_params(config=model)
    new = tiny_params(1, config=model)
    async with running(model, monkeypatch) as backend:
        outputs = await asyncio.gather(
            *(backend.generate(request(f"a{i}", p)) for i, p in enumerate(prompts))
        )
        best = await backend.generate(request("greedy", prompts[1], temperature=0.0))
        long = asyncio.ensure_future(backend.generate(request("long", prompts[0], max_tokens=32)))
        while (await backend.metrics()).generated_tokens < 12 * 6 + 2:
            await asyncio.sleep(0)
        await backend.pause(PauseMode.KEEP)
        await backend.update_weights(WeightUpdate(version=2, kind="arrays", payload=new))
        await backend.resume()
        mixed = await long
        later_outputs = await asyncio.gather(
            *(backend.generate(request(f"b{i}", p)) for i, p in enumerate(prompts))
        )
    for params, produced in ((old, outputs), (new, later_outputs)):
        for prompt, output in zip(prompts, produced, strict=True):
            np.testing.assert_allclose(
                output.log_probs,
                logprobs_of(params, prompt, output.token_ids, config=model),
                atol=2e-4,
            )
    assert [
        int(full_logits(old, [*prompts[1], *best.token_ids[:i]], model)[-1].argmax())
        for i in range(12)
    ] == list(best.token_ids)
    assert set(mixed.policy_versions) == {1, 2}
