"""The Llama family against Hugging Face transformers: logits, gradients, and safetensors in both directions.

The reference is ``transformers.LlamaForCausalLM`` in float32 with random weights (and, where it has been fetched, the
quickstart's SmolLM2-135M-Instruct); nothing of it is derived from this package.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.llama import Llama, LlamaConfig, Params, hidden_states, logits, model_params, with_params

TOLERANCE = 1e-4

BASE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # far from uniform, so that a wrong rotation or mask shows
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "multi-head untied": {},
    "grouped-query untied": {"num_key_value_heads": 2},
    "multi-query tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "head_dim apart from hidden_size": {"head_dim": 16, "num_key_value_heads": 2},
    "llama3 rope scaling": {"rope_parameters": LLAMA3, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "other rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def reference(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(ReferenceConfig(**BASE | request.param)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones by default, which would hide a norm applied at the wrong place
                weight.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def folder(reference: LlamaForCausalLM, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path / "reference")
    return tmp_path / "reference"


def ids(rows: int = 2, length: int = 80, vocab: int = 101) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab, (rows, length))


def our_logits(config: LlamaConfig, params: Params, tokens: np.ndarray) -> jax.Array:
    rows, count = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
    ends = jnp.full((rows, count), count, jnp.int32)
    return logits(params, hidden_states(config, params, jnp.asarray(tokens), positions, ends))


def their_logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def test_logits_equal_those_of_transformers(reference, folder):
    config, params = load_hf(folder)
    tokens = ids()
    np.testing.assert_allclose(our_logits(config, params, tokens), their_logits(reference, tokens), atol=TOLERANCE)


def test_the_nnx_module_computes_the_same_logits(reference, folder):
    config, params = load_hf(folder)
    module = with_params(config, params)
    assert isinstance(module, Llama)
    jax.tree.map(np.testing.assert_array_equal, model_params(module), params)
    tokens = ids(1)
    np.testing.assert_allclose(module(jnp.asarray(tokens)), their_logits(reference, tokens), atol=TOLERANCE)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gradients_of_every_parameter_equal_those_of_transformers(reference, folder, remat):
    config, params = load_hf(folder)
    tokens, targets = ids(), ids()[:, ::-1].copy()

    def loss(params: Params) -> jax.Array:
        rows, count = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
        ends = jnp.full((rows, count), count, jnp.int32)
        hidden = hidden_states(config, params, jnp.asarray(tokens), positions, ends, remat=remat)
        scores = jax.nn.log_softmax(logits(params, hidden))
        return -jnp.mean(jnp.take_along_axis(scores, jnp.asarray(targets)[..., None], axis=-1))

    value, ours = jax.jit(jax.value_and_grad(loss))(params)
    scores = reference(torch.from_numpy(tokens)).logits
    their_value = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(targets).flatten())
    their_value.backward()
    assert float(value) == pytest.approx(float(their_value), rel=1e-5)

    theirs = {name: weight.grad.numpy() for name, weight in reference.named_parameters()}
    written = folder.parent / "gradients"
    save_hf(written, config, ours)  # names the gradients as transformers does
    from safetensors.numpy import load_file

    named = load_file(written / "model.safetensors")
    assert named.keys() == theirs.keys()
    for name, gradient in named.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(gradient, theirs[name], atol=1e-4 * scale, err_msg=name)


def test_a_folder_written_here_is_the_same_model_in_transformers(reference, folder, tmp_path):
    config, params = load_hf(folder)
    save_hf(tmp_path / "ours", config, params)
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = ids()
    np.testing.assert_allclose(their_logits(again, tokens), their_logits(reference, tokens), atol=1e-6)


def test_a_folder_read_back_is_bit_identical(folder, tmp_path):
    config, params = load_hf(folder)
    save_hf(tmp_path / "ours", config, params)
    config_again, params_again = load_hf(tmp_path / "ours")
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


def test_a_sharded_checkpoint_reads_like_a_single_file(reference, folder, tmp_path):
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    _, expected = load_hf(folder)
    _, params = load_hf(tmp_path / "shards")
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def smollm2() -> Path | None:
    cache = Path(os.environ.get("JAX_AGENT_RL_CACHE", "~/.cache/jax_agent_rl")).expanduser()
    folder = cache / "models" / "smollm2-135m-instruct"
    return folder if (folder / "model.safetensors").is_file() else None


@pytest.mark.skipif(smollm2() is None, reason="SmolLM2-135M-Instruct is not in the cache folder")
def test_logits_of_the_quickstart_model_equal_those_of_transformers():
    folder = smollm2()
    assert folder is not None
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, params = load_hf(folder)
    tokens = ids(1, 64, config.vocab_size)
    np.testing.assert_allclose(our_logits(config, params, tokens), their_logits(reference, tokens), atol=TOLERANCE)
