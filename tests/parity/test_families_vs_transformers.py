"""Every model family against transformers on random small configs: its files read, ours read by it,
logits, gradients, and the engine's decoding. Weights and reference values are transformers' own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, Extension, JaxEngine
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import hf_tensors, load_hf, save_hf
from tests.config_fields import check_every_field

torch = pytest.importorskip("torch")

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "initializer_range": 0.2,
}
DYNAMIC = {"max_trained_positions": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
DELTA_NET = {
    "head_dim": 16,
    # A norm follows the delta rule. At the first tokens it divides by the overlap of query and key,
    # which is close to 0 in some heads, and larger weights make more of what that rounds.
    "initializer_range": 0.06,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GATED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 8}),
    "llama yarn": ("LlamaConfig", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 4.0}}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "Qwen2Config",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3_moe with dense first layers": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe normalized": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "mistral": ("MistralConfig", {"head_dim": 12, "sliding_window": 9}),
    "mistral without a window": ("MistralConfig", {"head_dim": 8, "sliding_window": None}),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "pad_token_id": None}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe with groups": (
        "Glm4MoeConfig",
        {
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v3 with direct queries": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 16,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,
        },
    ),
    # As E2B: per-layer inputs, shared keys and values, wide networks in the layers that share.
    "gemma4 small": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 90,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
        },
    ),
    # As 31B: full layers have fewer key/value heads, and keys as values.
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "full_attention",
            ],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "use_bidirectional_attention": "vision",
        },
    ),
    # As 26B-A4B: experts beside the dense network of every layer.
    "gemma4 with experts": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "full_attention",
            ],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", DELTA_NET | GATED_EXPERTS),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        DELTA_NET
        | {
            "linear_conv_kernel_dim": 3,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "linear_attention",
            ],
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", DELTA_NET | GATED_EXPERTS),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2, "beta_fast": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.fixture(params=CONFIGS)
def peer(request, tmp_path: Path):
    """A random model of transformers, and the folder it was saved in."""
    import transformers

    name, fields = CONFIGS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL | fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Random too: else a wrong one would not show.
            if any(part in key for part in ("norm", "bias", "sinks", "scale")):
                parameter += torch.randn_like(parameter) * 0.2
        for buffer in untrained(model):
            buffer += torch.randn_like(buffer) * 0.2
    model.save_pretrained(tmp_path)
    return model, tmp_path


def untrained(model: Any) -> list[Any]:
    """Return the biases of the routers' choices and layers' scales, which are no parameters."""
    names = ("correction_bias", "layer_scalar")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(names)]


def forward(config, params, ids: np.ndarray) -> jax.Array:
    model = Decoder.from_params(config, params)
    return model.logits(model(jnp.asarray(ids))[0])


def test_its_files_are_read_and_logits_are_equal(peer):
    model, folder = peer
    config, params = load_hf(folder)
    ids = np.random.default_rng(0).integers(0, 89, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(forward(config, params, ids), expected, atol=1e-4)


def test_our_files_are_read_by_transformers(peer, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model, folder = peer
    config, params = load_hf(folder)
    save_hf(tmp_path / "ours", config, params)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert load_hf(tmp_path / "ours")[0] == config
    ids = torch.tensor(np.random.default_rng(1).integers(0, 89, (2, 40)))
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)


def test_every_field_of_a_config_is_honoured_refused_or_without_effect(peer):
    import transformers

    model, folder = peer
    config, params = load_hf(folder)
    kind = type(model.config)
    weights = model.state_dict()
    ids = np.random.default_rng(4).integers(0, 89, (1, 24))

    def theirs(raw: dict[str, Any]) -> np.ndarray:
        changed = kind.from_dict(json.loads(json.dumps(raw)))
        changed_model = transformers.AutoModelForCausalLM.from_config(
            changed, attn_implementation="eager"
        ).eval()
        changed_model.load_state_dict(weights)
        with torch.no_grad():
            return changed_model(torch.tensor(ids)).logits.numpy()

    def ours(changed: DecoderConfig) -> np.ndarray:
        return np.asarray(forward(changed, params, ids))

    compared = check_every_field(
        json.loads((folder / "config.json").read_text()),
        theirs=theirs,
        resolved=lambda raw: kind.from_dict(raw).to_dict(),
        # Each configuration is compiled anew: these families have all kinds of fields.
        ours=ours if config.family in ("llama", "gemma3_text", "gpt_oss") else None,
    )
    assert compared > 20


def test_every_gradient_is_equal(peer):
    model, folder = peer
    config, params = load_hf(folder)
    ids = np.random.default_rng(2).integers(0, 89, (2, 24))

    def loss(params):
        scores = jax.nn.log_softmax(forward(config, params, ids)[:, :-1])
        return -jnp.take_along_axis(scores, jnp.asarray(ids)[:, 1:, None], axis=-1).mean()

    ours = dict(hf_tensors(config, jax.grad(loss)(params)))
    model(torch.tensor(ids), labels=torch.tensor(ids)).loss.backward()
    # Let transformers name and unfuse its gradients as it does its weights.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for buffer in untrained(model):
            buffer.zero_()
    model.save_pretrained(folder / "gradients")
    theirs = dict(hf_tensors(*load_hf(folder / "gradients")))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        tolerance = 2e-5
        if config.delta_net is not None:
            tolerance = max(2e-5, 1e-3 * np.abs(theirs[name]).max())  # see DELTA_NET
        np.testing.assert_allclose(gradient, theirs[name], atol=tolerance, rtol=5e-5, err_msg=name)


def test_the_engine_decodes_what_transformers_generates_greedily(peer):
    model, folder = peer
    config, params = load_hf(folder)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 89, count).tolist() for count in (3, 19)]
    shapes = EngineShapes(
        max_model_len=64,
        max_concurrent_decodes=2,
        kv_cache_tokens=128,
        decode_steps=12,
        prefill_buckets=(8, 32),
    )
    engine = JaxEngine(config, shapes)
    weights = engine.load_params(params)
    cache = engine.init_cache()
    cache = engine.extend(
        weights,
        cache,
        [
            Extension(shapes.pages_of_slot(i), 0, np.array(ids[:-1], np.int32), state=1 + i)
            for i, ids in enumerate(prompts)
        ],
    )
    slots = make_decode_batch(2, shapes.context_pages)
    slots.pages[:] = [shapes.pages_of_slot(i) for i in range(2)]
    slots.tokens[:] = [ids[-1] for ids in prompts]
    slots.positions[:] = [len(ids) - 1 for ids in prompts]
    slots.remaining[:] = 12
    slots.stop_ids[:] = -1
    if engine.context.has_states:
        slots = replace(slots, states=np.array([1, 2], np.int32))
    _, sampled = engine.decode(weights, cache, slots, 12, 3)
    for row, ids in enumerate(prompts):
        expected = _greedy(model, ids, 12)
        assert sampled.ids[:, row].tolist() == expected


def test_dynamic_scaling_is_that_of_the_longest_context(tmp_path: Path):
    """transformers' base grows with the context; ours is always that of
    ``max_position_embeddings``.
    """
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e3}
    settings = SMALL | {"head_dim": 8, "max_position_embeddings": 16, "rope_parameters": rope}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**settings)
    ).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    ids = np.random.default_rng(0).integers(0, 89, (2, 40))
    for length, fields in {
        16: {},
        40: {"max_position_embeddings": 40, "rope_parameters": DYNAMIC | rope},
    }.items():
        file.write_text(json.dumps(raw | fields))
        config, params = load_hf(tmp_path)
        save_hf(tmp_path / "ours", config, params)
        assert load_hf(tmp_path / "ours")[0] == config
        with torch.no_grad():
            expected = model(torch.tensor(ids[:, :length])).logits.numpy()
        np.testing.assert_allclose(forward(config, params, ids[:, :length]), expected, atol=1e-4)


def _greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Decode by whole forward passes: no cache, no generation settings."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]
