"""The patches of frames against transformers' own video processor."""

from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.models.image_processor import ImageProcessor
from tests.gpu_backend.vision import picture, write_processors

pytest.importorskip(
    "torchvision", reason="transformers' video processor needs torchvision (third_party/vllm.md)"
)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_frames_are_cut_as_transformers_cuts_them(tmp_path: Path, count: int):
    from transformers import AutoVideoProcessor

    write_processors(tmp_path)
    frames = [
        picture(seed, 84, 56) for seed in range(count)
    ]  # of a size that is kept: resizing differs by a rounding
    cut = AutoVideoProcessor.from_pretrained(tmp_path)(
        videos=[np.stack([np.asarray(frame) for frame in frames])],
        do_sample_frames=False,
        return_tensors="np",
    )
    ours = ImageProcessor.read(tmp_path).process("video", frames)
    assert list(ours.grid) == cut["video_grid_thw"][0].tolist()
    np.testing.assert_allclose(ours.patches, cut["pixel_values_videos"], atol=1e-6)
