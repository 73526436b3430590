"""Which run folder a run gets, and whether it goes on from a checkpoint, with checkpoints elsewhere
than in there.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jax_agent_rl.config import Config, load
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer, cut_off_steps
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.runtime.resume import choose_run, nothing_to_do, runs_without_checkpoint
from jax_agent_rl.utils.files import mark_in_use
from tests.messages import raises
from tests.tiny_run import tiny_recipe


def configured(folder: Path, **trainer: Any) -> Config:
    return load(tiny_recipe(folder / "recipe", trainer=trainer), [f"run_dir={folder / 'run'}"])


def saved(folder: Path, *steps: int) -> Path:
    checkpointer = Checkpointer(folder, keep=5)
    for step in steps:
        checkpointer.save(step, {"x": jnp.ones(3)}, {})
        checkpointer.wait()
    checkpointer.close()
    return folder


def test_an_empty_folder_of_checkpoints_is_a_new_run(
    tmp_path: Path,
):
    config = configured(tmp_path, checkpoint_dir=str(tmp_path / "bucket"))
    assert choose_run(config, False) == choose_run(config, "if_any") == (tmp_path / "run", False)
    with raises(
        CheckpointError,
        key="--resume",
        value="bucket",
        fix="without --resume",
    ):
        choose_run(config, True)


def test_checkpoints_of_another_run_are_not_written_over(tmp_path: Path):
    config = configured(tmp_path, checkpoint_dir=str(saved(tmp_path / "bucket", 3, 5)))
    with raises(
        CheckpointError,
        value="[3, 5]",
        fix=("--resume", "choose another"),
    ):
        choose_run(config, False)
    assert choose_run(config, True) == choose_run(config, "if_any") == (tmp_path / "run", True)


def test_a_checkpoint_whose_writing_was_cut_off_does_not_count(tmp_path: Path):
    bucket = saved(tmp_path / "bucket", 3)
    (bucket / "5.orbax-checkpoint-tmp").mkdir()
    assert complete_steps(bucket) == [3]
    assert cut_off_steps(bucket) == [5]
    (tmp_path / "other" / "4.orbax-checkpoint-tmp-7").mkdir(parents=True)
    config = configured(tmp_path, checkpoint_dir=str(tmp_path / "other"))
    with raises(
        CheckpointError,
        value=("step 4", "cut off"),
        fix="without --resume",
    ):
        choose_run(config, True)


def test_resuming_takes_the_run_folder_that_wrote_there(tmp_path: Path):
    bucket = str(saved(tmp_path / "bucket", 3))
    for name, folder in (("run", "/elsewhere"), ("run-2", bucket)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"trainer": {"checkpoint_dir": folder}})
        )
    config = configured(tmp_path, checkpoint_dir=bucket)
    assert choose_run(config, True) == (tmp_path / "run-2", True)


def test_without_such_a_folder_auto_resume_begins_where_resume_fails(tmp_path: Path):
    config = configured(tmp_path)
    assert choose_run(config, "if_any") == (tmp_path / "run", False)
    with pytest.raises(CheckpointError, match="no run with"):
        choose_run(config, True)
    saved(tmp_path / "run" / "checkpoints", 2)
    assert choose_run(config, "if_any") == (tmp_path / "run", True)


def killed(folder: Path, *, checkpoint_dir: str | None = None) -> Path:
    """What a run leaves that was killed before its first checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"trainer": {"checkpoint_dir": checkpoint_dir}}))
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    return folder


def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_folder(tmp_path: Path):
    run = killed(tmp_path / "run")
    config = configured(tmp_path)
    assert choose_run(config, "if_any") == (run, False)
    assert choose_run(config, False) == (tmp_path / "run-2", False), "nobody asked to continue"
    bucket = str(tmp_path / "bucket")
    config = configured(tmp_path, checkpoint_dir=bucket)
    assert choose_run(config, "if_any") == (
        tmp_path / "run-2",
        False,
    ), "a run with its checkpoints elsewhere is another"
    assert (
        choose_run(configured(tmp_path, checkpoint_dir=bucket), "if_any")[0] == tmp_path / "run-2"
    )
    second_run = killed(tmp_path / "run-2", checkpoint_dir=bucket)
    assert choose_run(config, "if_any") == (second_run, False)


def test_what_was_not_killed_is_not_begun_again(tmp_path: Path):
    config = configured(tmp_path)
    (killed(tmp_path / "run") / "summary.json").write_text("{}")
    assert choose_run(config, "if_any") == (tmp_path / "run-2", False), "it has ended"
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "notes.txt").write_text("mine")
    assert choose_run(config, "if_any") == (tmp_path / "run-3", False), "it is no run"
    running = killed(tmp_path / "run-3")
    with mark_in_use(running):
        assert choose_run(config, "if_any") == (
            tmp_path / "run-4",
            False,
        ), "a living process writes there"
    assert choose_run(config, "if_any") == (running, False)


def test_a_run_with_a_checkpoint_comes_before_one_without(tmp_path: Path):
    without = killed(tmp_path / "run")
    saved(tmp_path / "run-2" / "checkpoints", 4)
    config = configured(tmp_path)
    for resume in (True, "if_any"):
        assert choose_run(config, resume) == (tmp_path / "run-2", True)
    assert runs_without_checkpoint(config) == [without]


@pytest.mark.parametrize(
    ("summary", "steps", "asked", "is_done"),
    [
        ({"steps": 8}, 8, {}, True),
        ({"steps": 8}, 9, {}, False),
        ({}, 8, {}, False),  # killed before its summary: it has that to write
        ({"steps": 4}, 8, {}, False),  # a summary of before it went on
        ({}, 7, {}, True),  # below the checkpoint
        ({"steps": 8}, 8, {"from_step": 8}, True),
        ({"steps": 8}, 8, {"from_step": 4}, False),
        ({"steps": 8}, 3, {"from_step": 4}, True),
        ({"steps": 8, "heldout_accuracy_after": 0.9}, 20, {"target_accuracy": 0.8}, True),
        ({"steps": 8, "heldout_accuracy_after": 0.9}, 20, {"target_accuracy": 0.95}, False),
        ({"steps": 8, "heldout_accuracy_after": None}, 20, {"target_accuracy": 0.8}, False),
    ],
)
def test_a_run_that_is_asked_to_resume_has_nothing_to_do_if_it_has_ended(
    tmp_path: Path, summary: dict, steps: int, asked: dict, is_done: bool
):
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    finished = nothing_to_do(tmp_path, [4, 8], steps, advice="set trainer.steps", **asked)
    assert (finished is not None) == is_done
    if finished is not None:
        assert finished.summary == summary
        assert "nothing to do" in finished.message
        assert (
            "trainer.target_accuracy" if "target_accuracy" in asked else "trainer.steps"
        ) in finished.message


def test_a_run_without_a_checkpoint_has_everything_to_do(tmp_path: Path):
    assert nothing_to_do(tmp_path, [], 8, advice="") is None
