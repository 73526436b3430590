"""Mixtures of experts as their makers publish them: every field known, and as many parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Rope
from jax_agent_rl.models.families import read_config
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.messages import raises
from tests.tiny import EXPERTS, tiny_params

_GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "model_type": "glm4_moe",
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "vocab_size": 151552,
}
GLM_45_AIR = _GLM | {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "use_qk_norm": False,
}
GLM_46 = _GLM | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
}

MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


GEMMA_4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": True,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True,
}


def billions(config: DecoderConfig) -> float:
    shapes = jax.tree.leaves(config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes) / 1e9


@pytest.mark.parametrize(
    ("raw", "size", "dense_layers"),
    [(GLM_45_AIR, 106.9, 1), (GLM_46, 352.8, 3)],
    ids=["GLM-4.5-Air", "GLM-4.6"],
)
def test_published_glms_are_read_with_all_their_parameters(
    raw: dict[str, Any], size: float, dense_layers: int
):
    config = read_config(raw)
    assert billions(config) == pytest.approx(size, abs=0.1)
    assert config.layers_with("gate") == tuple(range(dense_layers))
    assert config.rope == Rope(theta=1e6, partial_rotary=0.5)
    assert config.qkv_bias
    assert config.qk_norm == raw["use_qk_norm"]
    assert config.experts is not None
    assert config.experts.shared_size == raw["moe_intermediate_size"]
    assert config.experts.scale == raw["routed_scaling_factor"]


def test_minimax_m2_is_read_with_all_its_parameters():
    config = read_config(MINIMAX_M2)
    assert billions(config) == pytest.approx(228.7, abs=0.1)
    assert config.rope == Rope(theta=5e6, partial_rotary=0.5)
    assert config.parameter_shapes()["layers"]["k_norm"] == (62, 8 * 128)
    with raises(ModelError, key="quant_method", value="awq"):
        read_config(MINIMAX_M2 | {"quantization_config": {"quant_method": "awq"}})
    with raises(ModelError, key="attn_type_list"):
        read_config(MINIMAX_M2 | {"attn_type_list": [0] * 62})


def test_gemma_4_with_experts_is_read_with_all_its_parameters():
    config = read_config(GEMMA_4_26B)
    assert billions(config) == pytest.approx(25.2, abs=0.1)  # as its makers say
    assert config.experts is not None
    assert config.layers_with("gate") == config.expert_layers == tuple(range(30))
    text = GEMMA_4_26B["text_config"]
    with raises(ModelError, key="top_k_experts", value=200):
        read_config(text | {"top_k_experts": 200})
    with raises(ModelError, key="num_experts"):
        read_config({name: value for name, value in text.items() if name != "num_experts"})
    wide = {"num_kv_shared_layers": 6, "use_double_wide_mlp": True}
    with raises(ModelError, key="use_double_wide_mlp", value=True):
        read_config(text | wide)


assert EXPERTS.experts is not None
TINY_GLM = replace(
    EXPERTS,
    family="glm4_moe",
    rope=Rope(partial_rotary=0.5),
    experts=replace(
        EXPERTS.experts, scoring="sigmoid", correction=True, shared_size=16, first_dense_layers=1
    ),
)


def test_a_layer_that_predicts_further_tokens_is_left_out_and_no_other_tensor(tmp_path: Path):
    params = tiny_params(config=TINY_GLM)
    save_hf(tmp_path / "model", TINY_GLM, params)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    extra = np.ones((32, 64), np.float32)
    further = {
        "model.layers.2.eh_proj.weight": extra,
        "model.layers.2.self_attn.q_proj.weight": extra,
        "model.layers.2.mlp.gate.e_score_correction_bias": extra,
    }
    save_file(tensors | further, file)
    _, read = load_hf(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, read, params)

    save_file(tensors | further | {"model.layers.3.self_attn.q_proj.weight": extra}, file)
    with raises(ModelError, value="model.layers.3.self_attn.q_proj"):
        load_hf(tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"n_group": 3}, "n_group"),
        ({"n_group": 128}, "n_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 64, "topk_group": 3}, "num_experts_per_tok"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace"),
        ({"num_local_experts": 64}, "num_local_experts"),
    ],
)
def test_numbers_of_experts_and_groups_that_do_not_fit_are_refused(
    fields: dict[str, Any], key: str
):
    with raises(ModelError, key=key):
        read_config(GLM_45_AIR | fields)
