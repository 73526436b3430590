"""``convert``: precision changes, everything else stays, and nothing is overwritten."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.convert import convert
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.messages import raises
from tests.tiny import TINY, tiny_params


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_hf(tmp_path / "source", TINY, tiny_params())
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def test_bfloat16_files_hold_the_rounded_weights_and_are_read_back(source: Path, tmp_path: Path):
    target = convert(source, tmp_path / "target", dtype="bfloat16")
    with safe_open(target / "model.safetensors", framework="numpy") as file:
        assert str(file.get_tensor("model.embed_tokens.weight").dtype) == "bfloat16"
    config, params = load_hf(target)
    assert config == TINY and (target / "tokenizer.json").is_file()
    for got, original in zip(jax.tree.leaves(params), jax.tree.leaves(tiny_params()), strict=True):
        np.testing.assert_array_equal(got, original.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_folder_in_use_and_an_unknown_precision_are_refused(source: Path, tmp_path: Path):
    with raises(ModelError, key=source, fix="a new folder"):
        convert(source, source)
    with raises(ModelError, value="'int3'"):
        convert(source, tmp_path / "new", dtype="int3")  # type: ignore[arg-type]
