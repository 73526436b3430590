"""config.json: fields that are not known are refused by name, and what has no effect is written
again.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.families import FAMILIES, read_config, write_config
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.config_fields import ROPES, variations
from tests.messages import raises

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
}
WITH_TOWER: dict[str, Any] = {
    "rope_scaling": {"mrope_section": [1, 0, 0], "rope_type": "default"},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_local_experts")
LEFT_OUT = {
    "qwen3_moe": ("num_local_experts",),
    "gpt_oss": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe": ("num_local_experts",),
    "glm4_moe": ("num_experts", "num_local_experts"),
    "minimax_m2": ("num_experts", "moe_intermediate_size"),
    "deepseek_v3": ("num_experts", "num_local_experts"),
    "kimi_k2": ("num_experts", "num_local_experts"),
}
TEXT_FAMILIES = sorted(name for name in FAMILIES if not name.endswith("_vl"))


def small(family: str) -> dict[str, Any]:
    """A config.json of a small model of the family."""
    left_out = LEFT_OUT.get(family, MOE)
    fields = {name: value for name, value in SMALL.items() if name not in left_out}
    if family in ("gemma4", "qwen3_5", "qwen3_5_moe"):
        raw = {"model_type": family, "text_config": {"model_type": f"{family}_text"} | fields}
        return raw | WITH_TOWER if family != "gemma4" else raw
    raw = {"model_type": family} | fields
    if family == "glm4_moe":
        raw["n_routed_experts"] = 4
    if family in ("deepseek_v3", "kimi_k2"):
        raw |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        raw["num_key_value_heads"] = raw["num_attention_heads"]
    return raw


def with_rope(raw: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The config.json with rotary settings, where the family has them."""
    if not raw["model_type"].startswith("gemma4"):
        return raw | {"rope_scaling": raw.get("rope_scaling", {}) | rope}
    default = {"rope_type": "default", "rope_theta": 1e4}
    full = rope | {"rope_type": "proportional", "rope_theta": 1e6}
    return raw | {"rope_parameters": {"full_attention": full, "sliding_attention": default}}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_field_that_is_not_known_is_refused_by_name_wherever_it_stands(family: str):
    raw = small(family)
    with pytest.raises(ModelError, match=r"residual_scale=0\.5"):
        read_config(raw | {"residual_scale": 0.5})
    rope = {"rope_type": "linear", "factor": 2.0, "stretch": 3.0}
    with pytest.raises(ModelError, match=r"stretch=3\.0"):
        read_config(with_rope(raw, rope))
    assert read_config(raw | {"residual_scale": None}) == read_config(raw)


@pytest.mark.parametrize("family", sorted(LEFT_OUT))
def test_more_experts_per_token_than_a_layer_has_are_refused(family: str):
    raw = small(family)
    fields = raw.get("text_config", raw)
    assert fields["num_experts_per_tok"] == 2
    read_config(raw)
    fields["num_experts_per_tok"] = 5
    with pytest.raises(ModelError, match="num_experts_per_tok=5"):
        read_config(raw)


@pytest.mark.parametrize("dense_layers", [1, [1], [0, 2], [0, 1, 2]])
def test_dense_layers_are_a_list_of_the_first_ones(dense_layers: Any):
    with pytest.raises(ModelError, match="mlp_only_layers="):
        read_config(small("qwen3_moe") | {"mlp_only_layers": dense_layers})


def test_fields_of_one_scaling_are_refused_with_another():
    rope = {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}
    with pytest.raises(ModelError, match=r"rope_scaling\.low_freq_factor=1\.0"):
        read_config(small("llama") | {"rope_scaling": rope})


def test_two_sections_of_rotary_settings_have_to_agree():
    raw = small("llama")
    linear = {"rope_type": "linear", "factor": 2.0}
    both_sections = raw | {
        "rope_scaling": linear,
        "rope_parameters": linear | {"rope_theta": 10000.0},
    }
    assert read_config(both_sections) == read_config(raw | {"rope_scaling": linear})
    with raises(ModelError, key="rope_parameters", value="differ"):
        read_config(both_sections | {"rope_parameters": linear | {"rope_theta": 500.0}})


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_what_is_read_is_written_and_read_again(family: str):
    read = 0
    for label, raw in variations(small(family) | {"pad_token_id": 5}):
        try:
            config = read_config(raw)
        except ModelError:
            continue
        read += 1
        written = json.loads(json.dumps(write_config(config)))
        assert read_config(written) == config, label
        carried = {
            name: value for name, value in read_config(written).carried.items() if value is not None
        }
        assert carried == {
            name: value for name, value in config.carried.items() if value is not None
        }, label
    assert read > 10


INERT = {
    "pad_token_id": st.integers(0, 96),
    "attention_dropout": st.floats(0, 1),
    "initializer_range": st.floats(0, 1),
    "use_cache": st.booleans(),
    "id2label": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
}


@given(family=st.sampled_from(TEXT_FAMILIES), inert=st.fixed_dictionaries({}, optional=INERT))
def test_what_has_no_effect_is_written_again_and_makes_no_other_model(
    family: str, inert: dict[str, Any]
):
    raw = small(family)
    config = read_config(raw | inert)
    assert config == read_config(raw)
    assert hash(config) == hash(read_config(raw))
    written = write_config(config)
    # A file with a tower has the text model's fields in a section.
    text_fields = written | written.get("text_config", {})
    assert {name: text_fields[name] for name in inert} == inert


def test_bookkeeping_of_the_old_file_is_not_written():
    old = {
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40",
        "_name_or_path": "/x",
        "auto_map": {"a": "b"},
    }
    written = write_config(read_config(small("llama") | old))
    assert not old.keys() & written.keys()


def test_an_export_keeps_the_padding_token(tmp_path: Path):
    from tests.tiny import TINY, tiny_params

    save_hf(tmp_path / "source", TINY, tiny_params())
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 7}))
    save_hf(tmp_path / "exported", *load_hf(tmp_path / "source"))
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["pad_token_id"] == 7


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope.get("rope_type") or rope["type"]))
def test_each_scaling_is_read_or_refused(rope: dict[str, Any]):
    try:
        assert read_config(small("llama") | {"rope_scaling": rope}).rope.scaling is not None
    except ModelError as error:
        assert "longrope" in str(error)
