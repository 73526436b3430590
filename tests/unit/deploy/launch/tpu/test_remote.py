"""Runs on a host that outlive who started them. The commands are real; Google Cloud is not needed."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.tpu import remote
from jax_agent_rl.deploy.launch.tpu.remote import Files
from tests.launching import ROOT
from tests.ports import free_port

WAITS = (
    "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(3)); print('up', flush=True); signal.pause()"
)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(folder=tmp_path / "run")
    yield files
    remote.send(files, 9)


def start(files: Files, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "start", str(files.folder), *options]
    return subprocess.run(
        [*own, "--", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def followed(files: Files) -> tuple[int, list[str]]:
    """Exit status and lines; the last one, which says the status, too, is left out."""
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "follow", str(files.folder)]
    result = subprocess.run(own, cwd=ROOT, capture_output=True, text=True, timeout=60)
    *lines, end = result.stdout.splitlines()
    assert end == f"end|{result.returncode}"
    return result.returncode, lines


def test_lines_are_numbered_and_the_exit_status_is_the_commands(files: Files):
    assert start(files, "print('a'); print('b|c'); raise SystemExit(5)").returncode == 0
    assert followed(files) == followed(files) == (5, ["1|a", "2|b|c"])


def test_a_second_start_starts_nothing_while_the_first_runs(files: Files):
    start(files, WAITS)
    before = files.ids()
    assert "under way here already" in start(files, "print('another')").stdout and files.ids()[0] == before[0]
    wait_for_line(files, b"up")
    assert remote.send(files, 2) == 0
    assert followed(files) == (3, ["1|up"])


def test_a_run_that_was_killed_with_its_supervisor_is_lost(files: Files):
    start(files, WAITS)
    wait_for_line(files, b"up")
    supervisor, command = files.ids()
    for pid in (supervisor, command):
        os.killpg(pid, 9)
    assert followed(files)[0] == remote.LOST and remote.send(files, 2) == remote.NO_RUN


def test_a_killed_run_makes_room_for_the_next_at_once(files: Files):
    start(files, WAITS)
    wait_for_line(files, b"up")
    assert remote.send(files, 9) == 0
    assert start(files, "print('next')").returncode == 0
    assert followed(files) == (0, ["1|next"])


def test_a_command_is_run_with_variables_from_the_input_and_without_them_not_at_all(tmp_path: Path):
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "with", str(tmp_path), "--secrets", "--"]
    command = [*own, "bash", "-c", 'echo "$(pwd) $KEY $(cat)"; exit 5']
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    both = {"capture_output": True, "text": True, "timeout": 60, "env": environment}
    done = subprocess.run(command, input='{"KEY": "a b"}\nmore', **both)
    assert (done.returncode, done.stdout) == (5, f"{tmp_path} a b \n")
    broken = subprocess.run(command, input="", **both)
    assert (broken.returncode, broken.stdout) == (
        remote.NO_RUN,
        "the connection broke before the variables had come\n",
    )


def test_secrets_come_through_the_input_and_without_them_nothing_starts(files: Files):
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "start", str(files.folder), "--secrets", "--"]
    command = [*own, sys.executable, "-c", "import os; print(os.environ['SECRET'])"]
    broken = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, timeout=60)
    assert broken.returncode == remote.NO_RUN and "before the secrets had come" in broken.stdout
    subprocess.run(command, cwd=ROOT, input='{"SECRET": "abc"}\n', check=True, text=True, timeout=60)
    assert followed(files) == (0, ["1|abc"])


def test_a_server_is_waited_for_and_one_that_ends_is_not(files: Files, capsys: pytest.CaptureFixture[str]):
    port = free_port()
    serve = f"import socket, signal; s = socket.create_server(('127.0.0.1', {port})); signal.pause()"
    start(files, serve)
    assert remote.listening(files, port) == 0
    remote.send(files, 9)
    assert remote.listening(files, port) == remote.NO_RUN and "its log says why" in capsys.readouterr().out


def test_a_command_that_is_not_there_is_named(files: Files):
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "start", str(files.folder), "--", "/no/such"]
    subprocess.run(own, cwd=ROOT, check=True, timeout=60)
    assert followed(files) == (127, ["1|cannot run /no/such: No such file or directory"])


def test_a_bucket_that_cannot_be_reached_is_said_and_does_not_end_the_run(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = tmp_path / "path" / "gcloud"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho '403 forbidden' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    start(files, "print('trained')", "--bucket", "gs://b/run")
    status, lines = followed(files)
    assert status == 0 and lines[0] == "1|trained"
    assert files.log.read_text().endswith("gcloud storage cp failed: 403 forbidden\n")


def test_without_a_run_there_is_nothing_to_follow(files: Files):
    assert followed(files) == (remote.NO_RUN, ["there is no run here"])


def wait_for_line(files: Files, text: bytes) -> None:
    """Follows until the command says something."""
    own = [sys.executable, "-m", "jax_agent_rl.deploy.launch.tpu.remote", "follow", str(files.folder)]
    with subprocess.Popen(own, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        assert any(text in line for line in process.stdout)
        process.kill()
