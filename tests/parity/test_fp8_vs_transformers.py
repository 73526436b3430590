"""Files in FP8 as MiniMax and DeepSeek publish them: the model that is read has the logits of
transformers' model with the same matrices as floats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.fp8 import floats_of, fp8_of, save_with_fp8

torch = pytest.importorskip("torch")

SIZES: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 160,  # no multiple of a block
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "intermediate_size": 136,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "rotary_dim": 24,
            "num_local_experts": 4,
        },
        {
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "intermediate_size": 200,
            "num_key_value_heads": 4,
            "q_lora_rank": 140,
            "kv_lora_rank": 130,
            "qk_nope_head_dim": 40,
            "qk_rope_head_dim": 4,
            "v_head_dim": 36,
            "n_routed_experts": 4,
            "moe_intermediate_size": 136,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {"fmt": "e4m3"},
    ),
}
"""By family: transformers' class, sizes, and how its files describe their weights."""
KEPT_AS_FLOATS = ("norm.weight", "gate.weight", "embed_tokens.weight", "lm_head.weight")


def is_in_fp8(name: str) -> bool:
    return name.endswith(".weight") and not name.endswith(KEPT_AS_FLOATS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_same_matrices_as_floats(name: str, tmp_path: Path):
    import transformers

    class_name, sizes, described = MODELS[name]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, class_name)(**SIZES | sizes), attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "drawn")
    drawn = load_file(tmp_path / "drawn" / "model.safetensors")

    published: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    for tensor_name, tensor in drawn.items():
        if not is_in_fp8(tensor_name):
            published[tensor_name] = floats[tensor_name] = tensor
            continue
        numbers, scales = fp8_of(tensor)
        published[tensor_name] = numbers
        published[f"{tensor_name}_scale_inv"] = scales
        floats[tensor_name] = floats_of(numbers, scales)
    scaled_names = [tensor_name for tensor_name in published if tensor_name.endswith("_scale_inv")]
    for module in (".experts.3.", ".self_attn."):
        assert any(module in tensor_name for tensor_name in scaled_names)

    folder = tmp_path / "published"
    folder.mkdir()
    save_with_fp8(folder / "model.safetensors", published)
    raw = json.loads((tmp_path / "drawn" / "config.json").read_text())
    settings = {
        "activation_scheme": "dynamic",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    raw["quantization_config"] = settings | described
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(floats, tmp_path / "drawn" / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "drawn", attn_implementation="eager"
    ).eval()

    config, params = load_hf(folder)
    model = Decoder.from_params(config, params)
    ids = np.random.default_rng(0).integers(3, 89, (2, 24))
    logits = model.logits(model(jnp.asarray(ids))[0])
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())

    # What is written is a model of floats, which transformers reads.
    save_hf(tmp_path / "written", config, params)
    assert "quantization_config" not in json.loads((tmp_path / "written/config.json").read_text())
    written = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "written", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(written(torch.tensor(ids)).logits, torch.tensor(expected))
