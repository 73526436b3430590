"""``launch/tpu_host.sh``: runs that outlive who started them. The commands are real; Google Cloud
is not needed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import ROOT

WAITS = (
    "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(3)); print('up',"
    " flush=True); signal.pause()"
)
KILLED = 70
NO_RUN = 71


class Host:
    """A run's folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ)

    def call(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "launch" / "tpu_host.sh"), action, str(self.folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=self.environment
        )

    def start(self, code: str) -> str:
        """Starts a Python program; what is said about it."""
        return self.call("start", sys.executable, "-c", code).stdout

    def follow(self) -> tuple[int, list[str]]:
        """Exit status and lines; the last one, which says the status, too, is left out."""
        result = self.call("follow")
        *lines, end = result.stdout.splitlines()
        assert end == f"end|{result.returncode}"
        return result.returncode, lines

    def wait_for_line(self, text: bytes) -> None:
        """Follows until the command says something."""
        command = [str(ROOT / "launch" / "tpu_host.sh"), "follow", str(self.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            assert any(text in line for line in process.stdout)
            os.killpg(process.pid, 9)

    def ids(self) -> list[int]:
        return [int(word) for word in (self.folder / "process").read_text().split()]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "run")
    yield host
    host.call("signal", "KILL")


def test_lines_are_numbered_and_the_exit_status_is_the_commands(host: Host):
    assert host.start("print('a'); print('b|c'); raise SystemExit(5)") == ""
    assert host.follow() == host.follow() == (5, ["1:a", "2:b|c"])


def test_a_second_start_starts_nothing_while_the_first_runs(host: Host):
    host.start(WAITS)
    first_ids = host.ids()
    assert "under way here already" in host.start("print('another')")
    assert host.ids()[0] == first_ids[0]
    assert host.call("running").returncode == 0
    host.wait_for_line(b"up")
    assert host.call("signal", "INT").returncode == 0
    assert host.follow() == (3, ["1:up"])
    assert host.call("running").returncode == NO_RUN


def test_a_run_that_was_killed_with_its_supervisor_is_lost(host: Host):
    host.start(WAITS)
    host.wait_for_line(b"up")
    for pid in host.ids():
        os.killpg(pid, 9)
    assert host.follow()[0] == KILLED
    assert host.call("signal", "INT").returncode == NO_RUN


def test_a_killed_run_makes_room_for_the_next_at_once(host: Host):
    host.start(WAITS)
    host.wait_for_line(b"up")
    assert host.call("signal", "KILL").returncode == 0
    assert host.follow()[0] == 128 + 9
    assert host.start("print('next')") == ""
    assert host.follow() == (0, ["1:next"])


def test_bytes_that_are_no_text_are_shown(host: Host):
    host.start(r"import sys; sys.stdout.buffer.write(b'\xff\x00\n'); print('b', end='')")
    command = [str(ROOT / "launch" / "tpu_host.sh"), "follow", str(host.folder)]
    assert subprocess.run(command, stdout=subprocess.PIPE).stdout == b"1:\xff\x00\n2:b\nend|0\n"


def test_a_command_that_is_not_there_is_named(host: Host):
    host.call("start", "/no/such")
    status, lines = host.follow()
    assert status == 127
    assert lines[0].endswith("/no/such: No such file or directory")


def test_a_bucket_that_cannot_be_reached_is_said_and_does_not_end_the_run(
    host: Host, tmp_path: Path
):
    broken = tmp_path / "path" / "gcloud"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho '403 forbidden' >&2; exit 1\n")
    broken.chmod(0o755)
    path = f"{broken.parent}:{os.environ['PATH']}"
    host.environment |= {"PATH": path, "RUN_BUCKET": "gs://b/run", "RUN_HOST": "host-0"}
    host.start("print('trained')")
    assert host.follow() == (0, ["1:trained", "2:gcloud storage cp failed: 403 forbidden "])


def test_the_token_of_a_run_stays_on_its_host(host: Host, tmp_path: Path):
    calls = tmp_path / "calls"
    recorder = tmp_path / "path" / "gcloud"
    recorder.parent.mkdir()
    recorder.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    recorder.chmod(0o755)
    path = f"{recorder.parent}:{os.environ['PATH']}"
    (tmp_path / "run_folder").mkdir()
    host.environment |= {"PATH": path, "RUN_BUCKET": "gs://b/run", "RUN_HOST": "host-0"}
    host.environment |= {"RUN_FOLDER": str(tmp_path / "run_folder")}
    host.start("print('trained')")
    assert host.follow()[0] == 0
    uploads = [line for line in calls.read_text().splitlines() if " rsync " in line]
    assert uploads
    assert all(r"--exclude=^engines\.json$" in line for line in uploads)


def test_without_a_run_there_is_nothing_to_follow(host: Host):
    assert host.follow() == (NO_RUN, ["there is no run here"])
