"""How many ids pictures take. The counts are checked against transformers' own processors where vLLM's tests run."""

import json
from pathlib import Path

import pytest
from PIL import Image

from jax_agent_rl.chat.media import MediaTokens
from jax_agent_rl.errors import ModelError, TemplateError

IMAGE, VIDEO = 7, 8
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
CONFIG = {"model_type": "qwen2_5_vl", "image_token_id": IMAGE, "video_token_id": VIDEO}


def folder_of(path: Path, *, images: dict | None = None, **files: dict) -> Path:
    own = {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES, "min_pixels": 3136, "max_pixels": 12544}
    for name, content in {"config": CONFIG, "preprocessor_config": images or own, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def picture(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


@pytest.fixture
def tokens(tmp_path: Path) -> MediaTokens:
    tokens = MediaTokens.read(folder_of(tmp_path))
    assert tokens is not None
    return tokens


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((56, 56), 4),  # two by two squares of 28 pixels
        ((84, 56), 6),
        ((10, 10), 4),  # enlarged to the fewest pixels, 56 x 56
        ((1000, 1000), 16),  # shrunk to the most, 112 x 112
        ((70, 50), 4),  # 70 and 50 round to two squares each, 2.5 to the even one
    ],
)
def test_a_picture_takes_an_id_for_every_square(tokens: MediaTokens, size, count: int):
    assert tokens.count("image", picture(*size)) == count


@pytest.mark.parametrize(("frames", "groups"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_two_frames_share_their_ids(tokens: MediaTokens, frames: int, groups: int):
    assert tokens.count("video", [picture(84, 56)] * frames) == groups * 6


def test_every_placeholder_is_written_out_for_its_own_item(tokens: MediaTokens):
    media = {"image": (picture(56, 56), picture(84, 56)), "video": ([picture(56, 56)] * 3,)}
    ids = [1, IMAGE, 2, VIDEO, 3, IMAGE, 4]
    assert tokens.expand(ids, media) == [1, *[IMAGE] * 4, 2, *[VIDEO] * 8, 3, *[IMAGE] * 6, 4]


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [([IMAGE, IMAGE], 1, "more of kind 'image' than the 1 given"), ([IMAGE], 2, "shows 1 of kind 'image' too few")],
)
def test_placeholders_and_items_must_be_the_same_in_number(tokens: MediaTokens, ids, count: int, message: str):
    with pytest.raises(TemplateError, match=message):
        tokens.expand(ids, {"image": (picture(56, 56),) * count})


def test_a_picture_the_model_cannot_take_is_named(tokens: MediaTokens):
    with pytest.raises(TemplateError, match="image 2 of 2 cannot be shown: .*aspect ratio"):
        tokens.expand([IMAGE, IMAGE], {"image": (picture(56, 56), picture(1, 300))})


def test_frames_have_settings_of_their_own(tmp_path: Path):
    frames = {**PATCHES, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}}
    nested = folder_of(tmp_path, processor_config={"video_processor": frames})
    assert MediaTokens.read(nested).count("video", [picture(112, 112)]) == 1
    beside = folder_of(tmp_path, processor_config={}, video_preprocessor_config=frames)
    assert MediaTokens.read(beside).count("video", [picture(112, 112)]) == 1
    assert MediaTokens.read(beside).count("image", picture(112, 112)) == 16


def test_pixels_go_before_the_files(tmp_path: Path):
    tokens = MediaTokens.read(folder_of(tmp_path), pixels=(28 * 28, 56 * 56))
    assert tokens.count("image", picture(500, 500)) == tokens.count("video", [picture(500, 500)]) == 4


def test_a_model_of_text_has_none(tmp_path: Path):
    assert MediaTokens.read(folder_of(tmp_path, config={"model_type": "llama"})) is None


def test_a_missing_processor_is_a_model_error(tmp_path: Path):
    folder_of(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="image processor at"):
        MediaTokens.read(tmp_path)
