"""Gemma 4 (``gemma4_text``, and the text model of ``gemma4``).

Windowed layers between full ones, whose heads have sizes of their own. The small models (E2B, E4B)
have per-layer inputs, and their last layers read the keys and values of earlier ones. The sparse
one (26B-A4B) has experts beside the dense network of each layer.

Of a ``gemma4`` folder the text model is read, as transformers' ``Gemma4ForCausalLM`` does; it is
written as ``gemma4_text``. Towers for images and sounds are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import (
    DecoderConfig,
    Experts,
    GlobalAttention,
    PerLayerInputs,
    ProportionalScaling,
    Rope,
)
from jax_agent_rl.models.families.hf_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Defaults,
    Fields,
    ModelFamily,
    all_but_every,
    bad_field,
    flat_fields,
    integer,
    number,
    read_common,
    read_layer_kinds,
    refuse,
    switch,
    write_common,
    write_layer_kinds,
    write_ropes,
)
from jax_agent_rl.models.tensors import Packed

_DEFAULTS = Defaults(
    eos_token_ids=(1,),
    bos_token_id=2,
    num_kv_heads=4,
    head_dim=256,
    max_positions=131072,
    tied=True,
)
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
"""Beginnings of the names of tensors that the text model of a ``gemma4`` has no use for."""
_MULTIMODAL = (
    "vision_config",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "image_token_id",
    "video_token_id",
    "audio_token_id",
    "vision_soft_tokens_per_image",
)
"""Fields of a ``gemma4`` file that its text model does not have."""


def text_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``config.json`` of the text model of a ``gemma4``; any other file as it is."""
    if raw["model_type"] != "gemma4":
        return raw
    return flat_fields(raw, "gemma4_text", left_out=_MULTIMODAL)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, attention_bias=False, hidden_activation="gelu_pytorch_tanh")
    # "vision" concerns images only.
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise bad_field(raw, "use_bidirectional_attention", "null or 'vision'")

    common = read_common(raw, _DEFAULTS)
    count = common["num_layers"]
    windowed = read_layer_kinds(raw, count, default=all_but_every(6, count))
    windowed = (*windowed[:-1], False)  # as in transformers, whatever the file says
    softcap = None
    if raw.get("final_logit_softcapping") is not None:
        softcap = number(raw, "final_logit_softcapping")
    shared = _read_shared(raw, windowed)
    experts = _read_experts(raw)
    if experts is not None and shared > 0:
        refuse(raw, use_double_wide_mlp=False)
    return DecoderConfig(
        **common,
        rope=_read_rope(raw, FULL_ATTENTION, Rope(theta=1e6, scaling=_PROPORTIONAL)),
        local_rope=_read_rope(raw, SLIDING_ATTENTION, Rope(theta=1e4)),
        qk_norm=True,
        v_norm=True,
        float32_norms=True,
        norms="around",
        layer_scale=True,
        activation="gelu_tanh",
        embed_scale=common["hidden_size"] ** 0.5,
        attention_scale=1.0,
        logit_softcap=softcap,
        sliding_window=integer(raw, "sliding_window", 512),
        windowed_layers=windowed,
        global_attention=_read_global_attention(raw, common, windowed),
        per_layer_inputs=_read_per_layer_inputs(raw, common),
        shared_kv_layers=shared,
        # Without shared layers there are no wide ones.
        wide_shared_layers=switch(raw, "use_double_wide_mlp", False) and shared > 0,
        experts=experts,
    )


_PROPORTIONAL = ProportionalScaling(fraction=0.25)


def _read_rope(raw: Fields, kind: str, default: Rope) -> Rope:
    """Read the rotary settings of one kind of layers."""
    sections = raw.section("rope_parameters")
    if not sections:
        return default
    section = sections.section(kind)
    theta = number(section, "rope_theta")
    rope_type = section.get("rope_type")
    if rope_type == "proportional":
        scaling = ProportionalScaling(
            fraction=number(section, "partial_rotary_factor", 1.0),
            factor=number(section, "factor", 1.0),
        )
        return Rope(theta=theta, scaling=scaling)
    if rope_type != "default":
        raise bad_field(section, "rope_type", "'default' or 'proportional'")
    return Rope(theta=theta)


def _read_global_attention(
    raw: Fields, common: Mapping[str, Any], windowed: tuple[bool, ...]
) -> GlobalAttention:
    """Read the heads of full layers, from either of the two forms of the file.

    Published files have ``global_head_dim`` and ``num_global_key_value_heads``, of which the latter
    counts with ``attention_k_eq_v`` only. Newer transformers writes ``per_layer_config`` instead.
    """
    keys_as_values = switch(raw, "attention_k_eq_v", False)
    head_dim = integer(raw, "global_head_dim", 512)
    kv_heads = integer(raw, "num_global_key_value_heads", common["num_kv_heads"])
    if not keys_as_values:
        kv_heads = common["num_kv_heads"]

    if "per_layer_config" in raw:
        heads = []
        overrides = raw.section("per_layer_config")
        for layer, is_windowed in enumerate(windowed):
            layer_heads = _layer_heads(overrides, layer, common)
            if not is_windowed:
                heads.append(layer_heads)
            elif layer_heads != (common["num_kv_heads"], common["head_dim"]):
                raise bad_field(raw, "per_layer_config", "other heads in full layers only")
        if len(set(heads)) > 1:
            raise bad_field(raw, "per_layer_config", "the same heads in all full layers")
        kv_heads, head_dim = heads[0]
    if common["num_heads"] % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={common['num_heads']} is not a multiple of the"
            f" {kv_heads} key/value heads of full layers; correct the file"
        )
    return GlobalAttention(num_kv_heads=kv_heads, head_dim=head_dim, keys_as_values=keys_as_values)


def _layer_heads(overrides: Fields, layer: int, common: Mapping[str, Any]) -> tuple[int, int]:
    """Return number and size of the key/value heads of a layer from ``per_layer_config``."""
    # transformers pads the numbers of layers with zeros: "05".
    for digits in range(1, 5):
        name = f"{layer:0{digits}d}"
        if name in overrides:
            section = overrides.section(name)
            return (
                integer(section, "num_key_value_heads", common["num_kv_heads"]),
                integer(section, "head_dim", common["head_dim"]),
            )
    return common["num_kv_heads"], common["head_dim"]


def _read_per_layer_inputs(raw: Fields, common: Mapping[str, Any]) -> PerLayerInputs | None:
    vocab_size = integer(raw, "vocab_size_per_layer_input", 262144)
    if raw.get("hidden_size_per_layer_input", 256) == 0:
        return None
    return PerLayerInputs(
        vocab_size=vocab_size, size=integer(raw, "hidden_size_per_layer_input", 256)
    )


def _read_shared(raw: Fields, windowed: tuple[bool, ...]) -> int:
    """Read how many of the last layers have no keys and values of their own."""
    if raw.get("num_kv_shared_layers", 0) == 0:
        return 0
    shared = integer(raw, "num_kv_shared_layers")
    # Every kind of layer needs one whose keys and values can be read.
    if shared >= len(windowed) or set(windowed[:-shared]) != set(windowed):
        raise bad_field(raw, "num_kv_shared_layers", "fewer: a layer of each type before these")
    return shared


def _read_experts(raw: Fields) -> Experts | None:
    """Read the experts, which every layer has or none."""
    if not switch(raw, "enable_moe_block", False):
        for name in _EXPERT_FIELDS:
            raw.get(name)  # read only to count as known
        return None
    experts = Experts(
        count=integer(raw, "num_experts"),
        per_token=integer(raw, "top_k_experts"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalize=True,
        beside_dense=True,
        router_norm=True,
        weight_factors=True,
    )
    if experts.per_token > experts.count:
        raise bad_field(raw, "top_k_experts", f"at most num_experts={experts.count}")
    return experts


_EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    heads = config.global_attention
    assert heads is not None and config.local_rope is not None
    raw = write_common(config, "Gemma4ForCausalLM") | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "enable_moe_block": config.experts is not None,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_kinds(config),
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": heads.num_kv_heads,
        "attention_k_eq_v": heads.keys_as_values,
        "num_kv_shared_layers": config.shared_kv_layers,
        "use_double_wide_mlp": config.wide_shared_layers,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": write_ropes(config),
    }
    for name in ("rope_scaling", "rope_theta"):
        del raw[name]
    if config.per_layer_inputs is not None:
        raw["vocab_size_per_layer_input"] = config.per_layer_inputs.vocab_size
        raw["hidden_size_per_layer_input"] = config.per_layer_inputs.size

    if config.experts is not None:
        raw["num_experts"] = config.experts.count
        raw["top_k_experts"] = config.experts.per_token
        raw["moe_intermediate_size"] = config.experts.intermediate_size

    if heads.num_kv_heads != config.num_kv_heads and not heads.keys_as_values:
        # Only the newer form has other key/value heads with values of their own.
        override = {"head_dim": heads.head_dim, "num_key_value_heads": heads.num_kv_heads}
        raw["per_layer_config"] = {
            str(layer): override
            for layer in range(config.num_layers)
            if not config.is_windowed(layer)
        }
    return raw


def left_out(config: DecoderConfig) -> tuple[str, ...]:
    """Return beginnings of the names of tensors that are not read.

    They are the towers', and projections of layers that share keys and values, which published
    files may hold although no model reads them.
    """
    names = [f"model.{tower}" for tower in _TOWERS]
    for layer in range(config.num_layers - config.shared_kv_layers, config.num_layers):
        for module in ("k_proj", "v_proj", "k_norm"):
            names.append(f"model.layers.{layer}.self_attn.{module}.")
    return tuple(names)


_GLOBAL = {
    "global_q": "self_attn.q_proj",
    "global_k": "self_attn.k_proj",
    "global_v": "self_attn.v_proj",
    "global_o": "self_attn.o_proj",
    "global_q_norm": "self_attn.q_norm",
    "global_k_norm": "self_attn.k_norm",
}
"""Modules of full layers by parameter."""

FAMILY = ModelFamily(
    model_types=("gemma4_text", "gemma4"),
    read=read,
    write=write,
    flatten=text_model,
    left_out=left_out,
    names={
        **_GLOBAL,
        "wide_gate": "mlp.gate_proj",
        "wide_up": "mlp.up_proj",
        "wide_down": "mlp.down_proj",
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
        "router": "router.proj",
        "post_dense_norm": "post_feedforward_layernorm_1",
        "pre_experts_norm": "pre_feedforward_layernorm_2",
        "post_experts_norm": "post_feedforward_layernorm_2",
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_projection": "per_layer_projection",
        "post_per_layer_norm": "post_per_layer_input_norm",
        "layer_scalar": "layer_scalar",
    },
    packed={
        "router_norm": Packed(name="router.scale"),
        "router_factors": Packed(name="router.per_expert_scale"),
        "expert_gate": Packed(name="experts.gate_up_proj", number=0, count=2, axis=1),
        "expert_up": Packed(name="experts.gate_up_proj", number=1, count=2, axis=1),
        "expert_down": Packed(name="experts.down_proj"),
    },
    prefixes={"model.language_model.": "model."},
)
