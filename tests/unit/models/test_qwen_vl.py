"""config.json of Qwen2.5-VL; its numbers are those published with Qwen2.5-VL-7B-Instruct."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.convert import convert
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.families import read_config, write_config
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.messages import raises
from tests.tiny import tiny_params
from tests.tiny_vision import TINY_VL

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The published config with one field of it, or of a section, set."""
    raw = deepcopy(PUBLISHED)
    *sections, name = path.split(".")
    fields = raw
    for section in sections:
        fields = fields[section]
    fields[name] = value
    return raw


def test_the_published_config_is_read_and_written():
    config = read_config(PUBLISHED)
    assert config.rope.sections == (16, 24, 24)
    assert config.rope.theta == 1e6
    assert config.qkv_bias
    assert config.vision is not None
    assert config.vision.window_patches == 64
    assert config.vision.patch_dim == 1176
    assert config.vision.placeholders == {"image": 151655, "video": 151656}
    shapes = jax.tree.leaves(config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    assert (
        sum(int(np.prod(shape)) for shape in shapes) == 8_292_166_656
    )  # as its model card counts, in BF16
    assert read_config(write_config(config)) == config


def test_what_is_tied_may_stand_in_the_section_of_text_alone():
    nested = write_config(read_config(changed("tie_word_embeddings", True)))
    del nested["tie_word_embeddings"]
    assert read_config(nested).tie_word_embeddings


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("image_token_id", None, "image_token_id=None"),
        ("rope_scaling", None, ("mrope_section", "sum to 64")),
        ("rope_scaling.mrope_section", [16, 24, 16], "sum to 64"),
        ("rope_scaling.type", "yarn", ("type='yarn'", "'mrope'", "'default'")),
        ("use_sliding_window", True, "use_sliding_window=True"),
        ("head_dim", 64, ("head_dim=64", "only 128")),
        ("vision_config", None, "depth"),
        ("vision_config.hidden_act", "quick_gelu", "hidden_act='quick_gelu'"),
        ("vision_config.out_hidden_size", 2048, ("out_hidden_size=2048", "only 3584")),
        ("vision_config.num_heads", 15, ("hidden_size=1280", "num_heads=15")),
        ("vision_config.window_size", 20, ("window_size=20", "28 pixels")),
        ("vision_config.fullatt_block_indexes", [7, 32], "from 0 to 31"),
    ],
)
def test_a_field_this_package_does_not_honour_is_named(field: str, value: object, named):
    with raises(ModelError, value=named):
        read_config(changed(field, value))


def test_a_drawn_model_has_the_tower_of_its_config():
    drawn = nnx.to_pure_dict(nnx.state(Decoder(TINY_VL, rngs=nnx.Rngs(0))))
    assert jax.tree.map(jnp.shape, drawn) == TINY_VL.parameter_shapes()
    params = tiny_params(config=TINY_VL)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(Decoder.from_params(TINY_VL, params))),
        params,
    )


def test_conversion_keeps_the_tower_and_the_processors(tmp_path: Path):
    params = tiny_params(config=TINY_VL)
    save_hf(tmp_path / "source", TINY_VL, params)
    for name in ("preprocessor_config", "video_preprocessor_config"):
        (tmp_path / "source" / f"{name}.json").write_text(json.dumps({"name": name}))
    target = convert(tmp_path / "source", tmp_path / "target")
    config, converted = load_hf(target)
    assert config == TINY_VL
    assert (target / "video_preprocessor_config.json").is_file()
    jax.tree.map(np.testing.assert_array_equal, converted, params)
