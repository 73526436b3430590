"""Two runs: everything that decided them differently, and the first thing that came out so."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.evaluate.same import compare_runs, differences
from jax_agent_rl.runtime.provenance import PROVENANCE, steering_variables
from tests.report_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run folder, and a copy of it to be changed."""
    first = make_run(tmp_path / "first")
    line = {"step": 0, "packages": {"jax": "0.10.2", "numpy": "2.3.1"}, "processor": "some CPU"}
    (first / PROVENANCE).write_text(json.dumps(line) + "\n")
    second = tmp_path / "second"
    shutil.copytree(first, second)
    return first, second


def edit(file: Path, change: Callable[[dict], None], *, line: int = 0) -> None:
    """Changes the object in one line of a file."""
    lines = file.read_text().splitlines()
    record = json.loads(lines[line])
    change(record)
    lines[line] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")


def test_a_copy_is_the_same(runs):
    result = compare_runs(*runs)
    assert result.is_same and result.causes == [] and result.steps > 1


def test_every_cause_is_named(runs):
    edit(runs[1] / PROVENANCE, lambda record: record["packages"].update(jax="0.10.3"))
    edit(runs[1] / PROVENANCE, lambda record: record.update(processor="another CPU"))
    causes = {cause.where: (cause.first, cause.second) for cause in compare_runs(*runs).causes}
    assert causes == {
        "provenance.packages.jax": ("0.10.2", "0.10.3"),
        "provenance.processor": ("some CPU", "another CPU"),
    }


def test_the_first_sampled_id_that_differs_is_named(runs):
    file = runs[1] / "trajectories.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    trained = [n for n, record in enumerate(records) if record["split"] == "train"]

    def change(record: dict) -> None:
        record["response_ids"][1] += 1
        record["reward"] += 1.0

    edit(file, change, line=trained[-1])
    edit(file, change, line=trained[1])
    result = compare_runs(*runs)
    outcome = result.outcome
    assert outcome is not None
    assert records[trained[1]]["trajectory_id"] in outcome.where
    assert outcome.where.endswith("response_ids[1]")
    assert outcome.second == outcome.first + 1


def test_times_are_left_out_and_other_metrics_are_not(runs):
    file = runs[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [n for n, record in enumerate(lines) if record["kind"] == "step"]
    edit(file, lambda record: record.update(step_seconds=1e6), line=steps[0])
    assert compare_runs(*runs).is_same
    edit(file, lambda record: record.update(loss=7.0), line=steps[1])
    result = compare_runs(*runs)
    assert result.outcome is not None and result.outcome.where.endswith("metrics.loss")
    assert result.steps == 1


def test_a_run_that_ends_earlier_is_another_one(runs):
    file = runs[1] / "metrics.jsonl"
    lines = file.read_text().splitlines()
    last = max(n for n, line in enumerate(lines) if json.loads(line)["kind"] == "step")
    file.write_text("\n".join(lines[:last]) + "\n")
    outcome = compare_runs(*runs).outcome
    assert outcome is not None and outcome.second == "not there"
    assert CliRunner().invoke(app, ["same", *map(str, runs)]).exit_code == 1


def test_a_greedy_reward_counts_only_where_both_runs_recorded_it(runs):
    first, second = (run / "trajectories.jsonl" for run in runs)
    edit(first, lambda record: record.update(greedy_reward=0.5))
    edit(second, lambda record: record.pop("greedy_reward", None))
    assert compare_runs(*runs).is_same

    edit(second, lambda record: record.update(greedy_reward=None))  # it was lost
    outcome = compare_runs(*runs).outcome
    assert outcome is not None and outcome.where.endswith("greedy_reward")


def test_an_id_of_a_segment_that_differs_is_named(runs):
    for run in runs:
        file = run / "trajectories.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        trained = next(n for n, record in enumerate(records) if record["split"] == "train")

        def add_segment(record: dict) -> None:
            record["segments"] = [{**record, "segments": []}]

        edit(file, add_segment, line=trained)
    assert compare_runs(*runs).is_same

    def change(record: dict) -> None:
        record["segments"][0]["response_ids"][0] += 1

    edit(runs[1] / "trajectories.jsonl", change, line=trained)
    outcome = compare_runs(*runs).outcome
    assert outcome is not None and outcome.where.endswith("segment 1, response_ids[0]")


def steps_of(run: Path) -> list[int]:
    """The numbers of the lines of steps in the metrics of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [n for n, line in enumerate(lines) if json.loads(line)["kind"] == "step"]


def remove(file: Path, *numbers: int) -> None:
    """Removes lines of a file."""
    lines = file.read_text().splitlines()
    left = [line for number, line in enumerate(lines) if number not in numbers]
    file.write_text("".join(f"{line}\n" for line in left))


def test_a_line_that_one_run_lacks_is_named(runs):
    remove(runs[1] / "metrics.jsonl", steps_of(runs[1])[0])
    result = compare_runs(*runs)
    assert result.outcome is not None and result.steps == 0
    assert result.outcome.where == "next step"
    assert result.outcome.second == result.outcome.first + 1


def test_after_a_line_that_both_lack_trajectories_are_still_compared(runs):
    for run in runs:
        remove(run / "metrics.jsonl", steps_of(run)[0])
    assert compare_runs(*runs).is_same

    file = runs[1] / "trajectories.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    last = max(n for n, record in enumerate(records) if record["split"] == "train")
    edit(file, lambda record: record.update(reward=record["reward"] + 1.0), line=last)
    outcome = compare_runs(*runs).outcome
    assert outcome is not None and outcome.where.endswith("reward")


def test_runs_without_a_step_are_not_the_same(runs):
    for run in runs:
        remove(run / "metrics.jsonl", *steps_of(run))
    result = compare_runs(*runs)
    assert not result.is_same and "neither run has a recorded step" in result.notes[-1]


def test_nan_that_is_nan_again_is_no_difference_and_damaged_lines_are_noted(runs):
    for run in runs:
        edit(
            run / "metrics.jsonl",
            lambda record: record.update(loss=math.nan),
            line=steps_of(run)[0],
        )
        with (run / "trajectories.jsonl").open("a") as stream:
            stream.write('{"step": 9, "cut off')
    result = compare_runs(*runs)
    assert result.is_same
    assert len([note for note in result.notes if "damaged" in note]) == 2


def test_nested_values_differ_by_their_paths():
    first = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    second = {"a": {"b": 1, "c": [1, 3]}, "e": 4}
    found = [str(difference) for difference in differences(first, second, "config")]
    assert found == [
        "config.a.c: [1, 2] | [1, 3]",
        "config.d: 3 | not there",
        "config.e: not there | 4",
    ]


def test_variables_that_steer_are_recorded_without_secrets():
    environment = {
        "XLA_FLAGS": "--xla_cpu",
        "JAX_PLATFORMS": "cpu",
        "VLLM_API_KEY": "secret",
        "HOME": "/home/me",
        "TPU_ACCESS_TOKEN": "secret",
    }
    assert steering_variables(environment) == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu"}
