"""DeepSeek-V3 and Kimi K2 as they are published: their configurations, FP8 weights in shards, and a
layer that predicts further tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.errors import ModelError
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.models.config import DecoderConfig, Experts, LatentAttention
from jax_agent_rl.models.families import read_config, write_config
from jax_agent_rl.models.hf import check_files, hf_tensors, load_hf
from jax_agent_rl.models.lora import read_peft, save_peft
from tests.fp8 import floats_of, fp8_of, save_with_fp8
from tests.messages import raises
from tests.tiny import LATENT, tiny_params

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"]
    | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WIDE = replace(
    LATENT,
    family="deepseek_v3",
    hidden_size=160,
    intermediate_size=200,
    num_layers=2,
    tie_word_embeddings=False,
    latent=LatentAttention(q_rank=140, kv_rank=130, nope_dim=40, rope_dim=4, value_dim=36),
    head_dim=44,
    experts=Experts(
        count=2,
        per_token=1,
        intermediate_size=136,
        normalize=True,
        first_dense_layers=1,
        scoring="sigmoid",
        correction=True,
        shared_size=136,
    ),
)
"""No matrix is a multiple of a block."""


def numbers_of(config: DecoderConfig) -> int:
    shapes = config.parameter_shapes()
    layers = sum(int(np.prod(shape)) for shape in shapes.pop("layers").values())
    return layers + sum(int(np.prod(shape)) for shape in shapes.values())


def test_published_configurations_are_read_and_written_again():
    """671 and 1,040 billion parameters, as their reports say."""
    for raw, billions in ((DEEPSEEK_V3, 671), (KIMI_K2, 1040)):
        config = read_config(raw)
        assert numbers_of(config) / 1e9 == pytest.approx(billions, rel=0.02)
        written = write_config(config)
        assert written["model_type"] == raw["model_type"]
        assert written["num_nextn_predict_layers"] == 0
        assert "quantization_config" not in written, "floats are written"
        assert read_config(written) == config


def test_yarn_sharpens_the_scores_as_deepseeks_code_says():
    """``mscale = 0.1 * mscale_all_dim * ln(40) + 1``, squared; cos and sin keep their size."""
    config = read_config(DEEPSEEK_V3)
    assert config.score_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.rope.scaling.magnitude == 1.0
    unscaled = read_config(DEEPSEEK_V3 | {"rope_scaling": None})
    assert unscaled.score_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3"])
@pytest.mark.parametrize(
    ("sharpening", "magnitude"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, 1.1328528353),
        ({"mscale": 0.7}, 1.3688879454),
        ({"mscale_all_dim": 0.3}, 1.3688879454),
        ({"attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 0.3}, 1.2),
        ({}, 1.3688879454),
    ],
)
def test_what_sharpens_yarn_is_written_as_it_was_read(
    model_type: str, sharpening: dict[str, float], magnitude: float
):
    """vLLM does not read ``attention_factor`` in latent attention; transformers prefers it."""
    scaling = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    scaling |= sharpening
    raw = DEEPSEEK_V3 if model_type == "deepseek_v3" else QWEN3
    config = read_config(raw | {"rope_scaling": scaling})
    assert config.rope.scaling.magnitude == pytest.approx(magnitude)

    written = write_config(config)["rope_scaling"]
    assert written == scaling
    positions = written["original_max_position_embeddings"]
    assert isinstance(positions, int), "transformers warns of others"


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method", "awq"),
        (FP8 | {"weight_block_size": [64, 128]}, "weight_block_size", "[64, 128]"),
        (FP8 | {"fmt": "e5m2"}, "fmt", "e5m2"),
        ({"quant_method": "compressed-tensors"}, "quant_method", "compressed-tensors"),
        ({"bits": 4}, "quantization_config.bits", "4"),
    ],
)
def test_other_quantizations_are_refused_by_name(settings: dict, key: str, value: str):
    with raises(ModelError, key=key, value=value):
        read_config(DEEPSEEK_V3 | {"quantization_config": settings})


def test_fp8_in_shards_is_read_as_floats_without_the_layer_that_predicts(tmp_path: Path):
    params = tiny_params(config=WIDE)
    tensors: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for name, tensor in hf_tensors(WIDE, params):
        if not name.endswith("_proj.weight"):
            tensors[name] = expected[name] = tensor
            continue
        numbers, scales = fp8_of(tensor)
        expected[name] = floats_of(numbers, scales)
        tensors[name] = numbers
        tensors[f"{name}_scale_inv"] = scales

    numbers, scales = fp8_of(np.ones((160, 320), np.float32))
    predicting = "model.layers.2"
    tensors[f"{predicting}.eh_proj.weight"] = numbers
    tensors[f"{predicting}.eh_proj.weight_scale_inv"] = scales
    tensors[f"{predicting}.enorm.weight"] = np.ones(160, np.float32)
    tensors[f"{predicting}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]

    names = sorted(tensors)
    places = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(places.values())):
        shard = {name: tensors[name] for name in names if places[name] == file}
        save_with_fp8(tmp_path / file, shard)
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = write_config(WIDE) | {"quantization_config": FP8, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    assert check_files(tmp_path) == WIDE
    config, read = load_hf(tmp_path, dtype=jnp.bfloat16)
    assert config == WIDE
    for name, tensor in hf_tensors(config, read):
        dtype = np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        assert tensor.dtype == dtype, name
        np.testing.assert_array_equal(tensor, expected[name].astype(dtype), err_msg=name)


def test_layers_behind_the_last_one_that_predict_nothing_are_refused(tmp_path: Path):
    tensors = dict(hf_tensors(WIDE, tiny_params(config=WIDE)))
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(160, np.float32)
    save_with_fp8(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(write_config(WIDE)))
    with raises(ModelError, key="model.layers.2.input_layernorm.weight"):
        load_hf(tmp_path)


def test_adapters_of_every_projection_have_pefts_names(tmp_path: Path):
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    lora = LoraConfig(rank=2, targets=targets)
    save_peft(tmp_path, lora, WIDE, new_adapters(lora, WIDE), base="base")
    names = set()
    for layer in range(2):
        for target in targets:
            module = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            names |= {f"{module}.lora_A.weight", f"{module}.lora_B.weight"}
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == names
    assert read_peft(tmp_path, WIDE, key="adapters").weights.keys() == {
        "q_a",
        "q_b",
        "kv_a",
        "kv_b",
        "o",
    }
