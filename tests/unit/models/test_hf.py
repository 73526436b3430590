"""Damaged model folders are one ModelError that says what is wrong and what to do."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.families import read_config, write_config
from jax_agent_rl.models.hf import load_config, load_hf, save_hf
from tests.tiny import TINY, tiny_params


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(tmp_path, TINY, tiny_params())
    return tmp_path


def change(file: Path, **fields: object) -> None:
    """Sets fields of a JSON file; an ellipsis removes one."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_what_was_saved_is_read_back(folder: Path):
    config, params = load_hf(folder)
    assert config == TINY
    np.testing.assert_array_equal(params["layers"]["q"], tiny_params()["layers"]["q"])


def test_whoever_reads_the_configuration_reads_the_weights(folder: Path):
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": ...}, "num_attention_heads is missing, expected a positive integer"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"intermediate_size": True}, "intermediate_size=True"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"eos_token_id": [2, None]}, r"eos_token_id=\[2, None\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "factor=-1"),
        ({"rope_parameters": 10000}, "rope_parameters=10000"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named_with_its_value(folder: Path, fields: dict, message: str):
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", **fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{oops", b"[1]", b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_object_is_named(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}.*download"):
        load_config(folder)


def test_a_null_eos_is_no_eos(folder: Path):
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)
    config = load_config(folder)
    assert config.eos_token_ids == ()
    assert write_config(config)["eos_token_id"] is None and read_config(write_config(config)) == config


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{oops", "not valid JSON"),
        (b"{}", "'weight_map' must map"),
        (b'{"weight_map": {"a": 1}}', "'weight_map' must map"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors cannot be read"),
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: bytes, message: str):
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match=message):
        load_hf(folder)


def test_weights_that_were_cut_off_or_are_not_there_are_named(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load_hf(folder)
    file.unlink()
    with pytest.raises(ModelError, match="holds no model.safetensors"):
        load_hf(folder)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r"'model.layers.1.mlp.up_proj.weight' is missing"),
        (np.zeros((3, 4), np.float32), r"up_proj.weight has shape \(3, 4\), config.json says \(48, 32\)"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(folder: Path, tensor: object, message: str):
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)
    with pytest.raises(ModelError, match=message):
        load_hf(folder)


def test_a_tensor_of_a_type_that_is_not_read_is_named(folder: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    file, name = folder / "model.safetensors", "model.norm.weight"
    save_file(load_file(file) | {name: torch.ones(32).to(torch.float8_e4m3fn)}, file)
    with pytest.raises(ModelError, match="'model.norm.weight' cannot be read"):
        load_hf(folder)
