"""Qwen3-Next and Qwen3.5 as they are published: every field known, and as many parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import Rope
from jax_agent_rl.models.families import read_config, write_config
from tests.messages import raises
from tests.unit.models.test_mixtures_as_published import billions

_PATTERN = ["linear_attention"] * 3 + ["full_attention"]
_LINEAR: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
}
QWEN3_NEXT_80B = _LINEAR | {
    "architectures": ["Qwen3NextForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_QWEN3_5_TEXT = _LINEAR | {
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "pad_token_id": None,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
_WITH_TOWER: dict[str, Any] = {
    "image_token_id": 248056,
    "language_model_only": False,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
QWEN3_5_9B = _WITH_TOWER | {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": _QWEN3_5_TEXT
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": _PATTERN * 8,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
}
QWEN3_5_27B = QWEN3_5_9B | {
    "text_config": QWEN3_5_9B["text_config"]
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": _PATTERN * 16,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "output_gate_type": "swish",
    },
}
QWEN3_5_35B = _WITH_TOWER | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _QWEN3_5_TEXT
    | {
        "hidden_size": 2048,
        "layer_types": _PATTERN * 10,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
}


def text_only(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | {"language_model_only": True}


@pytest.mark.parametrize(
    ("raw", "family", "size"),
    [
        (QWEN3_NEXT_80B, "qwen3_next", 79.7),
        (QWEN3_5_9B, "qwen3_5", 9.4),
        (text_only(QWEN3_5_9B), "qwen3_5_text", 9.0),
        (QWEN3_5_27B, "qwen3_5", 27.4),
        (text_only(QWEN3_5_27B), "qwen3_5_text", 26.9),
        (QWEN3_5_35B, "qwen3_5_moe", 35.1),
        (text_only(QWEN3_5_35B), "qwen3_5_moe_text", 34.7),
    ],
    ids=[
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-9B",
        "Qwen3.5-9B, text",
        "Qwen3.5-27B",
        "Qwen3.5-27B, text",
        "Qwen3.5-35B-A3B",
        "Qwen3.5-35B-A3B, text",
    ],
)
def test_published_models_are_read_with_all_their_parameters(
    raw: dict[str, Any], family: str, size: float
):
    config = read_config(raw)
    assert config.family == family
    assert billions(config) == pytest.approx(size, abs=0.06)
    rope = Rope(theta=1e7, partial_rotary=0.25)
    if config.vision is not None:
        rope = replace(rope, sections=(11, 11, 10), interleaved_sections=True)
        assert config.vision.placeholders == {"image": 248056}
        assert read_config(write_config(config)) == config
    assert config.rope == rope
    assert config.attention_gate
    assert config.layers_with("q") == tuple(range(3, config.num_layers, 4))


def test_a_written_file_has_each_field_where_it_was():
    config = read_config(QWEN3_5_35B)
    written = write_config(config)
    assert written["architectures"] == QWEN3_5_35B["architectures"]
    assert written["text_config"]["router_aux_loss_coef"] == 0.001
    assert written["text_config"]["model_type"] == "qwen3_5_moe_text"
    assert written["vision_config"]["deepstack_visual_indexes"] == []
    assert "router_aux_loss_coef" not in written
    assert "image_token_id" not in written["text_config"]


def test_whether_a_tower_is_left_alone_is_true_or_false():
    with raises(ModelError, key="language_model_only", value="'yes'"):
        read_config(QWEN3_5_9B | {"language_model_only": "yes"})


def test_what_no_published_model_has_is_refused():
    text = QWEN3_5_27B["text_config"]
    with raises(ModelError, key="output_gate_type", value="sigmoid"):
        read_config(QWEN3_5_27B | {"text_config": text | {"output_gate_type": "sigmoid"}})
    with raises(ModelError, key="mlp_only_layers"):
        read_config(QWEN3_5_27B | {"text_config": text | {"mlp_only_layers": [1]}})
    tower = QWEN3_5_27B["vision_config"] | {"deepstack_visual_indexes": [8]}
    with raises(ModelError, key="deepstack_visual_indexes", value="[8]"):
        read_config(QWEN3_5_27B | {"vision_config": tower})
    rope = text["rope_parameters"] | {"mrope_section": [11, 11, 11]}
    with raises(ModelError, key="mrope_section", value=32):
        read_config(QWEN3_5_27B | {"text_config": text | {"rope_parameters": rope}})
