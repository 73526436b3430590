"""gcloud's errors in the user's words; hosts' lines exactly once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import advise
from jax_agent_rl.deploy.launch.tpu.remote import Logs
from jax_agent_rl.errors import LaunchError
from tests.cloud import job_of, request_of


@pytest.mark.parametrize(
    "message, fix",
    [
        ("Cloud TPU API has not been used in project 1 before or it is disabled.", "gcloud services enable tpu"),
        ("Quota limit 'TPUV5sPodPerProjectPerZoneForTPUAPI' has been exceeded.", "no quota"),
        ('There is no more capacity in the zone "us-west4-a"', "add --queued"),
        ("There was a problem refreshing your current auth tokens: invalid_grant", "gcloud auth login"),
        ("problem refreshing: Max retries exceeded. Please run: $ gcloud auth login", "that may pass"),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", "roles/tpu.admin"),
        ("PERMISSION_DENIED: Permission denied on 'locations/x' (or it may not exist).", "there is no such zone"),
        ("INVALID_ARGUMENT: Accelerator type v5p-8 is not available", "does not have this kind of chip"),
        ("something quite different", ""),
    ],
)
def test_an_error_of_gclouds_has_its_fix(message: str, fix: str):
    assert fix in advise(message) and bool(advise(message)) == bool(fix)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 9), max_size=4))
def test_however_often_a_connection_breaks_every_line_is_shown_once(tmp_path_factory: pytest.TempPathFactory, cuts):
    shown: list[str] = []
    logs = Logs(tmp_path_factory.mktemp("logs"), print_line=shown.append)
    for length in [*cuts, 9]:  # each connection begins with the first line
        read = logs.reader("host-1")
        for number in range(1, length + 1):
            read(f"[host-1] {number}|line {number}")
    expected = [f"line {number}" for number in range(1, 10)]
    assert shown == [f"[host-1] {text}" for text in expected]
    assert (logs.folder / "host-1.log").read_text().splitlines() == expected


def test_the_lines_of_a_run_that_is_found_again_are_in_its_file_once(tmp_path: Path):
    def shown(logs: Logs, *texts: str) -> str:
        read = logs.reader("host-0")
        for number, text in enumerate(texts, 1):
            read(f"[host-0] {number}|{text}")
        return (tmp_path / "host-0.log").read_text()

    def launcher() -> Logs:
        return Logs(tmp_path, print_line=lambda _: None)

    assert shown(launcher(), "a") == "a\n"
    another = launcher()
    another.expect_run(found=True)
    another.reader("host-0")  # a connection that breaks at once takes nothing away
    assert (tmp_path / "host-0.log").read_text() == "a\n"
    assert shown(another, "a", "b") == shown(another, "a", "b") == "a\nb\n"
    another.expect_run(found=False)
    assert shown(another, "c") == "a\nb\nc\n"


def test_only_the_runs_own_last_line_says_that_it_has_ended(tmp_path: Path):
    read = Logs(tmp_path, print_line=lambda _: None).reader("host-1")
    for line in ("ERROR: (gcloud) no network", "1|end|0"):
        read(f"[host-1] {line}")
        assert read.status is None
    assert read.received and (tmp_path / "host-1.log").read_text() == "end|0\n"
    read("[host-1] end|3")
    assert read.status == 3


def test_hosts_are_numbered_slice_by_slice_and_the_first_leads():
    found = job.workers(request_of(slices=2), (("a", "b"), ("c", "d")))
    assert [(w.node, w.index, w.name) for w in found] == [
        ("my-run-0", 0, "host-0"),
        ("my-run-0", 1, "host-1"),
        ("my-run-1", 0, "host-2"),
        ("my-run-1", 1, "host-3"),
    ]


def test_what_could_not_be_kept_is_refused():
    for request in (request_of("v5e:4x4"), request_of("v5e:2x2", spot=True)):
        with pytest.raises(LaunchError, match="--bucket is missing: "):
            job.require_keepable(request, job_of(bucket=None))
    for bucket in ("/mnt", "s3://b", "gs://", "gs:///b", ""):
        with pytest.raises(LaunchError, match="is no bucket: it has the form gs://NAME"):
            job_of(bucket=bucket)


def test_keys_that_the_launcher_sets_are_refused():
    with pytest.raises(LaunchError, match="run_dir=x: tpu_pod.sh sets run_dir, trainer.checkpoint_dir"):
        job.require_overrides(["seed=1", "run_dir=x"])


def test_an_override_without_a_value_is_refused():
    with pytest.raises(LaunchError, match="override 'seed': write key.path=value"):
        job.require_overrides(["seed"])
