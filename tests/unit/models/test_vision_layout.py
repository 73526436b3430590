"""Where images stand, and what a tower is told of their shape; the references are transformers' own
functions.
"""

import numpy as np
import pytest

from jax_agent_rl.models.config import VisionConfig
from jax_agent_rl.models.vision_context import (
    ImageSpan,
    feature_index,
    layout,
    locate,
    rope_positions,
)
from tests.messages import raises

IMAGE = 7
VIDEO = 8
VISION = VisionConfig(
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    out_size=8,
    window_size=56,  # two by two features
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=9,
    vision_end_token_id=10,
)
GRIDS = {"image": [(1, 4, 6), (1, 10, 4)], "video": [(2, 4, 8)]}
IDS = [1, 2, *[IMAGE] * 6, 3, *[VIDEO] * 16, 4, 5, *[IMAGE] * 10, 6]


def span(start: int, stop: int, kind: str = "image") -> ImageSpan:
    return ImageSpan(kind=kind, number=0, start=start, stop=stop, grid=(1, 1, stop - start))


def test_items_stand_in_runs_of_their_own_placeholder():
    spans = [(s.kind, s.number, s.start, s.stop, s.grid) for s in locate(VISION, IDS, GRIDS)]
    assert spans == [
        ("image", 0, 2, 8, (1, 2, 3)),
        ("video", 0, 9, 25, (2, 2, 4)),
        ("image", 1, 27, 37, (1, 5, 2)),
    ]


def test_a_sampled_placeholder_is_text():
    ids = [1, IMAGE, 2, *[IMAGE] * 6, 3, IMAGE, IMAGE]
    spans = locate(VISION, ids, {"image": [(1, 4, 6)]})
    assert [(s.start, s.stop) for s in spans] == [(3, 9)]
    assert (rope_positions(VISION, len(ids), spans)[0][[0, 1, 2]] == [[0], [1], [2]]).all()


def test_items_may_stand_side_by_side():
    assert [s.start for s in locate(VISION, [IMAGE] * 8, {"image": [(1, 4, 4), (1, 4, 4)]})] == [
        0,
        4,
    ]


def test_an_item_without_its_placeholders_is_named_with_the_fix():
    with raises(
        ValueError,
        key="image 2 of 2",
        value=("10 placeholders", "id 7"),
        fix=("expand_media", "model.max_pixels"),
    ):
        locate(VISION, IDS[:-4], GRIDS)


def test_rotary_positions_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    config = Qwen2_5_VLConfig(
        vision_config={"depth": 0, "tokens_per_second": 2}, text_config={"num_hidden_layers": 0}
    )
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    expected, offset = model.get_rope_index(
        torch.tensor([IDS]),
        mm_token_type_ids=torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(i, 0) for i in IDS]]),
        image_grid_thw=torch.tensor(GRIDS["image"]),
        video_grid_thw=torch.tensor(GRIDS["video"]),
        second_per_grid_ts=[1.0],
    )
    ours, ours_offset = rope_positions(VISION, len(IDS), locate(VISION, IDS, GRIDS))
    np.testing.assert_array_equal(ours.T, expected[:, 0].numpy())
    assert ours_offset == int(offset[0, 0]) and ours.dtype == np.int32


def test_text_goes_on_after_the_last_group_of_a_long_video():
    ids = [*[VIDEO] * 5, 1, 2]
    positions, offset = rope_positions(VISION, 7, locate(VISION, ids, {"video": [(5, 2, 2)]}))
    # Two positions a second, two frames a second, two frames a group: a group is a second.
    assert positions[:, 0].tolist() == [0, 2, 4, 6, 8, 9, 10]
    assert positions[:, 1].tolist() == [
        0,
        0,
        0,
        0,
        0,
        9,
        10,
    ]
    assert 7 + offset == 11


def test_text_alone_stands_at_its_index():
    positions, offset = rope_positions(VISION, 4, [])
    assert positions.tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert offset == 0


def test_features_take_the_places_of_their_item():
    assert feature_index(7, [span(1, 3), span(4, 6)], [10, 0]).tolist() == [
        -1,
        10,
        11,
        -1,
        0,
        1,
        -1,
    ]


def test_windows_and_frames_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import vision_utils

    grids = [(1, 4, 6), (2, 10, 14), (1, 4, 4)]
    total = sum(t * h * w for t, h, w in grids)
    padded = 336
    tensor = torch.tensor(grids)
    order, windows = vision_utils.get_vision_window_index(
        tensor, 2, VISION.window_size, VISION.patch_size
    )
    positions = (
        vision_utils.get_vision_position_ids(tensor, 2).reshape(-1, 4, 2)[order].reshape(-1, 2)
    )
    ours = layout(VISION, grids, padded)
    np.testing.assert_array_equal(ours.order[: total // 4], order)
    np.testing.assert_array_equal(ours.order[ours.restore], np.arange(padded // 4))
    np.testing.assert_array_equal(ours.coordinates[:total], positions)
    for numbers, edges in (
        (ours.windows, windows),
        (ours.frames, vision_utils.get_vision_cu_seqlens(tensor)),
    ):
        np.testing.assert_array_equal(np.flatnonzero(np.diff(numbers[:total])) + 1, edges[1:-1])
        assert len(set(numbers[:total].tolist())) == len(edges) - 1
        assert (numbers[total:] == -1).all()


@pytest.mark.parametrize("patches", [16, 40])
def test_patches_that_do_not_fit_are_counted(patches: int):
    with raises(ValueError, key="24 patches", value=patches, fix="multiple of 16"):
        layout(VISION, [(1, 4, 6)], patches)
