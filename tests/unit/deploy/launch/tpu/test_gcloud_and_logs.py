"""gcloud's errors in the user's words; hosts' lines exactly once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, advise
from jax_agent_rl.deploy.launch.tpu.launch import SliceLaunch
from jax_agent_rl.errors import LaunchError
from tests.cloud import job_of
from tests.examples import examples
from tests.messages import raises


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (
            "Cloud TPU API has not been used in project 1 before or it is disabled.",
            "gcloud services enable tpu",
        ),
        ("Quota limit 'TPUV5sPodPerProjectPerZoneForTPUAPI' has been exceeded.", "no quota"),
        ('There is no more capacity in the zone "us-west4-a"', "--render sky wait"),
        (
            "There was a problem refreshing your current auth tokens: invalid_grant",
            "gcloud auth login",
        ),
        (
            "problem refreshing: Max retries exceeded. Please run: $ gcloud auth login",
            "that may pass",
        ),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", "roles/tpu.admin"),
        (
            "PERMISSION_DENIED: Permission denied on 'locations/x' (or it may not exist).",
            "there is no such zone",
        ),
        (
            "INVALID_ARGUMENT: Accelerator type v5p-8 is not available",
            "does not have this kind of chip",
        ),
        ("The required property [project] is not currently set.", "--project"),
        ("something quite different", ""),
    ],
)
def test_an_error_of_gclouds_has_its_fix(message: str, fix: str):
    assert fix in advise(message)
    assert bool(advise(message)) == bool(fix)


class Wire(Gcloud):
    """Connections that deliver these lines, one connection after the other, and then the last one
    for ever.
    """

    max_connections = 2

    def __init__(self, *connections: list[str]) -> None:
        super().__init__(project=None, zone="z")
        self.connections = list(connections)

    def read(self, call):
        return '{"state": "READY"}'

    def stream(self, call, on_line, stdin=""):
        for line in self.connections.pop(0) if len(self.connections) > 1 else self.connections[0]:
            on_line(line)
        return 255


def followed(folder: Path, *connections: list[str]) -> tuple[int, list[str], str]:
    """Exit status, what was shown of the run, and its log."""
    printed: list[str] = []
    launch = SliceLaunch(
        cloud=Wire(*connections),
        task=job_of("v5e:2x2"),
        poll=1e-6,
        logs=folder,
        print_line=printed.append,
    )
    status = launch.follow()
    return (
        status,
        [line for line in printed if line.startswith("[host-0] ")],
        (folder / "host-0.log").read_text(),
    )


@settings(max_examples=examples(25))
@given(cuts=st.lists(st.integers(0, 9), max_size=4))
def test_however_often_a_connection_breaks_every_line_is_shown_once(
    tmp_path_factory: pytest.TempPathFactory, cuts
):
    lines = [f"{number}:line {number}" for number in range(1, 10)]
    connections = [lines[:length] for length in cuts]  # each begins with the first line
    status, printed, log = followed(
        tmp_path_factory.mktemp("logs"), *connections, [*lines, "end|3"]
    )
    expected = [f"line {number}" for number in range(1, 10)]
    assert (status, printed, log.splitlines()) == (
        3,
        [f"[host-0] {text}" for text in expected],
        expected,
    )


def test_the_lines_of_a_run_that_is_found_again_are_in_its_file_once(tmp_path: Path):
    assert followed(tmp_path, ["1:a", "end|0"])[2] == "a\n"
    # A connection that breaks at once takes nothing away.
    assert followed(tmp_path, [], ["1:a", "2:b", "end|0"])[2] == "a\nb\n"


def test_only_the_runs_own_last_line_says_that_it_has_ended(tmp_path: Path):
    status, printed, log = followed(
        tmp_path, ["ERROR: (gcloud) no network", "1:end|0"], ["1:end|0", "end|3"]
    )
    assert (status, log) == (3, "end|0\n")
    assert printed == [
        "[host-0] ERROR: (gcloud) no network",
        "[host-0] end|0",
    ]


def test_what_could_not_be_kept_is_refused():
    for task in (job_of("v5e:4x4", bucket=None), job_of("v5e:2x2", bucket=None, spot=True)):
        with raises(LaunchError, key="--bucket", value="missing"):
            job.require_keepable(task)
    for bucket in ("/mnt", "s3://b", "gs://", "gs:///b", ""):
        with raises(LaunchError, fix="gs://NAME"):
            job_of(bucket=bucket)


def test_keys_that_the_launcher_sets_are_refused():
    with raises(LaunchError, value="run_dir=x", fix=("tpu_pod.sh", "trainer.checkpoint_dir")):
        job.require_overrides(["seed=1", "run_dir=x"])


def test_an_override_without_a_value_is_refused():
    with raises(LaunchError, key="override", value="'seed'", fix="key.path=value"):
        job.require_overrides(["seed"])
