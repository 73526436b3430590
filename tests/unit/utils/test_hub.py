"""Models by their names on the Hub, against a server on loopback that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jax_agent_rl.testing.conformance.models import write_tiny_model
from jax_agent_rl.utils.hub import absolute_model_path, hub_name, model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys
from jax_agent_rl.errors import ModelError
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.models.hf import load_config, load_hf
try:
    print(load_config(sys.argv[1]).num_layers, (model_folder(sys.argv[1]) / "tokenizer.json").is_file())
    if "weights" in sys.argv:
        print(load_hf(sys.argv[1])[1]["embed"].shape)
except ModelError as error:
    sys.exit(str(error))
"""


class Hub(ThreadingHTTPServer):
    """One model, ``some/model``, with the files of a folder; ``some/closed`` is gated."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()} | {"pytorch_model.bin": b"pickled"}
        self.sent: list[str] = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if listed := re.fullmatch(r"/api/models/(some/\w+)/revision/(\w+)", self.path):
            if listed[1] == "some/closed":
                self.refuse(403, "GatedRepo")
            elif listed[2] not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                siblings = [{"rfilename": name} for name in self.server.files]
                self.answer(json.dumps({"id": listed[1], "sha": COMMIT, "siblings": siblings}).encode())
        elif self.path.startswith(f"/api/models/some/model/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "oid": hashlib.sha1(body).hexdigest(), "size": len(body)}
                for name, body in self.server.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif found := re.fullmatch(rf"/some/\w+/resolve/{COMMIT}/(.+)", self.path):
            self.answer(self.server.files[found[1]])
            if self.command == "GET":
                self.server.sent.append(found[1])
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    with Hub(write_tiny_model(tmp_path / "published")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def load(hub: Hub, cache: Path, name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What a process says that reads the model; where the Hub is, it takes from its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(cache), **more}
    command = [sys.executable, "-c", LOAD, name, *arguments]
    return subprocess.run(command, env=environment, cwd=cache.parent, capture_output=True, text=True, timeout=120)


def test_a_model_named_on_the_hub_is_downloaded_once_and_its_weights_when_they_are_needed(hub, tmp_path):
    cache = tmp_path / "cache"
    described = load(hub, cache, "some/model")
    assert described.returncode == 0, described.stderr
    assert described.stdout == "2 True\n"
    assert "config.json" in hub.sent and "model.safetensors" not in hub.sent
    whole = load(hub, cache, "some/model@main", "weights")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.startswith(described.stdout)
    assert sorted(hub.sent) == sorted(set(hub.sent)), "nothing came twice"
    assert "model.safetensors" in hub.sent and "pytorch_model.bin" not in hub.sent
    alone = load(hub, cache, "some/model", "weights", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert alone.stdout == whole.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("some/model@v2", "some/model has no revision 'v2'"),
        ("some/closed", "some/closed is gated: accept its licence on the Hub and set HF_TOKEN"),
        ("runs/mistyped", "there is no folder 'runs/mistyped' here, and the Hub has no model 'runs/mistyped' for you"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_fix(hub, tmp_path, name, says):
    done = load(hub, tmp_path / "cache", name)
    assert done.returncode == 1
    assert says in done.stderr and "Traceback" not in done.stderr


def test_without_the_hub_a_folder_is_asked_for(hub, tmp_path):
    done = load(hub, tmp_path / "cache", "some/model", HF_HUB_OFFLINE="1")
    assert (
        "'some/model' could not be downloaded from the Hub" in done.stderr
        and "set model.path to a folder" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_hub_that_does_not_answer_is_not_waited_for_and_what_is_cached_is_used(hub, tmp_path):
    cache = tmp_path / "cache"
    assert load(hub, cache, "some/model").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cached = load(hub, cache, "some/model", HF_ENDPOINT=endpoint)
        other = load(hub, cache, "some/other", HF_ENDPOINT=endpoint)
    assert cached.stdout == "2 True\n", cached.stderr
    assert f"'some/other' could not be downloaded from the Hub ({endpoint} did not answer: timed out)" in other.stderr


def test_folders_are_never_looked_up(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("some/model", "./other/model", "/no/model", "model", "a/b/c", "~/models/mine"):
        assert hub_name(path) is None
        assert model_folder(path, weights=True) == Path(path).expanduser()
    assert absolute_model_path("some/model") == str(tmp_path / "some" / "model")
    assert absolute_model_path("other/model@main") == "other/model@main"
