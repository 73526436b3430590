"""How images become patches, and how many. Frames are checked against transformers' own video
processor where it can be imported (it needs torchvision): ``tests/gpu_backend/test_frames.py``.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.image_processor import ImageProcessor

PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def folder_of(path: Path, *, images: dict | None = None, **files: dict) -> Path:
    defaults = {
        "image_processor_type": "Qwen2VLImageProcessor",
        **PATCHES,
        "min_pixels": 3136,
        "max_pixels": 12544,
    }
    for name, content in {"preprocessor_config": images or defaults, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def picture(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


def noise(seed: int, width: int = 84, height: int = 56) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


@pytest.fixture
def patcher(tmp_path: Path) -> ImageProcessor:
    return ImageProcessor.read(folder_of(tmp_path))


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
def test_an_image_takes_an_id_for_every_square(patcher: ImageProcessor, size, count: int):
    assert patcher.count("image", picture(*size)) == count
    assert len(patcher.process("image", picture(*size)).patches) == 4 * count


@pytest.mark.parametrize(("frames", "groups"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_two_frames_share_their_ids(patcher: ImageProcessor, frames: int, groups: int):
    video = [picture(84, 56)] * frames
    assert patcher.count("video", video) == groups * patcher.count("video", video[:1])
    processed = patcher.process("video", video)
    assert processed.grid[0] == groups
    assert len(processed.patches) == np.prod(processed.grid) == 4 * patcher.count("video", video)


def test_a_group_holds_its_frames_and_the_last_one_fills_it(tmp_path: Path):
    patcher = ImageProcessor.read(folder_of(tmp_path), pixels=(3136, 12544))
    frames = [noise(seed) for seed in range(3)]
    stills = [patcher.process("image", frame).patches.reshape(24, 3, 2, 196) for frame in frames]
    processed = patcher.process("video", frames)
    assert processed.grid == (2, 4, 6)
    groups = processed.patches.reshape(2, 24, 3, 2, 196)
    for group, place, still in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        np.testing.assert_array_equal(groups[group, :, :, place], stills[still][:, :, place])


@pytest.mark.parametrize("size", [(80, 3), (60, 1), (3, 80), (2, 2)])
def test_the_flattest_images_are_cut_into_as_many_patches_as_are_counted(
    patcher: ImageProcessor, size
):
    for kind, item in (("image", picture(*size)), ("video", [picture(*size)])):
        processed = patcher.process(kind, item)
        assert len(processed.patches) == 4 * patcher.count(kind, item)
        assert (processed.grid[1] < processed.grid[2]) == (size[1] < size[0])


def test_only_equal_images_share_a_digest(patcher: ImageProcessor):
    digest = patcher.process("image", noise(0)).digest
    same = patcher.process("image", noise(0)).digest
    other_digest = patcher.process("image", noise(1)).digest
    still = patcher.process("video", [noise(0)]).digest
    assert digest == same and len({digest, other_digest, still}) == 3


def test_frames_have_settings_of_their_own(tmp_path: Path):
    frames = {**PATCHES, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}}
    nested = folder_of(tmp_path, processor_config={"video_processor": frames})
    assert ImageProcessor.read(nested).count("video", [picture(112, 112)]) == 1
    with_video_settings = folder_of(tmp_path, processor_config={}, video_preprocessor_config=frames)
    assert ImageProcessor.read(with_video_settings).count("video", [picture(112, 112)]) == 1
    assert ImageProcessor.read(with_video_settings).count("image", picture(112, 112)) == 16


def test_pixels_go_before_the_files(tmp_path: Path):
    patcher = ImageProcessor.read(folder_of(tmp_path), pixels=(28 * 28, 56 * 56))
    assert (
        patcher.count("image", picture(500, 500))
        == patcher.count("video", [picture(500, 500)])
        == 4
    )


def test_a_missing_processor_is_a_model_error(tmp_path: Path):
    with pytest.raises(ModelError, match="image processor at"):
        ImageProcessor.read(tmp_path)
