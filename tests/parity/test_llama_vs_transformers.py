"""The Llama model against transformers: logits, gradients, files; on random small configs and on
the real model.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Llama3Scaling, Rope
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.utils.files import cache_root

torch = pytest.importorskip("torch")

BASE = DecoderConfig(
    vocab_size=89,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
)
LLAMA3_ROPE = Llama3Scaling(
    factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=16.0
)
CONFIGS = {
    "untied": BASE,
    "tied": replace(BASE, tie_word_embeddings=True),
    "wide heads": replace(BASE, head_dim=16, num_kv_heads=6),
    "llama3 rope": replace(BASE, rope=Rope(theta=500000.0, scaling=LLAMA3_ROPE), head_dim=16),
}


def forward(config: DecoderConfig, params, ids: np.ndarray) -> jax.Array:
    model = Decoder.from_params(config, params)
    return model.logits(model(jnp.asarray(ids))[0])


def reference(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path: Path):
    """A random model, written by our own code, and transformers' reading of the files."""
    config = CONFIGS[request.param]
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, params)
    save_hf(tmp_path, config, params)
    return config, params, reference(tmp_path), tmp_path


def test_logits_equal_those_of_transformers_reading_our_files(saved):
    config, params, peer, _ = saved
    ids = np.random.default_rng(0).integers(0, 89, (2, 40))
    with torch.no_grad():
        expected = peer(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(forward(config, params, ids), expected, atol=1e-4)


def test_gradients_equal_those_of_transformers(saved):
    config, params, peer, _ = saved
    ids = np.random.default_rng(1).integers(0, 89, (2, 20))

    def loss(params):
        scores = jax.nn.log_softmax(forward(config, params, ids)[:, :-1])
        return -jnp.take_along_axis(scores, jnp.asarray(ids)[:, 1:, None], axis=-1).mean()

    grads = jax.grad(loss)(params)
    peer(torch.tensor(ids), labels=torch.tensor(ids)).loss.backward()
    model = peer.model
    np.testing.assert_allclose(
        grads["layers"]["q"][1], model.layers[1].self_attn.q_proj.weight.grad, atol=1e-5
    )
    np.testing.assert_allclose(
        grads["layers"]["down"][2], model.layers[2].mlp.down_proj.weight.grad, atol=1e-5
    )
    np.testing.assert_allclose(grads["embed"], model.embed_tokens.weight.grad, atol=1e-5)
    np.testing.assert_allclose(grads["final_norm"], model.norm.weight.grad, atol=1e-5)


def test_files_written_by_transformers_are_read(saved, tmp_path: Path):
    config, params, peer, _ = saved
    peer.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    got_config, got = load_hf(tmp_path / "theirs")
    assert got_config.parameter_shapes() == config.parameter_shapes()
    assert got_config.rope == config.rope
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_tensor_is_named(saved, tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    *_, path = saved
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_hf(path)


def test_a_missing_folder_says_what_to_do(tmp_path: Path):
    with pytest.raises(ModelError, match="fetch-model"):
        load_hf(tmp_path / "nothing")


CHAT = (
    "<|im_start|>system\n"
    "You answer questions with a calculator.<|im_end|>\n"
    "<|im_start|>user\n"
    "What is 12 times 34?<|im_end|>\n"
    "<|im_start|>assistant\n"
    "The answer is 408.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def rounding() -> float:
    """How much more the float32 products of XLA are off than those of torch, at least 1.

    Measured on sums of 1536 terms, the model's longest. On CPUs with AVX2, XLA adds them one after
    the other and torch in several partial sums, which lose less.
    """
    x = np.random.default_rng(0).normal(size=(40, 1536)).astype(np.float32)
    weight = np.random.default_rng(0).normal(size=(576, 1536)).astype(np.float32)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    ours = np.asarray(jax.jit(lambda x, weight: jnp.einsum("td,od->to", x, weight))(x, weight))
    theirs = (torch.tensor(x) @ torch.tensor(weight).T).numpy()
    return max(1.0, float(np.std(ours - exact) / np.std(theirs - exact)))


def assert_as_close_to_float64_as_transformers(ids: np.ndarray, rounding: float) -> None:
    """The largest error of a logit is at most twice what transformers' would be with products as
    inexact as ours.

    A tenth more of ``rms_norm_eps``, or a thousandth more of the rotary base, is beyond that by a
    factor of three.
    """
    path = cache_root() / "models" / "smollm2-135m-instruct"
    config, params = load_hf(path)
    peer = reference(path)
    with torch.no_grad():
        theirs = peer(torch.tensor(ids)).logits.numpy()
        exact = peer.double()(torch.tensor(ids)).logits.numpy()
    error = np.abs(np.asarray(forward(config, params, ids)) - exact).max()
    assert error <= 2 * rounding * np.abs(theirs - exact).max()


def test_the_real_model_equals_transformers_on_a_conversation(rounding: float):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cache_root() / "models" / "smollm2-135m-instruct")
    assert_as_close_to_float64_as_transformers(np.array([tokenizer.encode(CHAT)]), rounding)


def test_the_real_model_is_as_close_to_float64_as_transformers_is(rounding: float):
    """Random ids drive some logits beyond 30, where float32 itself is off by more than 1e-4."""
    ids = np.random.default_rng(0).integers(3, 49000, (1, 40))
    assert_as_close_to_float64_as_transformers(ids, rounding)
