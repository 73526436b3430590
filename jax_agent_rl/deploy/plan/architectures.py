"""Well-known models by name, so that a plan needs none of their files.

Their shapes are as their ``config.json`` publishes them.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.near_names import nearest

Shape = tuple[int, int, int, int, int]
"""hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads."""
Fields = dict[str, Any]


def _fields(family: Fields, shape: Shape, **fields: Any) -> Fields:
    """Return a model's fields: its family's, its shape, and what it has besides or instead."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes = dict(zip(names, shape, strict=True))
    return {**family, **sizes, **fields}


_QWEN = {
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 151645,
}
_QWEN25 = {**_QWEN, "model_type": "qwen2", "tie_word_embeddings": False}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "eos_token_id": 248046,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT = {
    **_QWEN35,
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "eos_token_id": 151645,
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 128009,
    "tie_word_embeddings": False,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 106,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [1, 106],
}
_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 131072,
    "head_dim": 128,
    "rope_theta": 1e8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GLM4 = {"model_type": "glm4", "vocab_size": 151552, "head_dim": 128, "rms_norm_eps": 1e-5}
_GLM4_MOE = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "hidden_act": "silu",
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 131072,
    "eos_token_id": [151329, 151336, 151338],
    "tie_word_embeddings": False,
}
_MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
    "eos_token_id": 200020,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_KIMI_K2 = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "rope_theta": 5e4,
    "rope_scaling": {**_DEEPSEEK_YARN, "factor": 32.0, "beta_fast": 1.0},
    "max_position_embeddings": 131072,
    "eos_token_id": 163585,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "eos_token_id": 200002,
    "tie_word_embeddings": False,
}

_OLMO3 = {
    "model_type": "olmo3",
    "vocab_size": 100278,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "eos_token_id": 100257,
    "tie_word_embeddings": False,
}


def _llama3_rope(factor: float) -> Fields:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}


_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

ARCHITECTURES: Mapping[str, Fields] = {
    "qwen2.5-0.5b": _fields(_QWEN25, (896, 4864, 24, 14, 2), tie_word_embeddings=True),
    "qwen2.5-1.5b": _fields(_QWEN25, (1536, 8960, 28, 12, 2), tie_word_embeddings=True),
    "qwen2.5-3b": _fields(_QWEN25, (2048, 11008, 36, 16, 2), tie_word_embeddings=True),
    "qwen2.5-7b": _fields(_QWEN25, (3584, 18944, 28, 28, 4), vocab_size=152064),
    "qwen2.5-14b": _fields(_QWEN25, (5120, 13824, 48, 40, 8), vocab_size=152064),
    "qwen2.5-32b": _fields(_QWEN25, (5120, 27648, 64, 40, 8), vocab_size=152064),
    "qwen2.5-72b": _fields(_QWEN25, (8192, 29568, 80, 64, 8), vocab_size=152064),
    "qwen3-0.6b": _fields(_QWEN3, (1024, 3072, 28, 16, 8), tie_word_embeddings=True),
    "qwen3-1.7b": _fields(_QWEN3, (2048, 6144, 28, 16, 8), tie_word_embeddings=True),
    "qwen3-4b": _fields(_QWEN3, (2560, 9728, 36, 32, 8), tie_word_embeddings=True),
    "qwen3-8b": _fields(_QWEN3, (4096, 12288, 36, 32, 8)),
    "qwen3-14b": _fields(_QWEN3, (5120, 17408, 40, 40, 8)),
    "qwen3-32b": _fields(_QWEN3, (5120, 25600, 64, 64, 8)),
    "qwen3-30b-a3b": _fields(_QWEN3, (2048, 6144, 48, 32, 4), model_type="qwen3_moe", **_EXPERTS),
    "qwen3-next-80b-a3b": _fields(_QWEN3_NEXT, (2048, 5120, 48, 16, 2)),
    "qwen3.5-9b": _fields(_QWEN35, (4096, 12288, 32, 16, 4)),
    "qwen3.5-35b-a3b": _fields(
        _QWEN35,
        (2048, 512, 40, 16, 2),
        model_type="qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "llama-3.2-1b": _fields(
        _LLAMA, (2048, 8192, 16, 32, 8), tie_word_embeddings=True, **_llama3_rope(32.0)
    ),
    "llama-3.2-3b": _fields(
        _LLAMA, (3072, 8192, 28, 24, 8), tie_word_embeddings=True, **_llama3_rope(32.0)
    ),
    "llama-3.1-8b": _fields(_LLAMA, (4096, 14336, 32, 32, 8), **_llama3_rope(8.0)),
    "llama-3.1-70b": _fields(_LLAMA, (8192, 28672, 80, 64, 8), **_llama3_rope(8.0)),
    "llama-3.3-70b": _fields(_LLAMA, (8192, 28672, 80, 64, 8), **_llama3_rope(8.0)),
    "gemma-3-1b": _fields(
        _GEMMA3, (1152, 6912, 26, 4, 1), vocab_size=262144, sliding_window=512, rope_scaling=None
    ),
    "gemma-3-4b": _fields(_GEMMA3, (2560, 10240, 34, 8, 4)),
    "gemma-3-12b": _fields(_GEMMA3, (3840, 15360, 48, 16, 8)),
    "gemma-3-27b": _fields(
        _GEMMA3, (5376, 21504, 62, 32, 16), head_dim=128, query_pre_attn_scalar=168
    ),
    "mistral-7b": _fields(_MISTRAL, (4096, 14336, 32, 32, 8), vocab_size=32768, rope_theta=1e6),
    "mistral-nemo-12b": _fields(_MISTRAL, (5120, 14336, 40, 32, 8), rope_theta=1e6),
    "mistral-small-24b": _fields(_MISTRAL, (5120, 32768, 40, 32, 8)),
    "ministral-8b": _fields(_MISTRAL, (4096, 12288, 36, 32, 8), sliding_window=32768),
    "glm-4-9b": _fields(_GLM4, (4096, 13696, 40, 32, 2), attention_bias=True),
    "glm-4-32b": _fields(_GLM4, (6144, 23040, 61, 48, 2), attention_bias=False),
    "glm-4.5-air": _fields(
        _GLM4_MOE,
        (4096, 10944, 46, 96, 8),
        n_routed_experts=128,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "glm-4.6": _fields(
        _GLM4_MOE,
        (5120, 12288, 92, 96, 8),
        n_routed_experts=160,
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        max_position_embeddings=202752,
    ),
    "minimax-m2": _fields(_MINIMAX_M2, (3072, 1536, 62, 48, 8)),
    "deepseek-v3": _fields(
        _DEEPSEEK_V3,
        (7168, 18432, 61, 128, 128),
        rope_scaling=_DEEPSEEK_YARN,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
    ),
    "kimi-k2": _fields(
        _KIMI_K2,
        (7168, 18432, 61, 64, 64),
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        first_k_dense_replace=1,
    ),
    "olmo-3-7b": _fields(_OLMO3, (4096, 11008, 32, 32, 32)),
    "olmo-3-32b": _fields(_OLMO3, (5120, 27648, 64, 40, 8)),
    "gpt-oss-20b": _fields(_GPT_OSS, (2880, 2880, 24, 64, 8), num_local_experts=32),
    "gpt-oss-120b": _fields(_GPT_OSS, (2880, 2880, 36, 64, 8), num_local_experts=128),
    "gemma-4-e2b": _fields(
        _GEMMA4,
        (1536, 6144, 35, 8, 1),
        sliding_window=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        max_position_embeddings=131072,
    ),
    "gemma-4-26b-a4b": _fields(
        _GEMMA4,
        (2816, 2112, 30, 16, 8),
        sliding_window=1024,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        max_position_embeddings=262144,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _fields(
        _GEMMA4,
        (5376, 21504, 60, 32, 16),
        sliding_window=1024,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        max_position_embeddings=262144,
    ),
    "smollm2-135m": _fields(_SMOLLM2, (576, 1536, 30, 9, 3)),
    "smollm2-360m": _fields(_SMOLLM2, (960, 2560, 32, 15, 5)),
    "smollm2-1.7b": _fields(_SMOLLM2, (2048, 8192, 24, 32, 32), rope_theta=1.3e5),
}
"""Fields of ``config.json`` by name; of Gemma 3 and Qwen3.5 the decoder, without the tower."""


@contextlib.contextmanager
def architecture_folder(name: str) -> Iterator[Path]:
    """Write the ``config.json`` of one of :data:`ARCHITECTURES` into a temporary folder.

    Raises:
        ConfigError: no model of this name is known here.
    """
    fields = ARCHITECTURES.get(name.lower())
    if fields is None:
        similar = nearest(name.lower(), ARCHITECTURES)
        guess = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(
            f"--architecture {name}: not known; {guess}there are {', '.join(ARCHITECTURES)}; of any"
            " other model set model.path to a folder with its config.json"
        )
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        yield Path(folder)
