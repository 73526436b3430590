"""LoRA adapters on a real vLLM; the reference is transformers with the adapter merged into its
matrices.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from jax_agent_rl.errors import BackendError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.gpu_backend.conftest import PROBE, SMALL, Reference, prompt_of, running, small_params
from tests.messages import raises

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = prompt_of(8, 30)
RANK = 4
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def write_adapter(folder: Path, model: Path, seed: int) -> dict[str, torch.Tensor]:
    """A random PEFT adapter of every matrix of every layer; returns what it adds to each."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(ADAPTED),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    added = {}
    for name, parameter in Reference(model).model.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED):
            rows, columns = parameter.shape
            down = rng.standard_normal((RANK, columns), dtype=np.float32) * 0.2
            up = rng.standard_normal((rows, RANK), dtype=np.float32) * 0.2
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            added[name] = torch.from_numpy(2 * up @ down)
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


def merged(model: Path, added: dict[str, torch.Tensor]) -> Reference:
    reference = Reference(model)
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            if name in added:
                parameter += added[name]
    return reference


def assert_is(output: TokenOutput, reference: Reference) -> None:
    assert list(output.token_ids) == reference.greedy(PROMPT, 8)
    np.testing.assert_allclose(
        output.log_probs, reference.logprobs(PROMPT, output.token_ids), atol=5e-4
    )


async def test_an_adapter_is_named_per_request_and_stays_over_new_weights(
    model_folder: Path, tmp_path: Path
):
    added = {
        name: write_adapter(tmp_path / name, model_folder, seed)
        for seed, name in enumerate(("math", "prose"))
    }
    save_hf(tmp_path / "new", SMALL, small_params(1))
    async with running(
        model_folder, adapters={name: str(tmp_path / name) for name in added}
    ) as backend:
        assert backend.capabilities.lora
        client = LLMServerClient([AsyncServer(backend)])

        async def ask(adapter: str | None) -> TokenOutput:
            return await client.generate(
                f"r-{adapter}", prompt_ids=PROMPT, sampling_params=GREEDY, lora=adapter
            )

        plain, math, prose = await asyncio.gather(
            *(ask(adapter) for adapter in (None, "math", "prose"))
        )
        files = FileTransport(SMALL, probe_ids=PROBE, folder=tmp_path)
        await client.pool.update_weights(files.write(small_params(1), 2))
        new_plain, new_math = await asyncio.gather(ask(None), ask("math"))
        with raises(BackendError, value="'law'", fix="['math', 'prose']"):
            await ask("law")
    assert_is(plain, Reference(model_folder))
    assert_is(math, merged(model_folder, added["math"]))
    assert_is(prose, merged(model_folder, added["prose"]))
    assert_is(new_plain, Reference(tmp_path / "new"))
    assert_is(new_math, merged(tmp_path / "new", added["math"]))
    outputs = (plain, math, prose, new_plain, new_math)
    assert len({output.log_probs for output in outputs}) == len(outputs)


async def test_an_engine_without_adapters_says_so(engine):
    client = LLMServerClient([AsyncServer(engine.backend)])
    with raises(BackendError, key="server-0", value="'math'"):
        await client.generate("r", prompt_ids=PROMPT, sampling_params=GREEDY, lora="math")
