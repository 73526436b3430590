"""A disk that fills up while metrics, trajectories or weights are written: said with the path, and
nothing is lost.

A limit on the size of files stands for it: no file of the process can grow beyond. Checkpoints:
test_checkpoint_faults.
"""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jax_agent_rl.errors import StorageError, WeightUpdateError
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.runtime.transports import FileTransport
from tests.messages import assert_message, raises
from tests.run_results import require_same
from tests.tiny import TINY, tiny_params
from tests.tiny_run import tiny_recipe
from tests.warm import python


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)


def test_half_a_line_of_metrics_is_said_and_gone_when_the_run_resumes(tmp_path: Path):
    folder = RunDir(tmp_path)
    records = [{"kind": "step", "step": step, "noise": "x" * 100} for step in (1, 2, 3)]
    folder.add_metrics(records[0])
    with (
        largest_file(200),
        raises(StorageError, key="metrics.jsonl", value="too large", fix="space"),
    ):
        folder.add_metrics(records[1])
    assert folder.metrics.stat().st_size == 200
    folder.resume_after(1)
    for record in records[1:]:
        folder.add_metrics(record)
        folder.finish_step(record["step"])
    assert read_records(folder.metrics) == records


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    folder = RunDir(tmp_path)
    folder.write_json(folder.summary, {"steps": 1})
    with largest_file(50), raises(StorageError, key="summary.json"):
        folder.write_json(folder.summary, {"steps": 2, "noise": "x" * 100})
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert '"steps": 1' in folder.summary.read_text()


def test_weights_that_find_no_room_are_said_with_where_and_the_key_to_set(tmp_path: Path):
    files = FileTransport(TINY, probe_ids=[[3, 4, 5]], folder=tmp_path)
    with (
        largest_file(20_000),
        raises(WeightUpdateError, key="version 4", value="v4-00000", fix="rollout.weight_dir"),
    ):
        files.write(tiny_params(), 4)
    (path,) = files.write(tiny_params(), 5).payload
    assert Path(path).stat().st_size > 20_000
    files.release()
    assert not list(tmp_path.iterdir())


FILLS_UP = """
import resource, sys
from jax_agent_rl import cli
from jax_agent_rl.observe import run_dir

name, append, calls = sys.argv.pop(), run_dir.append_records, 0

def limited(file, records):
    global calls
    calls += file.name == name
    if calls == 3:
        size = file.stat().st_size + 300  # in the middle of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        append(file, records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

run_dir.append_records = limited
cli.main()
"""


def train(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [*python(), *command], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("file", ["metrics.jsonl", "trajectories.jsonl"])
def test_a_run_that_cannot_write_a_step_ends_with_a_message_and_can_resume(
    tmp_path: Path, file: str, undisturbed: Path
):
    """The third piece of that file does not fit."""
    recipe = recipe_in(tmp_path)
    failed = train("-c", FILLS_UP, "train", str(recipe), file)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr[-3000:]
    assert_message(failed.stderr.replace("\n", ""), key=file, value="could not be written")
    assert "--resume" in failed.stderr
    resumed = train("-m", "jax_agent_rl.cli", "train", str(recipe), "--resume")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    require_same(undisturbed, tmp_path / "run")


def recipe_in(folder: Path) -> Path:
    return tiny_recipe(
        folder, rollout={"deterministic": True}, trainer={"steps": 4, "checkpoint_every": 1}
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train("-m", "jax_agent_rl.cli", "train", str(recipe_in(folder))).returncode == 0
    return folder / "run"
