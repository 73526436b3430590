"""MaxText's MaxEngine for ``rollout.jetstream.engine_factory:
examples/maxtext_engine/engine.py:make``.

For dense models of the Llama and Qwen families: MaxText is configured from our description of the
model, and the learner's parameters are handed over as MaxText's NNX parameters. See README.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.engine import (
    EngineShapes,
)  # also imports JetStream, without seqio where it is missing
from jax_agent_rl.jetstream.external_engine import ExternalEngine
from jax_agent_rl.models.config import DecoderConfig, Params

DTYPE = "bfloat16"  # of weights, activations and cache
# Ids that a slot holds behind its prompt; MaxText keeps room for them apart from the prompt's.
MAX_NEW_TOKENS = 1024
BLOCKS = {
    "llama": "llama2",
    "mistral": "mistral",
    "qwen3": "qwen3",
}  # the learner's family to MaxText's decoder_block
SCALED = {"llama2", "mistral"}  # blocks whose query matrix carries the scores' 1/sqrt(head_dim)


def make(model: DecoderConfig, shapes: EngineShapes) -> ExternalEngine:
    """What ``rollout.jetstream.engine_factory`` names."""
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.inference.maxengine import maxengine

    _check(model)
    config = pyconfig.initialize(["", str(_base_yml(pyconfig))], **settings(model, shapes))
    engine = maxengine.MaxEngine(config)
    scale = model.head_dim**-0.5 if config.decoder_block.value in SCALED else 1.0

    def to_params(params: Params) -> Any:
        state = nnx.split(engine.model, nnx.Param, ...)[1]
        nnx.replace_by_pure_dict(
            state, jax.tree.map(lambda x: x.astype(DTYPE), to_maxtext(model, params, scale))
        )
        if engine.abstract_params is None:
            return engine.load_params(params=state)
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, engine.abstract_params))

    return ExternalEngine(
        engine=engine,
        to_params=to_params,
        max_new_tokens=MAX_NEW_TOKENS,
        sampled={"algorithm": "weighted", "temperature": 1.0},
        greedy={"algorithm": "greedy"},
    )


def settings(model: DecoderConfig, shapes: EngineShapes) -> dict[str, Any]:
    """MaxText's keys for this model and these shapes; the rest is its ``base.yml``."""
    return {
        "decoder_block": BLOCKS[model.family],
        "vocab_size": model.vocab_size,
        "base_emb_dim": model.hidden_size,
        "base_mlp_dim": model.intermediate_size,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "use_qk_norm": model.qk_norm,
        "mlp_activations": ["silu", "linear"],
        "normalization_layer_epsilon": model.rms_norm_eps,
        "rope_max_timescale": int(model.rope.theta),
        # MaxText rounds a tied matrix to bfloat16 before it multiplies with it, whatever the dtype:
        # it gets a copy.
        "logits_via_embedding": False,
        "dtype": DTYPE,
        "weight_dtype": DTYPE,
        "matmul_precision": "highest" if DTYPE == "float32" else "default",
        "scan_layers": False,
        "attention": "dot_product",
        "enable_checkpointing": False,
        "hardware": jax.default_backend(),
        "skip_jax_distributed_system": True,
        "run_name": "rollout",
        "return_log_prob": True,
        "max_prefill_predict_length": shapes.max_model_len,
        "max_target_length": shapes.max_model_len + MAX_NEW_TOKENS,
        "per_device_batch_size": shapes.max_concurrent_decodes / jax.device_count(),
        "ici_fsdp_parallelism": 1,
        "ici_autoregressive_parallelism": 1,
        "ici_tensor_parallelism": -1,
    }


def to_maxtext(model: DecoderConfig, params: Params, query_scale: float) -> dict[str, Any]:
    """The learner's tree as MaxText's: matrices [in, out] by head, a subtree per layer.

    Args:
        query_scale: multiplies the query matrices.
    """
    layers = params["layers"]
    k = model.num_kv_heads
    h = model.head_dim
    heads = {
        "query": ("q", model.num_heads, query_scale),
        "key": ("k", k, 1.0),
        "value": ("v", k, 1.0),
    }

    def layer(i: int) -> dict[str, Any]:
        attention: dict[str, Any] = {}
        for name, (ours, count, scale) in heads.items():
            kernel = layers[ours][i].T.reshape(-1, count, h)
            attention[name] = {"kernel": kernel * jnp.asarray(scale, kernel.dtype)}
        attention["out"] = {"kernel": layers["o"][i].T.reshape(model.num_heads, h, -1)}
        if model.qk_norm:
            attention["query_norm"] = {"scale": layers["q_norm"][i]}
            attention["key_norm"] = {"scale": layers["k_norm"][i]}

        norms = {
            "pre_self_attention_layer_norm": "input_norm",
            "post_self_attention_layer_norm": "post_attention_norm",
        }
        mlp = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
        tree = {
            "self_attention": attention,
            "mlp": {name: {"kernel": layers[ours][i].T} for name, ours in mlp.items()},
        }
        for name, ours in norms.items():
            tree[name] = {"scale": layers[ours][i]}
        return tree

    decoder: dict[str, Any] = {f"layers_{i}": layer(i) for i in range(model.num_layers)}
    decoder["decoder_norm"] = {"scale": params["final_norm"]}
    decoder["logits_dense"] = {
        "kernel": params["embed" if model.tie_word_embeddings else "lm_head"].T
    }
    return {"decoder": decoder, "token_embedder": {"embedding": params["embed"]}}


def _check(model: DecoderConfig) -> None:
    plain = (
        model.experts is None
        and model.vision is None
        and not model.qkv_bias
        and not model.windowed_layers
    )
    if model.family not in BLOCKS or not plain or model.rope.scaling is not None:
        raise ConfigError(
            f"examples/maxtext_engine maps dense {sorted(BLOCKS)} models without biases, windows"
            f" and scaled positions, not this {model.family} model; add the mapping there, or leave"
            " rollout.jetstream.engine_factory unset"
        )


def _base_yml(pyconfig: Any) -> Path:
    return Path(pyconfig.__file__).with_name("base.yml")
