"""Ids in which each picture's placeholder stands as often as the model reads it."""

import json
from pathlib import Path

import pytest
from PIL import Image

from jax_agent_rl.chat.special_tokens import MediaTokens
from jax_agent_rl.errors import ModelError, TemplateError
from tests.messages import raises

IMAGE = 7
VIDEO = 8
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
CONFIG = {"model_type": "qwen2_5_vl", "image_token_id": IMAGE, "video_token_id": VIDEO}


def folder_of(path: Path, *, images: dict | None = None, **files: dict) -> Path:
    contents = {
        "image_processor_type": "Qwen2VLImageProcessor",
        **PATCHES,
        "min_pixels": 3136,
        "max_pixels": 12544,
    }
    for name, content in {
        "config": CONFIG,
        "preprocessor_config": images or contents,
        **files,
    }.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def picture(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


@pytest.fixture
def tokens(tmp_path: Path) -> MediaTokens:
    tokens = MediaTokens.read(folder_of(tmp_path))
    assert tokens is not None
    return tokens


def test_every_placeholder_is_written_out_for_its_own_item(tokens: MediaTokens):
    media = {"image": (picture(56, 56), picture(84, 56)), "video": ([picture(56, 56)] * 3,)}
    ids = [1, IMAGE, 2, VIDEO, 3, IMAGE, 4]
    assert tokens.expand(ids, media) == [1, *[IMAGE] * 4, 2, *[VIDEO] * 8, 3, *[IMAGE] * 6, 4]


@pytest.mark.parametrize(
    ("ids", "count", "named"),
    [
        ([IMAGE, IMAGE], 1, {"key": "'image'", "value": ("more", "1 given")}),
        ([IMAGE], 2, {"key": "'image'", "value": ("shows 1", "too few")}),
    ],
)
def test_placeholders_and_items_must_be_the_same_in_number(
    tokens: MediaTokens, ids, count: int, named: dict
):
    with raises(TemplateError, **named):
        tokens.expand(ids, {"image": (picture(56, 56),) * count})


def test_a_picture_the_model_cannot_take_is_named(tokens: MediaTokens):
    with raises(TemplateError, key="image 2 of 2", value="aspect ratio"):
        tokens.expand([IMAGE, IMAGE], {"image": (picture(56, 56), picture(1, 300))})


def test_a_model_of_text_has_none(tmp_path: Path):
    assert MediaTokens.read(folder_of(tmp_path, config={"model_type": "llama"})) is None


def test_a_model_has_images_unless_its_text_model_alone_is_read(tmp_path: Path):
    config = {"model_type": "qwen3_5", "image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens = MediaTokens.read(folder_of(tmp_path, config=config))
    assert tokens is not None
    assert tokens.placeholders == {"image": IMAGE}
    text_only = config | {"language_model_only": True}
    assert MediaTokens.read(folder_of(tmp_path, config=text_only)) is None


def test_a_config_without_placeholders_is_a_model_error(tmp_path: Path):
    with raises(ModelError, key=("config.json", "image_token_id")):
        MediaTokens.read(folder_of(tmp_path, config={"model_type": "qwen2_5_vl"}))
