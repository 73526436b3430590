"""What a model folder is of: by content, wherever it lies and however it is stored."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.identity import WEIGHTS, model_fingerprints
from jax_agent_rl.models.lora import check_base, save_peft
from tests.messages import raises
from tests.tiny import TINY, tiny_params


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", TINY, tiny_params())
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def test_a_model_that_was_moved_or_cut_into_shards_is_the_same(folder: Path):
    fingerprints = model_fingerprints(folder)
    assert fingerprints.keys() == {WEIGHTS, "config.json", "tokenizer.json"}
    moved = folder.rename(folder.parent / "elsewhere")
    assert model_fingerprints(moved) == fingerprints
    tensors = load_file(moved / "model.safetensors")
    weight_map = {}
    for number, name in enumerate(sorted(tensors)):
        file = f"part-{number % 3}.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, moved / file
        )
    (moved / "model.safetensors").unlink()
    (moved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert model_fingerprints(moved) == fingerprints


@pytest.mark.parametrize("number", range(3))
def test_one_number_of_one_tensor_makes_it_another_model(folder: Path, number: int):
    old = model_fingerprints(folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[number * 7]
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] += np.float32(1e-3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    new = model_fingerprints(folder)
    assert {part for part in old if old[part] != new[part]} == {WEIGHTS}


def test_each_part_is_told_apart(folder: Path):
    fingerprints = model_fingerprints(folder)
    (folder / "tokenizer.json").write_text("{ }")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(
        json.dumps(raw | {"_name_or_path": "x", "transformers_version": "9", "dtype": "bfloat16"})
    )
    assert model_fingerprints(folder) == fingerprints | {
        "tokenizer.json": model_fingerprints(folder)["tokenizer.json"]
    }
    file.write_text(json.dumps(raw | {"rms_norm_eps": 1e-4}))
    assert model_fingerprints(folder)["config.json"] != fingerprints["config.json"]


def test_a_model_that_is_served_elsewhere_is_known_by_its_tokenizer(folder: Path):
    fingerprints = model_fingerprints(folder)
    assert model_fingerprints(folder, weights=False) == {
        "tokenizer.json": fingerprints["tokenizer.json"]
    }


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, (8).to_bytes(8, "little") + b'{"a":1}x']
)
def test_damaged_weights_are_named(folder: Path, content: bytes):
    (folder / "model.safetensors").write_bytes(content)
    with raises(ModelError, key="model.safetensors"):
        model_fingerprints(folder)


def test_an_adapter_knows_the_model_it_was_trained_over(folder: Path):
    lora = LoraConfig(rank=2)
    adapter = folder.parent / "adapter"
    trained = new_adapters(lora, TINY)
    save_peft(
        adapter,
        lora,
        TINY,
        trained,
        base=str(folder),
        base_weights=model_fingerprints(folder)[WEIGHTS],
    )
    moved = shutil.copytree(folder, folder.parent / "moved")
    check_base(adapter, str(moved), key="rollout.adapters.x")
    save_hf(folder.parent / "other", TINY, tiny_params(1))
    with raises(ConfigError, key=("rollout.adapters.x", "model.path"), value="another model"):
        check_base(adapter, str(folder.parent / "other"), key="rollout.adapters.x")
    save_peft(folder.parent / "foreign", lora, TINY, trained, base=str(folder))
    check_base(
        folder.parent / "foreign", str(folder.parent / "other"), key="rollout.adapters.x"
    )  # it does not say
