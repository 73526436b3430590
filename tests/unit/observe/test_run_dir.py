"""The run folder: lines that survive a crash, are cut back on resume, and read well."""

import io
import json
from pathlib import Path

from rich.console import Console

from jax_agent_rl.observe.progress import Progress, duration
from jax_agent_rl.observe.report.charts import reward_plot
from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import RunDir, read_records, trajectory_record
from jax_agent_rl.observe.view import best_and_worst, render
from tests.report_runs import make_run
from tests.trajectories import trajectory


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.add_metrics({"kind": "step", "step": 1})
    with run_dir.metrics.open("a") as stream:
        stream.write('{"kind": "step", "st')
    assert read_records(run_dir.metrics) == [{"kind": "step", "step": 1}]


def record(run_dir: RunDir, step: int, *, note: str = "") -> None:
    """One trained step, as a trainer records it."""
    run_dir.add_trajectories(step, "train", [trajectory([3], [4, 2])])
    run_dir.add_metrics({"kind": "step", "step": step, "note": note})
    run_dir.finish_step(step)


def evaluate(run_dir: RunDir, step: int, *, note: str = "") -> None:
    run_dir.add_trajectories(step, "heldout", [trajectory([3], [4, 2])])
    run_dir.add_metrics({"kind": "evaluation", "step": step, "note": note})


def lines(run_dir: RunDir) -> list[tuple[str, int, str]]:
    return [(r["kind"], r["step"], r["note"]) for r in read_records(run_dir.metrics)]


def content(run_dir: RunDir) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run_dir.path.iterdir()}


def recorded_run(path: Path) -> RunDir:
    """Three steps with evaluations before, after the second and after the third; ended."""
    run_dir = RunDir(path)
    evaluate(run_dir, 0)
    for step in (1, 2, 3):
        record(run_dir, step)
        if step > 1:
            evaluate(run_dir, step)
    run_dir.write_json(run_dir.summary, {"steps": 3})
    return run_dir


def test_resuming_removes_nothing_before_a_step_is_in_its_place(tmp_path: Path):
    files = content(recorded_run(tmp_path / "run"))
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(1)
    assert content(run_dir) == files
    evaluate(run_dir, 1, note="new")
    assert all(content(run_dir)[name].startswith(old) for name, old in files.items())
    assert [r["step"] for r in run_dir.recorded()] == [0, 1, 1], (
        "those of the steps that have been made"
    )
    record(run_dir, 2, note="new")
    assert lines(run_dir) == [
        ("evaluation", 0, ""),
        ("step", 1, ""),
        ("evaluation", 1, "new"),
        ("step", 2, "new"),
    ]
    assert [(r["split"], r["step"]) for r in read_records(run_dir.trajectories)] == [
        ("heldout", 0),
        ("train", 1),
        ("heldout", 1),
        ("train", 2),
    ]


def test_a_finished_run_that_goes_on_keeps_its_evaluations_and_summary(tmp_path: Path):
    recorded_run(tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(3)
    record(run_dir, 4, note="new")
    assert lines(run_dir)[-3:] == [("step", 3, ""), ("evaluation", 3, ""), ("step", 4, "new")]
    assert '"steps": 3' in run_dir.summary.read_text()


def test_an_evaluation_that_was_made_again_takes_the_place_of_the_old_one(tmp_path: Path):
    recorded_run(tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(2)
    evaluate(run_dir, 2, note="new")
    run_dir.finish_step(2)  # the run ends
    assert lines(run_dir) == [
        ("evaluation", 0, ""),
        ("step", 1, ""),
        ("step", 2, ""),
        ("evaluation", 2, "new"),
    ]
    assert [r["step"] for r in read_records(run_dir.trajectories) if r["split"] == "heldout"] == [
        0,
        2,
    ]


def test_samples_of_an_evaluation_that_never_ended_go(tmp_path: Path):
    run_dir = recorded_run(tmp_path / "run")
    run_dir.add_trajectories(
        1, "heldout", [trajectory([3], [4, 2])]
    )  # killed before the line of metrics
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(3)
    record(run_dir, 4)
    assert [r["step"] for r in read_records(run_dir.trajectories) if r["split"] == "heldout"] == [
        0,
        2,
        3,
    ]


def test_a_disagreement_stays_until_its_step_has_been_made_again(tmp_path: Path):
    run_dir = recorded_run(tmp_path / "run")
    run_dir.write_json(run_dir.disagreement, {"step": 3})
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(1)
    record(run_dir, 2)
    assert run_dir.disagreement.exists()
    record(run_dir, 3)
    assert not run_dir.disagreement.exists()


def test_one_that_was_found_since_stays(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(0)
    run_dir.write_json(run_dir.disagreement, {"step": 1})
    record(run_dir, 1)
    assert run_dir.disagreement.exists()


def test_a_run_that_begins_again_records_everything_again(tmp_path: Path):
    recorded_run(tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    run_dir.resume_after(-1)
    evaluate(run_dir, 0, note="new")
    record(run_dir, 1, note="new")
    assert lines(run_dir) == [("evaluation", 0, "new"), ("step", 1, "new")]


def test_a_run_that_goes_on_is_not_finished(tmp_path: Path):
    run_dir = RunDir(make_run(tmp_path / "run"))
    steps = max(r["step"] for r in read_records(run_dir.metrics))
    run_dir.write_json(run_dir.summary, {"steps": steps})
    assert '"state":"finished"' in write_report(run_dir.path).read_text()
    run_dir.add_metrics({"kind": "step", "step": steps + 1})
    assert '"state":"not finished"' in write_report(run_dir.path).read_text()


def test_a_record_holds_everything_training_used():
    sample = trajectory([3], [4, 5, 2], mask=[1, 0, 1])
    record = json.loads(json.dumps(trajectory_record(sample, step=1, split="train")))
    assert record["response_ids"] == [4, 5, 2]
    assert record["response_mask"] == [1, 0, 1]
    assert [turn["sampled"] for turn in record["turns"]] == [1, 1]


def test_sampled_and_inserted_tokens_differ_without_colours_too():
    record = trajectory_record(trajectory([3], [4, 5, 2], mask=[1, 0, 1]), step=1, split="train")
    console = Console(file=io.StringIO(), width=100, no_color=True)
    console.print(render(record, lambda ids: "".join(f"<{i}>" for i in ids)))
    assert "<3>«<4>»<5>«<2>»" in console.file.getvalue()


def test_best_and_worst_are_by_reward():
    records = [{"reward": r, "id": i} for i, r in enumerate([0.0, 1.0, 0.5, 0.0, 1.0])]
    assert {name: record["id"] for name, record in best_and_worst(records).items()} == {
        "best": 4,
        "worst": 3,
    }
    assert [record["id"] for record in best_and_worst(records[:1] + records[3:4]).values()] == [3]
    assert best_and_worst([]) == {}


def test_the_plot_is_an_image_even_without_steps(tmp_path: Path):
    reward_plot([{"kind": "evaluation", "step": 0, "accuracy": 0.3}], tmp_path / "p.png", title="t")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_progress_prints_plain_lines_on_a_pipe():
    console = Console(file=io.StringIO(), width=80)
    record = {
        "step": 1,
        "reward_mean": 0.5,
        "accuracy": 0.25,
        "tool_calls_mean": 1.0,
        "rollout_tokens_per_second": 100.0,
        "learner_tokens_per_second": 200.0,
        "logprob_gap_max": 1e-5,
        "step_seconds": 9.5,
    }
    with Progress(console, total_steps=4) as progress:
        progress.step(record, seconds_left=75)
    lines = console.file.getvalue().splitlines()
    assert lines[1].split() == [
        "1/4",
        "0.500",
        "25.0%",
        "1.00",
        "100",
        "200",
        "1.0e-05",
        "10s",
        "1m15s",
    ]


def test_durations_read_well():
    assert [duration(s) for s in (5, 75, 3700)] == ["5s", "1m15s", "1h01m"]
