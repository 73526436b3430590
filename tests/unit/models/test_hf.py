"""Damaged model folders are one ModelError that says what is wrong and what to do."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.models.families import read_config, write_config
from jax_agent_rl.models.hf import (
    check_files,
    hf_tensors,
    load_config,
    load_hf,
    load_params,
    save_hf,
    tensor_names,
)
from tests.messages import raises
from tests.tiny import TINY, full_logits, tiny_params


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", TINY, tiny_params())
    return tmp_path / "model"


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
    ("fields", "named"),
    [
        (
            {"num_attention_heads": ...},
            {"key": "num_attention_heads", "value": "missing", "fix": "a positive integer"},
        ),
        ({"vocab_size": None}, {"value": "vocab_size=None"}),
        ({"hidden_size": "32"}, {"value": "hidden_size='32'"}),
        ({"num_hidden_layers": 0}, {"value": "num_hidden_layers=0"}),
        ({"intermediate_size": True}, {"value": "intermediate_size=True"}),
        (
            {"num_key_value_heads": 3},
            {"key": ("num_attention_heads", "num_key_value_heads"), "value": (4, 3)},
        ),
        ({"rms_norm_eps": "small"}, {"value": "rms_norm_eps='small'"}),
        ({"eos_token_id": [2, None]}, {"value": "eos_token_id=[2, None]"}),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            {"value": "low_freq_factor is missing"},
        ),
        ({"rope_scaling": "linear"}, {"value": "rope_scaling='linear'"}),
        ({"rope_scaling": {"type": "longrope"}}, {"key": "rope_scaling", "value": "'longrope'"}),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, {"value": "factor=-1"}),
        ({"rope_parameters": 10000}, {"value": "rope_parameters=10000"}),
        ({"hidden_act": "gelu"}, {"value": "hidden_act='gelu'"}),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named_with_its_value(
    folder: Path, fields: dict, named: dict
):
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", **fields)
    with raises(ModelError, **named) as caught:
        load_config(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{oops", b"[1]", b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_object_is_named(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}.*download"):
        load_config(folder)


def test_a_family_that_is_not_known_is_named_with_how_to_add_one():
    with raises(ModelError, key="model_type", value="seed_oss", fix="docs/write/model.md"):
        read_config({"model_type": "seed_oss"})


def test_a_parameter_without_a_published_name_is_named_with_where_to_add_it():
    config = replace(TINY, attention_sinks=True)  # of which Llama has none
    with raises(ValueError, key="sinks", value="llama", fix="models.hf.LAYER"):
        tensor_names(config)


def test_a_null_eos_is_no_eos(folder: Path):
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)
    config = load_config(folder)
    assert config.eos_token_ids == ()
    assert write_config(config)["eos_token_id"] is None
    assert read_config(write_config(config)) == config


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
    with raises(ModelError, key="model.safetensors"):
        load_hf(folder)
    file.unlink()
    with raises(ModelError, value="holds no model.safetensors"):
        load_hf(folder)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (None, {"key": "'model.layers.1.mlp.up_proj.weight'", "value": "missing"}),
        (
            np.zeros((3, 4), np.float32),
            {"key": "up_proj.weight", "value": ("(3, 4)", "(48, 32)")},
        ),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    folder: Path, tensor: object, named: dict
):
    file = folder / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)
    with raises(ModelError, **named):
        load_hf(folder)


def test_a_tensor_of_a_type_that_is_not_read_is_named(folder: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    name = "model.norm.weight"
    save_file(load_file(file) | {name: torch.ones(32).to(torch.float8_e4m3fn)}, file)
    with raises(ModelError, key="'model.norm.weight'"):
        load_hf(folder)


def in_shards(folder: Path) -> None:
    """Splits the weights of a folder into two shards with an index."""
    single_file = folder / "model.safetensors"
    tensors = load_file(single_file)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    single_file.unlink()


def test_an_export_over_shards_of_another_model_is_refused_and_leaves_them(folder: Path):
    in_shards(folder)
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    with raises(ModelError, value="model-00001-of-00002", fix="a new folder"):
        save_hf(folder, TINY, tiny_params(1))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents


def test_an_export_over_an_older_one_replaces_all_of_it(folder: Path):
    (folder / "chat_template.jinja").write_text("old")
    save_hf(folder, TINY, tiny_params(1))
    assert not (folder / "chat_template.jinja").exists()
    np.testing.assert_array_equal(load_hf(folder)[1]["embed"], tiny_params(1)["embed"])


def test_an_export_that_fails_changes_nothing(folder: Path):
    wrong = tiny_params(1)
    wrong["layers"]["up"] = wrong["layers"]["up"].at[2, 0, 0].set(np.nan)
    with raises(ModelError, key="model.layers.2.mlp.up_proj.weight", value=1):
        save_hf(folder, TINY, wrong)
    with pytest.raises(ModelError):
        save_hf(folder.parent / "new", TINY, wrong)
    np.testing.assert_array_equal(load_hf(folder)[1]["embed"], tiny_params()["embed"])
    assert [path for path in folder.parent.iterdir() if path != folder] == []


def test_a_weight_that_float16_cannot_hold_is_named_with_its_tensor(folder: Path, tmp_path: Path):
    params = tiny_params()
    params["final_norm"] = params["final_norm"].at[0].set(1e5)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    with raises(ModelError, key="'model.norm.weight'", value=("float16", 65504)):
        save_hf(tmp_path / "half", TINY, half)
    save_hf(tmp_path / "wide", TINY, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    with raises(WeightUpdateError, value=(100000, "float16")):
        dict(hf_tensors(TINY, params, dtype="float16"))


def test_weights_in_two_forms_are_refused(folder: Path):
    content = (folder / "model.safetensors").read_bytes()
    in_shards(folder)
    load_hf(folder)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="different models"):
        load_hf(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path):
    in_shards(folder)
    shards = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file(load_file(shards[0]) | load_file(shards[1]), shards[0], metadata={"format": "pt"})
    with pytest.raises(ModelError, match="another file"):
        load_hf(folder)


def with_head(folder: Path, head: np.ndarray) -> None:
    """Adds an output matrix to the weights of a folder whose configuration says tied."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})


def test_a_head_of_its_own_is_used_although_the_configuration_says_tied(
    folder: Path, tmp_path: Path, caplog
):
    """transformers, whose logits are the reference, uses it as well."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with_head(folder, np.random.default_rng(3).standard_normal((97, 32)).astype(np.float32))
    config, params = load_hf(folder)
    assert not config.tie_word_embeddings
    assert load_config(folder) == config
    assert check_files(folder) == config
    assert "tie_word_embeddings" in caplog.text
    ids = list(range(3, 20))
    with torch.no_grad():
        expected = (
            transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids]))
            .logits[0]
            .numpy()
        )
    np.testing.assert_allclose(
        full_logits(params, ids, config), expected, atol=2e-4 * np.abs(expected).max()
    )
    save_hf(tmp_path / "exported", config, params)
    np.testing.assert_array_equal(load_hf(tmp_path / "exported")[1]["lm_head"], params["lm_head"])
    assert (
        json.loads((tmp_path / "exported" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )


def test_a_head_that_repeats_the_embeddings_is_tied(folder: Path):
    with_head(folder, load_file(folder / "model.safetensors")["model.embed_tokens.weight"].copy())
    assert load_hf(folder)[0] == TINY


def test_a_head_is_looked_at_again_when_its_file_changes(folder: Path):
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    with_head(folder, embeddings)
    assert load_config(folder).tie_word_embeddings
    status = (folder / "model.safetensors").stat()
    with_head(folder, -embeddings)
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not load_config(folder).tie_word_embeddings


def test_an_update_with_a_head_of_its_own_is_refused_by_a_tied_model(folder: Path):
    with_head(folder, np.ones((97, 32), np.float32))
    with raises(ModelError, key=("lm_head.weight", "embeddings")):
        load_params([folder / "model.safetensors"], TINY)
