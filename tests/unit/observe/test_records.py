"""Records: what is damaged is left out and counted, whatever it is, and the rest is read."""

import json
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import (
    RunDir,
    read_metrics,
    read_records,
    read_traces,
    read_trajectories,
    trajectory_record,
)
from tests.report_runs import make_run
from tests.trajectories import call, trajectory

DAMAGED = [b"17", b"[1", b"garbage", b"\xff\xfe", b"", b'{"kind": "st', b"[" * 100_000, b"null"]


def put(file: Path, line: bytes, *, at: int) -> None:
    """Inserts a line."""
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:at], line, *lines[at:]]) + b"\n")


@pytest.mark.parametrize("line", DAMAGED)
def test_a_line_without_an_object_is_left_out_and_counted(tmp_path: Path, line: bytes):
    run_dir = RunDir(make_run(tmp_path / "run"))
    for read, file in (
        (read_metrics, run_dir.metrics),
        (read_trajectories, run_dir.trajectories),
        (read_traces, run_dir.traces),
    ):
        objects = list(read(file))
        put(file, line, at=1)
        records = read(file)
        assert list(records) == objects
        assert (records.damaged, records.invalid) == (1, 0)
        assert list(records) == objects and records.damaged == 1, "a second reading counts again"
        assert records.notes == [f"lines left out of {file.name}: 1 (cut off or damaged)"]


CALL = {"name": "f", "seconds": 0.0}
"""Its ``error`` is missing."""


@pytest.mark.parametrize(
    "broken",
    [
        {"step": None},
        {"reward": None},
        {"reward": float("nan")},
        {"finish_reason": "of another version"},
        {"teacher_prompt_ids": None},
        {"teacher_prompt_ids": [-1]},
        {"feedback": 5},
        {"raw_score": "high"},
        {"raw_score": float("inf")},
        {"turns": None},
        {"turns": [{}]},
        {"turns": [17]},
        {"turns": [{"stop_reason": "of another version"}]},
        {"turns": [{"tool_calls": [CALL]}]},
    ],
)
def test_a_trajectory_without_what_is_read_of_it_is_left_out_and_counted(
    tmp_path: Path, broken: dict
):
    sample = trajectory([1], [5, 2, 6], mask=[1, 1, 0], calls=[[call()]])
    record = json.loads(json.dumps(trajectory_record(sample, step=1, split="train")))
    if isinstance(broken.get("turns"), list) and broken["turns"][0] not in ({}, 17):
        broken = {"turns": [record["turns"][0] | broken["turns"][0]]}
    missing = {key: value for key, value in record.items() if key != "segments"}
    file = tmp_path / "trajectories.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"a": 1}, record, record | broken, missing])))
    records = read_trajectories(file)
    assert list(records) == [record]
    assert (records.damaged, records.invalid) == (0, 3)
    assert records.notes == [
        "lines left out of trajectories.jsonl: 3 (not as this version writes them)"
    ]


def test_a_file_that_is_not_there_has_no_records_and_nothing_to_say(tmp_path: Path):
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert list(records) == [] and records.notes == []


@pytest.mark.parametrize("line", [*DAMAGED, b'{"a": 1}'])
def test_a_run_with_a_damaged_line_is_cut_back_and_loses_that_line(tmp_path: Path, line: bytes):
    run_dir = RunDir(make_run(tmp_path / "run"))
    for file in (run_dir.metrics, run_dir.trajectories, run_dir.traces):
        put(file, line, at=1)
    run_dir.resume_after(2)
    run_dir.finish_step(3)
    assert [(r["kind"], r["step"]) for r in read_records(run_dir.metrics)] == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
    ]
    assert len(run_dir.metrics.read_text().splitlines()) == 3
    assert [r["step"] for r in read_records(run_dir.trajectories)] == [1] * 4 + [2] * 4
