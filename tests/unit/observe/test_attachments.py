"""Images and videos of records: what is stored is read again to the pixel, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jax_agent_rl.errors import DataError
from jax_agent_rl.evaluate.rescore import recorded_prompts
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.report.command import read_run
from jax_agent_rl.observe.run_dir import (
    RunDir,
    read_trajectories,
    restore_trajectory,
    shows_media,
)
from jax_agent_rl.observe.schema import is_trajectory_record
from jax_agent_rl.types import Turn
from tests.trajectories import call, trajectory


def pixels(seed: int, *, frames: int = 0) -> np.ndarray:
    """Random uint8 [5, 4, 3], or [frames, 5, 4, 3]."""
    shape = (frames, 5, 4, 3) if frames else (5, 4, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


SEEDS = st.lists(st.integers(0, 5), max_size=4)


@given(images=SEEDS, videos=SEEDS)
def test_what_is_stored_is_read_again_to_the_pixel(tmp_path_factory, images, videos):
    attachments = Attachments(tmp_path_factory.mktemp("run") / "attachments")
    media = {
        "image": [Image.fromarray(pixels(seed)) for seed in images],
        "video": [pixels(seed, frames=2) for seed in videos],
    }
    references = json.loads(json.dumps(attachments.add(media)))
    restored = attachments.read(references)

    assert [np.asarray(image).tolist() for image in restored["image"]] == [
        pixels(seed).tolist() for seed in images
    ]
    assert [video.tolist() for video in restored["video"]] == [
        pixels(seed, frames=2).tolist() for seed in videos
    ]


def test_equal_images_are_one_file(tmp_path: Path):
    attachments = Attachments(tmp_path)
    first = attachments.add({"image": [pixels(1), pixels(2)]})
    again = attachments.add({"image": [Image.fromarray(pixels(1))]})
    assert again["image"] == first["image"][:1]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_with_another_content_is_refused(tmp_path: Path):
    attachments = Attachments(tmp_path)
    references = attachments.add({"image": [pixels(1)]})
    (file,) = tmp_path.iterdir()
    Image.fromarray(pixels(2)).save(file)
    with pytest.raises(DataError, match=file.name):
        attachments.read(references)
    file.unlink()
    with pytest.raises(DataError, match=file.name):
        attachments.read(references)


def test_a_run_folder_holds_what_prompts_turns_and_tools_show(tmp_path: Path):
    told = trajectory([1], [5, 2, 6], mask=[1, 1, 0])
    (turn,) = told.turns
    shown: Turn = replace(turn, appended_media={"image": (pixels(1),)})
    recorded = replace(told, turns=(shown,), prompt_media={"video": (pixels(2, frames=3),)})
    folder = RunDir(tmp_path)
    folder.add_trajectories(1, "train", [recorded])

    (record,) = read_trajectories(folder.trajectories)
    restored = restore_trajectory(record, attachments=folder.attachments)
    assert np.array_equal(restored.prompt_media["video"][0], pixels(2, frames=3))
    assert np.array_equal(restored.turns[0].appended_media["image"][0], pixels(1))
    assert not restore_trajectory(record).prompt_media, "who shows text needs no files"


def test_what_was_stored_ahead_is_all_that_a_record_names(tmp_path: Path):
    told = trajectory([1], [5, 2, 6], mask=[1, 1, 0], calls=[[call()]])
    (turn,) = told.turns
    (answer,) = turn.tool_calls
    answered = replace(answer, media={"image": (pixels(1),)})
    shown = replace(turn, tool_calls=(answered,), appended_media=answered.media)
    recorded = replace(told, turns=(shown,), prompt_media={"image": (pixels(2),)})
    assert shows_media(recorded) and not shows_media(told)
    folder = RunDir(tmp_path)
    folder.store_attachments(1, [recorded])
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "attachments").iterdir()}
    assert len(files) == 2

    folder.add_trajectories(1, "train", [recorded])
    again = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "attachments").iterdir()}
    assert again == files


def test_rewards_are_computed_again_with_the_images(tmp_path: Path):
    told = trajectory([1], [5, 2, 6], mask=[1, 1, 0])
    folder = RunDir(tmp_path)
    folder.add_trajectories(1, "train", [replace(told, prompt_media={"image": (pixels(3),)})])
    (prompt,) = recorded_prompts(read_run(tmp_path))
    (restored,) = prompt.trajectories
    assert np.array_equal(restored.prompt_media["image"][0], pixels(3))


@pytest.mark.parametrize(
    "shown",
    [5, {"image": ["../../etc/passwd"]}, {"image": ["a" * 33]}, {"video": [[]]}, {"sound": [1]}],
)
def test_a_record_that_names_anything_else_is_no_record(tmp_path: Path, shown: object):
    folder = RunDir(tmp_path)
    folder.add_trajectories(1, "train", [trajectory([1], [5, 2, 6], mask=[1, 1, 0])])
    (record,) = read_trajectories(folder.trajectories)
    assert is_trajectory_record(record)
    assert not is_trajectory_record(record | {"prompt_media": shown})
