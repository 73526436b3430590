"""Updates of every family that vLLM stores in another way than Hugging Face does, against
transformers.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import load_file, save_file

from gpu_backend.backend import VllmBackend
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.protocol import FILES, WeightUpdate
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.utils.weight_transfer import LogprobProbe
from tests.gpu_backend.conftest import Reference, prompt_of, request, running

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = prompt_of(8, 30)
IDS = list(range(3, 30))
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, tie_word_embeddings=False))


def mistral() -> Any:
    """A window shorter than the prompt in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16, tie_word_embeddings=False))


def glm4() -> Any:
    from transformers import Glm4Config, Glm4ForCausalLM

    return Glm4ForCausalLM(Glm4Config(**SIZES, tie_word_embeddings=False))


def glm4_moe() -> Any:
    """A dense layer, then one with experts and a shared one."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    return Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **experts, tie_word_embeddings=False))


def olmo3() -> Any:
    """Norms of outputs alone; a window shorter than the prompt, and a full layer."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    layers = ["sliding_attention", "full_attention"]
    return Olmo3ForCausalLM(Olmo3Config(**SIZES, layer_types=layers, sliding_window=16))


def gemma3() -> Any:
    """A layer with a window shorter than the prompt, one without; tied."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, layer_types=layers, sliding_window=16, query_pre_attn_scalar=32)
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(
        vocab_size=97,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(sizes)


def make(folder: Path, family: Any, seed: int) -> Reference:
    """A random model, far from its initialisation (where norms are one and biases zero)."""
    torch.manual_seed(seed)
    model = family()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    return Reference(folder)


@dataclass(frozen=True)
class Served:
    """An engine on a random model of a family."""

    family: Any
    folder: Path
    backend: VllmBackend
    first: Reference
    """The model that it was started on."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[qwen3, qwen3_moe, glm4_moe, olmo3, gemma3, glm4, mistral, gpt2],
)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    family = request.param
    folder = tmp_path_factory.mktemp(family.__name__)
    first = make(folder / "first", family, 0)
    async with running(folder / "first") as backend:
        yield Served(family, folder, backend, first)


async def test_other_families_take_updates(served: Served):
    """Their tensors are fused, stacked or transposed in other ways; every one is read back."""
    backend = served.backend
    new = make(served.folder / "new", served.family, 1)
    probe = LogprobProbe(ids=(tuple(IDS),), log_probs=(tuple(new.logprobs(IDS[:1], IDS[1:])),))
    tensors = load_file(served.folder / "new" / "model.safetensors")
    files = [str(served.folder / "update.safetensors")]
    save_file(tensors, files[0])
    old_output = await backend.generate(request("a", PROMPT))
    await backend.update_weights(WeightUpdate(version=2, kind=FILES, payload=files, probe=probe))
    new_output = await backend.generate(request("b", PROMPT))
    assert list(old_output.token_ids) == served.first.greedy(PROMPT, 8)
    assert list(new_output.token_ids) == new.greedy(PROMPT, 8)
    np.testing.assert_allclose(
        new_output.log_probs, new.logprobs(PROMPT, new_output.token_ids), atol=5e-4
    )


async def test_what_the_learner_writes_is_served_and_wrong_weights_are_not(served: Served):
    """The learner's own probe and file; then the same tensors with two of one shape exchanged, and
    nothing is served then.
    """
    if served.family is gpt2:
        pytest.skip("the learner has no such family")
    backend = served.backend
    reference = make(served.folder / "learned", served.family, 2)
    config, params = load_hf(served.folder / "learned")
    files = FileTransport(config, probe_ids=[IDS], folder=served.folder)
    version = backend.policy_version + 1
    good = files.write(params, version)
    await backend.update_weights(good)
    largest, _ = backend.updater.last_difference
    output = await backend.generate(request("c", PROMPT))
    assert largest < 5e-4
    assert list(output.token_ids) == reference.greedy(PROMPT, 8)
    np.testing.assert_allclose(
        output.log_probs, reference.logprobs(PROMPT, output.token_ids), atol=5e-4
    )

    tensors = load_file(good.payload[0])
    probe = score_probe(config, params, [IDS])
    wrong = [str(served.folder / "wrong.safetensors")]
    first, second = exchangeable(tensors)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, wrong[0])
    update = WeightUpdate(version=version + 1, kind=FILES, payload=wrong, probe=probe)
    with pytest.raises(WeightUpdateError, match="not the learner's"):
        await backend.update_weights(update)
    assert not (await backend.health()).ok


def exchangeable(tensors: dict[str, np.ndarray]) -> tuple[str, str]:
    """Gate and up of one layer (or of its first expert): of one shape, easily mistaken for each
    other.
    """
    first = next((name for name in tensors if "gate_proj" in name), None)
    if first is None:  # they are one: take those of two layers
        first = next(name for name in tensors if "layers.0.mlp.gate_up_proj" in name)
        return first, first.replace("layers.0", "layers.1")
    return first, first.replace("gate_proj", "up_proj")
