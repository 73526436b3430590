"""Parts of Gemma 4 against transformers' modules: the text model in a multimodal folder, and where
per-layer inputs and norms round in bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.families import read_config
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.layers import rms_norm
from jax_agent_rl.models.per_layer_inputs import per_layer_inputs
from tests.tiny import GEMMA4_SMALL

torch = pytest.importorskip("torch")

TEXT: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 89,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 3.0,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A model with a vision tower, and its folder, with what published files hold besides."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma4Config(
        text_config=TEXT, vision_config=VISION, audio_config=None, tie_word_embeddings=True
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    folder = tmp_path_factory.mktemp("gemma4")
    model.save_pretrained(folder)

    # Published files hold projections that no model reads.
    file = folder / "model.safetensors"
    tensors = load_file(file)
    unused = np.ones((16, 48), np.float32)
    tensors["model.language_model.layers.2.self_attn.k_proj.weight"] = unused
    save_file(tensors, file, metadata={"format": "pt"})
    return model, folder


def test_the_text_model_of_a_multimodal_folder_has_its_logits(multimodal, tmp_path: Path):
    model, folder = multimodal
    config, params = load_hf(folder)
    assert config.family == "gemma4_text"
    ids = np.random.default_rng(0).integers(3, 89, (2, 24))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()

    def logits(params) -> Any:
        decoder = Decoder.from_params(config, params)
        return decoder.logits(decoder(jnp.asarray(ids))[0])

    np.testing.assert_allclose(logits(params), expected, atol=1e-4)
    save_hf(tmp_path / "text", config, params)
    written, text = load_hf(tmp_path / "text")
    assert written == config
    np.testing.assert_array_equal(logits(text), logits(params))


def test_tensors_of_neither_tower_nor_text_model_are_refused(multimodal, tmp_path: Path):
    _, folder = multimodal
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.layers.0.self_attn.gate.weight"] = np.ones(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.gate\.weight"):
        load_hf(tmp_path)


def test_levels_of_a_file_that_disagree_are_refused(multimodal):
    raw = json.loads((multimodal[1] / "config.json").read_text())
    text = raw["text_config"]
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        read_config(raw | {"tie_word_embeddings": not text["tie_word_embeddings"]})
    assert read_config(raw | {"eos_token_id": [1, 106]}).eos_token_ids == (1, 106)


def bfloat16(x: Any) -> Any:
    return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16)


def test_per_layer_inputs_and_norms_round_where_transformers_does(multimodal):
    model, _ = multimodal
    text = model.model.language_model.to(torch.bfloat16)
    rng = np.random.default_rng(1)
    ids = torch.tensor(rng.integers(0, 89, (2, 11)))
    config = replace(GEMMA4_SMALL, hidden_size=48, num_layers=4)
    assert config.per_layer_inputs is not None
    config = replace(config, per_layer_inputs=replace(config.per_layer_inputs, size=8))
    params = {
        "per_layer_embed": bfloat16(text.embed_tokens_per_layer.weight.detach()),
        "per_layer_model_projection": bfloat16(text.per_layer_model_projection.weight.detach()),
        "per_layer_model_norm": bfloat16(text.per_layer_projection_norm.weight.detach()),
    }
    config = replace(config, rms_norm_eps=1e-6)
    with torch.no_grad():
        embedded = text.embed_tokens(ids)
        of_ids = text.get_per_layer_inputs(ids)
        expected = text.project_per_layer_inputs(embedded, of_ids)
    ours = per_layer_inputs(config, params, jnp.asarray(ids.numpy()), bfloat16(embedded))
    assert ours.dtype == jnp.bfloat16
    # The sums of the projection may round differently in the last bit.
    difference = np.abs(np.asarray(ours, np.float32) - expected.float().numpy())
    assert np.mean(difference > 0) < 0.02
    assert difference.max() < 0.02

    norm = text.norm
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48).to(torch.bfloat16))
        expected = norm(embedded)
    ours = rms_norm(config, bfloat16(embedded), bfloat16(norm.weight.detach()))
    np.testing.assert_array_equal(np.asarray(ours, np.float32), expected.float().numpy())
