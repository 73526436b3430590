"""A trainer with a curriculum: pools fill from its groups, in every mode, and survive a restart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Trajectory
from tests.fake_training import ROW, Notes, Versions, finish, make_trainer, steps_of

ROWS = []
for number in range(4):
    ROWS.append(ROW | {"extra_info": {"number": number}})
UNSOLVED = 3
CURRICULUM = {"enabled": True, "window": 1, "easy_fraction": 0.0, "hard_fraction": 1.0}


async def solved(original: Trajectory) -> Trajectory:
    extra_info = original.row.get("extra_info", {})  # the held-out row has none
    return replace(original, reward=float(extra_info.get("number") != UNSOLVED))


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
async def test_rows_that_are_always_solved_are_no_longer_drawn(tmp_path: Path, mode: str):
    training = make_trainer(
        tmp_path,
        steps=12,
        score=solved,
        rows=ROWS,
        curriculum=CURRICULUM,
        algorithm={"filter_zero_variance": False},
        trainer={"mode": mode},
        learner=Versions(),
    )
    await finish(training)
    lines = steps_of(tmp_path)
    drawn = [sum(line[f"curriculum/drawn_{pool}"] for line in lines) for pool in ("new", "hard")]
    assert drawn[0] >= 4
    assert drawn[1] > 0
    assert sum(drawn) == 12  # one group a step: no easy row
    assert lines[-1]["curriculum/easy"] == 3
    assert lines[-1]["curriculum/hard"] == 1
    assert lines[-1]["score_mean"] == 0.0  # the row that is left
    assert all("curriculum/easy" not in line for line in evaluations(tmp_path))


def evaluations(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] != "step"]


async def test_a_resumed_run_draws_the_rows_that_an_uninterrupted_one_draws(tmp_path: Path):
    def trainer(name: str, steps: int, **options):
        return make_trainer(
            tmp_path / name,
            steps=steps,
            score=solved,
            rows=ROWS,
            curriculum=CURRICULUM | {"easy_fraction": 0.4},
            algorithm={"filter_zero_variance": False},
            learner=Versions(),
            **options,
        )

    whole = trainer("whole", 10)
    await finish(whole)
    notes = Notes()
    await finish(trainer("first", 4, checkpointer=notes))
    record = RunRecord.from_json(json.loads(json.dumps(notes.saved[4])))
    second = trainer("second", 10, record=record, version=4)
    await finish(second)

    def rows_of(training) -> list[int]:
        groups = [group for step in training.runtime.learner.steps for group in step]
        return [group.trajectories[0].row["extra_info"]["number"] for group in groups]

    assert rows_of(second) == rows_of(whole)[4:]
    assert second.runtime.cursor.state() == whole.runtime.cursor.state()
