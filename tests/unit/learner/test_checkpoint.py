"""Checkpoints: what is saved comes back, only the newest stay, and the wrong ones are refused."""

import time
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer
from tests.messages import raises


def state(value: float, size: int = 3) -> dict:
    return {"params": {"w": jnp.full(size, value)}, "updates": jnp.int32(value)}


@pytest.fixture
def checkpointer(tmp_path: Path):
    opened = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def test_the_newest_state_and_progress_come_back(checkpointer: Checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, state(step), {"step": step, "nested": {"a": [1, None]}})
    checkpointer.wait()
    step, restored, progress = checkpointer.restore(state(0))
    assert step == 3
    assert progress == {"step": 3, "nested": {"a": [1, None]}}
    np.testing.assert_array_equal(restored["params"]["w"], [3.0] * 3)


def test_who_only_reads_leaves_the_checkpoint_that_another_process_writes(
    checkpointer: Checkpointer, tmp_path: Path
):
    checkpointer.save(1, state(1), {})
    checkpointer.wait()
    folder = tmp_path / "checkpoints"
    unfinished = folder / f"2{ocp.utils.TMP_DIR_SUFFIX}1"
    unfinished.mkdir()

    with closing(Checkpointer(folder, keep=2, read_only=True)) as reader:
        step, restored, _ = reader.restore(state(0))
    assert step == 1 and restored["updates"] == 1
    assert unfinished.is_dir()

    with closing(Checkpointer(folder, keep=2)):
        deadline = time.monotonic() + 20
        while unfinished.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # Orbax removes it in the background
        assert not unfinished.exists(), "a run that goes on removes what was abandoned"


def test_who_only_reads_makes_no_folder(tmp_path: Path):
    with closing(Checkpointer(tmp_path / "none", keep=2, read_only=True)) as reader:
        assert reader.steps == []
    assert not (tmp_path / "none").exists()


def test_only_the_newest_are_kept(checkpointer: Checkpointer, tmp_path: Path):
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state(step), {})
    checkpointer.wait()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == [
        "3",
        "4",
    ]


def test_a_state_that_is_saved_twice_is_written_once(checkpointer: Checkpointer):
    checkpointer.save(1, state(1), {"first": True})
    checkpointer.save(1, state(1), {"first": False})
    checkpointer.wait()
    assert checkpointer.restore(state(0))[2] == {"first": True}


def test_another_state_of_the_same_step_takes_its_place(checkpointer: Checkpointer):
    checkpointer.save(1, state(1), {"first": True})
    checkpointer.save(1, state(2), {"first": False})
    checkpointer.wait()
    assert checkpointer.restore(state(0))[2] == {"first": False}


def test_an_empty_folder_says_so(checkpointer: Checkpointer):
    with pytest.raises(CheckpointError, match="without --resume"):
        checkpointer.restore(state(0))


def test_a_checkpoint_of_another_model_is_refused(checkpointer: Checkpointer):
    checkpointer.save(1, state(1), {})
    checkpointer.wait()
    with raises(CheckpointError, key="params.other"):
        checkpointer.restore({"params": {"other": jnp.zeros(3)}, "updates": jnp.int32(0)})
