"""Families whose files hold a text model beside a tower read its two levels in the same way."""

from typing import Any

import pytest

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.families.registry import read_config
from tests.messages import raises
from tests.unit.models.test_config_fields import small

FAMILIES = pytest.mark.parametrize("family", ["gemma4", "qwen3_5", "qwen3_5_moe"])


def levels(family: str, *, top: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """A config.json with further fields at the top and in ``text_config``."""
    raw = small(family)
    return raw | {"text_config": raw["text_config"] | text} | top


@FAMILIES
def test_text_config_describes_the_text_model(family: str):
    raw = levels(family, top={"max_position_embeddings": 64}, text={"max_position_embeddings": 128})
    assert read_config(raw).max_position_embeddings == 128
    only_top = levels(family, top={"bos_token_id": 7}, text={})
    assert read_config(only_top).bos_token_id == 7


@FAMILIES
def test_ids_that_end_an_answer_are_those_at_the_top(family: str):
    raw = levels(family, top={"eos_token_id": [1, 6]}, text={"eos_token_id": 3})
    assert read_config(raw).eos_token_ids == (1, 6)
    null = levels(family, top={"eos_token_id": None}, text={"eos_token_id": 3})
    assert read_config(null).eos_token_ids == (3,)


@FAMILIES
@pytest.mark.parametrize("tied", [True, False])
def test_ties_may_stand_at_either_level_and_have_to_agree(family: str, tied: bool):
    ties = {"tie_word_embeddings": tied}
    null = {"tie_word_embeddings": None}
    for top, text in ((ties, ties), (ties, {}), ({}, ties), (ties, null), (null, ties)):
        assert read_config(levels(family, top=top, text=text)).tie_word_embeddings is tied

    other = {"tie_word_embeddings": not tied}
    with raises(
        ModelError,
        value=(f"tie_word_embeddings={tied}", f"text_config.tie_word_embeddings={not tied}"),
        fix="make them equal",
    ):
        read_config(levels(family, top=ties, text=other))


@FAMILIES
def test_a_file_without_its_text_model_is_refused(family: str):
    with raises(ModelError, value=("text_config=None", family), fix="download the model again"):
        read_config(small(family) | {"text_config": None})
