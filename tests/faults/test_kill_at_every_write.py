"""Killed at any change of the file system, what was recorded is still there, or something whole is
in its place.

Each scenario runs in a process that kills itself at its n-th change, for every n until it gets
through; then again from the same beginning. A run folder is resumed, a collection of trajectories
is written.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_agent_rl.evaluate.export import Target, records, write
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.observe.report.charts import reward_plot
from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import RunDir, read_records
from tests.trajectories import trajectory
from tests.unit.evaluate.test_export import SUMMARY, group

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
CHILD = f"""
import os, signal, sys, traceback
from pathlib import Path
from tests.faults import test_kill_at_every_write as scenarios

def live(name, folder, die_at):
    changes = 0

    def count(event, details):
        nonlocal changes
        writes = False
        if event == "open" and isinstance(details[2], int):
            writes = details[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in {CHANGES!r}) and str(folder) in str(details):
            changes += 1
            if changes == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        getattr(scenarios, name)(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

for line in sys.stdin:
    name, folder, die_at = line.split()
    child = os.fork()
    if not child:
        live(name, Path(folder), int(die_at))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Lives:
    """A process that has imported everything, and forks for each life."""

    def __enter__(self):
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], env=environment, stdin=pipe, stdout=pipe, text=True
        )
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def live(self, name: str, folder: Path, die_at: int) -> bool:
        """Runs a scenario that kills itself at a change; returns whether it got through."""
        self._process.stdin.write(f"{name} {folder} {die_at}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL)
        return status == 0

    def each(self, folder: Path, begin: Callable[[Path], object], name: str):
        """Yields after each life that was killed, a change later each time, and last after the one
        that got through.
        """
        for die_at in range(1, 1000):
            shutil.rmtree(folder, ignore_errors=True)
            begin(folder)
            ended = self.live(name, folder, die_at)
            yield
            if ended:
                assert die_at > 5, "it changed nothing"
                return


@pytest.fixture(scope="module")
def lives():
    with Lives() as running:
        yield running


# --- a run that is resumed ------------------------------------------------------------------------


def recorded_run(folder: Path) -> None:
    """Three steps, evaluated before, after the second and at the end, with everything that a
    finished run has.
    """
    run = RunDir(folder)
    _evaluate(run, 0, "old")
    for step in (1, 2, 3):
        _record(run, step, "old")
        if step > 1:
            _evaluate(run, step, "old")
    _conclude(run, 3)
    run.write_json(run.disagreement, {"step": 3})


def goes_on(folder: Path) -> None:
    """Resume after the last step, with more steps to make."""
    _resume(folder, after_step=3, until=5)


def goes_back(folder: Path) -> None:
    """Resume after an earlier step."""
    _resume(folder, after_step=1, until=4)


def begins_again(folder: Path) -> None:
    run = RunDir(folder)
    run.resume_after(-1)
    _evaluate(run, 0, "new")
    _resume(folder, after_step=-1, until=2, run=run)


def _resume(folder: Path, *, after_step: int, until: int, run: RunDir | None = None) -> None:
    if run is None:
        run = RunDir(folder)
        run.resume_after(after_step)
        _evaluate(run, after_step, "new")
    for step in range(max(after_step, 0) + 1, until + 1):
        _record(run, step, "new")
    _evaluate(run, until, "new")
    _conclude(run, until)


def _record(run: RunDir, step: int, by: str) -> None:
    run.add_trajectories(step, "train", [trajectory([3], [4, 2], group=f"{by}-{step}")])
    run.append(run.traces, [{"step": step, "validate": False, "by": by}])
    run.add_metrics({"kind": "step", "step": step, "by": by, "reward_mean": 0.5})
    run.finish_step(step)


def _evaluate(run: RunDir, step: int, by: str) -> None:
    run.add_trajectories(step, "heldout", [trajectory([3], [4, 2], group=f"{by}-heldout-{step}")])
    run.add_metrics({"kind": "evaluation", "step": step, "by": by, "accuracy": 0.5})


def _conclude(run: RunDir, steps: int) -> None:
    run.finish_step(steps)
    run.write_json(run.summary, {"steps": steps})
    reward_plot(read_records(run.metrics), run.plot, title="t")
    write_report(run.path, decode=lambda ids: " ".join(map(str, ids)))


def metrics_of(folder: Path) -> list[tuple[str, int, str]]:
    return [(r["kind"], r["step"], r["by"]) for r in read_records(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("name", "after_step"), [("goes_on", 3), ("goes_back", 1), ("begins_again", -1)]
)
def test_a_resumed_run_killed_at_any_write_loses_nothing(
    lives: Lives, tmp_path: Path, name: str, after_step: int
):
    recorded = tmp_path / "recorded"
    folder = tmp_path / "run"
    recorded_run(recorded)
    old = metrics_of(recorded)
    old_groups = {r["group_id"] for r in read_records(recorded / "trajectories.jsonl")}
    for _ in lives.each(folder, lambda run: shutil.copytree(recorded, run), name):
        now = metrics_of(folder)
        new_steps = {step for kind, step, by in now if kind == "step" and by == "new"}
        evaluated = {step for kind, step, by in now if kind == "evaluation" and by == "new"}
        gone = set(old) - set(now)
        if not new_steps:
            assert gone <= {("evaluation", step, "old") for step in evaluated}
        for kind, step, _ in gone:
            assert step > after_step or (kind == "evaluation" and step in evaluated), (
                "it is of no abandoned step"
            )
        groups = {r["group_id"] for r in read_records(folder / "trajectories.jsonl")}
        assert new_steps or old_groups - groups <= {f"old-heldout-{step}" for step in evaluated}
        assert json.loads((folder / "summary.json").read_text())["steps"] in (
            3,
            max(new_steps, default=3),
        )
        assert (folder / "reward.png").read_bytes().endswith(b"IEND\xaeB`\x82"), "a whole picture"
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")
        assert (folder / "disagreement.json").exists() or 3 in new_steps
    steps = [(step, by) for kind, step, by in now if kind == "step"]
    assert steps == sorted(steps) and len({step for step, _ in steps}) == len(steps), (
        "every step once, in order"
    )


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    lives: Lives, tmp_path: Path
):
    """Each life begins with what the killed one left."""
    undisturbed = tmp_path / "undisturbed"
    recorded_run(undisturbed)
    goes_back(undisturbed)
    folder = tmp_path / "run"
    recorded_run(folder)
    for die_at in (3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19):
        lives.live("goes_back", folder, die_at)
    goes_back(folder)
    assert metrics_of(folder) == metrics_of(undisturbed)
    assert not list(folder.glob("*.tmp"))


# --- a collection that is written -----------------------------------------------------------------


def collected(folder: Path, name: str) -> Target:
    """The journal of a collection whose prompts are all done."""
    target = Target.from_path(folder / name)
    with Journal(target.journal, {"seed": 0}) as journal:
        for number in (1, 0):
            journal.add(number, records(group(number), number), {})
    return target


def writes_table(folder: Path) -> None:
    _write(folder, "out.parquet")


def writes_lines(folder: Path) -> None:
    _write(folder, "out.jsonl")


def writes_folder(folder: Path) -> None:
    _write(folder, "out")


def _write(folder: Path, name: str) -> None:
    target = Target.from_path(folder / name)
    if target.journal.exists():
        with Journal(target.journal, {"seed": 0}) as journal:
            write(target, journal, SUMMARY)


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("writes_table", "out.parquet"), ("writes_lines", "out.jsonl"), ("writes_folder", "out")],
)
def test_a_table_whose_writing_was_killed_is_written_again(
    lives: Lives, tmp_path: Path, scenario: str, name: str
):
    folder = tmp_path / "out"

    def begin(path: Path) -> None:
        path.mkdir()
        collected(path, name)

    for _ in lives.each(folder, begin, scenario):
        _write(folder, name)
        target = Target.from_path(folder / name)
        assert json.loads(target.summary.read_text()) == SUMMARY
        assert not target.journal.exists()
        names = sorted(
            file.name
            for file in (target.path if target.is_folder else folder).rglob("*")
            if file.is_file()
        )
        complete = (
            ["README.md", "summary.json", "train-00000-of-00001.parquet"]
            if target.is_folder
            else None
        )
        assert names == (complete or sorted([name, f"{name}.summary.json"]))
