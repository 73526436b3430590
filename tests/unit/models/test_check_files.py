"""A model folder is complete, or says what is not, without its weights being read."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.hf import check_files
from tests.messages import raises
from tests.tiny_chat import CONFIG
from tests.tiny_run import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def change(model: Path, edit) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors")


def test_a_complete_folder_gives_its_config(model):
    assert check_files(model).num_layers == CONFIG.num_layers


def test_a_missing_tensor_is_named(model):
    change(model, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with raises(ModelError, key="model.layers.0.mlp.up_proj.weight", value="missing"):
        check_files(model)


def test_a_tensor_of_another_shape_is_named(model):
    name = "model.norm.weight"
    change(model, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    with raises(ModelError, key="model.norm.weight", value="shape"):
        check_files(model)


def test_a_tensor_too_many_is_named(model):
    change(
        model, lambda tensors: tensors.update({"extra.weight": tensors["model.norm.weight"].copy()})
    )
    with raises(ModelError, key="1 tensor", value="extra.weight"):
        check_files(model)


def test_a_truncated_file_is_told(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="cannot be read"):
        check_files(model)


def test_an_unknown_family_is_told(model):
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"model_type": "mamba"}))
    with raises(ModelError, value="'mamba'"):
        check_files(model)
