"""What is read of a model before an engine is made."""

import json
from pathlib import Path

import pytest

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import build
from jax_agent_rl.errors import ModelError
from jax_agent_rl.runtime.engines import read_model
from tests.messages import raises
from tests.tiny_run import tiny_model


@pytest.mark.parametrize(
    ("embeddings", "prompt_ids"), [(2, []), (300, [1, 300])], ids=["its EOS", "a prompt's id"]
)
def test_a_tokenizer_of_another_model_is_refused(
    embeddings: int, prompt_ids: list[int], tmp_path: Path
):
    file = tiny_model(tmp_path) / "config.json"
    codec = ChatCodec.from_pretrained(tmp_path)
    config = build({"run_dir": "none", "model": {"path": str(tmp_path)}, "data": {"train": "none"}})
    assert read_model(config, codec, prompt_ids).vocab_size == 400
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": embeddings}))
    with raises(
        ModelError,
        value=(f"id {embeddings}", f"{embeddings} embeddings"),
        fix="tokenizer",
    ):
        read_model(config, codec, prompt_ids)
