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

import pyarrow
import pyarrow.parquet
import pytest

from jax_agent_rl.testing.conformance.models import write_tiny_model
from jax_agent_rl.utils.hub import absolute_model_path, hub_name, model_folder
from tests.dataset_rows import load_rows
from tests.messages import assert_message

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys
from jax_agent_rl.errors import ModelError
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.models.hf import load_config, load_hf
try:
    tokenizer = model_folder(sys.argv[1]) / "tokenizer.json"
    print(load_config(sys.argv[1]).num_layers, tokenizer.is_file())
    if "weights" in sys.argv:
        print(load_hf(sys.argv[1])[1]["embed"].shape)
except ModelError as error:
    sys.exit(str(error))
"""


class Hub(ThreadingHTTPServer):
    """The files of a folder: ``some/model`` and ``openai/gsm8k`` as models and data sets;
    ``some/closed`` is gated.
    """

    def __init__(self, folder: Path) -> None:
        files = {
            str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()
        }
        self.files = {name: file.read_bytes() for name, file in files.items()} | {
            "pytorch_model.bin": b"pickled"
        }
        self.sent: list[str] = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if listed := re.fullmatch(
            r"/api/(?:models|datasets)/(some/\w+|openai/gsm8k)/revision/(\w+)", self.path
        ):
            if listed[1] == "some/closed":
                self.refuse(403, "GatedRepo")
            elif listed[2] not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                siblings = [{"rfilename": name} for name in self.server.files]
                self.answer(
                    json.dumps({"id": listed[1], "sha": COMMIT, "siblings": siblings}).encode()
                )
        elif re.match(
            rf"/api/(models|datasets)/(some/model|openai/gsm8k)/tree/{COMMIT}", self.path
        ):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "oid": hashlib.sha1(body).hexdigest(),
                    "size": len(body),
                }
                for name, body in self.server.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif found := re.fullmatch(
            rf"(?:/datasets)?/(?:some/\w+|openai/gsm8k)/resolve/{COMMIT}/(.+)", self.path
        ):
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


def load(
    hub: Hub, cache: Path, name: str, *arguments: str, script: str = LOAD, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What a process says that reads the model; where the Hub is, it takes from its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        **variables,
    }
    command = [sys.executable, "-c", script, name, *arguments]
    return subprocess.run(
        command, env=environment, cwd=cache.parent, capture_output=True, text=True, timeout=120
    )


def test_a_model_of_the_hub_is_downloaded_once_and_its_weights_when_needed(hub, tmp_path):
    cache = tmp_path / "cache"
    described = load(hub, cache, "some/model")
    assert described.returncode == 0, described.stderr
    assert described.stdout == "2 True\n"
    assert "config.json" in hub.sent
    assert "model.safetensors" not in hub.sent
    with_weights = load(hub, cache, "some/model@main", "weights")
    assert with_weights.returncode == 0, with_weights.stderr
    assert with_weights.stdout.startswith(described.stdout)
    assert sorted(hub.sent) == sorted(set(hub.sent)), "nothing came twice"
    assert "model.safetensors" in hub.sent
    assert "pytorch_model.bin" not in hub.sent
    alone = load(
        hub, cache, "some/model", "weights", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert alone.stdout == with_weights.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("some/model@v2", "some/model has no revision 'v2'"),
        ("some/closed", "some/closed is gated: accept its licence on the Hub and set HF_TOKEN"),
        (
            "runs/mistyped",
            (
                "there is no folder 'runs/mistyped' here,"
                " and the Hub has no model 'runs/mistyped' for you"
            ),
        ),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_fix(hub, tmp_path, name, says):
    process = load(hub, tmp_path / "cache", name)
    assert process.returncode == 1
    assert says in process.stderr and "Traceback" not in process.stderr


def test_without_the_hub_a_folder_is_asked_for(hub, tmp_path):
    process = load(hub, tmp_path / "cache", "some/model", HF_HUB_OFFLINE="1")
    assert_message(
        process.stderr,
        value="'some/model' could not be downloaded from the Hub",
        fix="set model.path to a folder",
    )
    assert "Traceback" not in process.stderr


def test_the_cache_is_used_where_the_hub_does_not_answer(hub, tmp_path):
    cache = tmp_path / "cache"
    assert load(hub, cache, "some/model").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cached = load(hub, cache, "some/model", HF_ENDPOINT=endpoint)
        uncached = load(hub, cache, "some/other", HF_ENDPOINT=endpoint)
    assert cached.stdout == "2 True\n", cached.stderr
    assert (
        f"'some/other' could not be downloaded from the Hub ({endpoint} did not answer: timed out)"
        in uncached.stderr
    )


def test_folders_are_never_looked_up(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("some/model", "./other/model", "/no/model", "model", "a/b/c", "~/models/mine"):
        assert hub_name(path) is None
        assert model_folder(path, weights=True) == Path(path).expanduser()
    assert absolute_model_path("some/model") == str(tmp_path / "some" / "model")
    assert absolute_model_path("other/model@main") == "other/model@main"


def test_the_recipes_model_is_where_the_variable_puts_the_cache(tmp_path, monkeypatch):
    path = "~/.cache/jax_agent_rl/models/small"
    monkeypatch.delenv("JAX_AGENT_RL_CACHE", raising=False)
    assert model_folder(path) == Path(path).expanduser()
    monkeypatch.setenv("JAX_AGENT_RL_CACHE", str(tmp_path))
    assert model_folder(path) == tmp_path / "models" / "small"
    assert absolute_model_path(path) == str(tmp_path / "models" / "small")
    assert model_folder("~/models/small") == Path("~/models/small").expanduser()


# --- data sets ------------------------------------------------------------------------------------

LOAD_ROWS = """
import json, sys
from jax_agent_rl.config import DataSource
from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.errors import DataError
for source in map(json.loads, sys.argv[1:]):
    try:
        print([row["prompt"][0]["content"] for row in open_dataset([DataSource(**source)])])
    except DataError as error:
        print(error)
"""
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-0.parquet, main/test-1.parquet]}
- config_name: other
  data_files: rows.jsonl
---
# A data set
"""


@pytest.fixture
def published(tmp_path) -> Path:
    """Rows in files as data sets have them; each row's question is the name of its file."""
    folder = tmp_path / "published_rows"
    for name in (
        "main/train-0-of-2.parquet",
        "main/train-1-of-2.parquet",
        "main/test-0.parquet",
        "main/test-1.parquet",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"data_source": "x", "prompt": [{"role": "user", "content": name}]}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / name)
    (folder / "rows.jsonl").write_text(
        json.dumps(row | {"prompt": [{"role": "user", "content": "rows"}]})
    )
    (folder / "main" / "train-0.csv").write_text("x")
    return folder


def rows_of(
    folder: Path, cache: Path, *sources: dict, **variables: str
) -> tuple[list[str], list[str]]:
    """What is said of each source, and which files were sent."""
    with Hub(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = load(server, cache, *map(json.dumps, sources), script=LOAD_ROWS, **variables)
        server.shutdown()
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), server.sent


def test_a_data_set_of_the_hub_is_read_by_name_split_and_glob_alone(published, tmp_path):
    (published / "README.md").write_text(CARD)
    train = ["main/train-0-of-2.parquet", "main/train-1-of-2.parquet"]
    said, sent = rows_of(
        published,
        tmp_path / "cache",
        {"path": "some/model", "name": "main"},
        {"path": "hf://datasets/some/model@main", "name": "main", "split": "test"},
        {"path": "hf://datasets/some/model/main/train-1*.parquet"},
        {"path": "some/model", "name": "other"},
    )
    test = ["main/test-0.parquet", "main/test-1.parquet"]
    assert said == list(map(str, [train, test, train[1:], ["rows"]]))
    assert sorted(sent) == sorted([*train, *test, "README.md", "rows.jsonl"])
    offline = [{"path": "some/model", "name": "main"}, {"path": "some/other"}]
    said, sent = rows_of(published, tmp_path / "cache", *offline, HF_HUB_OFFLINE="1")
    assert said[0] == str(train) and not sent
    assert said[1].startswith(
        "there is no file 'some/other' here, and 'some/other' could not be downloaded from the Hub"
    )
    assert said[1].endswith("set data.train / data.eval to files here")


def test_a_data_set_without_a_card_is_read_by_the_names_of_its_files(published, tmp_path):
    said, _ = rows_of(
        published,
        tmp_path / "cache",
        {"path": "some/model"},
        {"path": "some/model", "name": "main"},
    )
    assert said[0] == str(["main/train-0-of-2.parquet", "main/train-1-of-2.parquet"])
    assert "names no configurations; leave out name='main'" in said[1]


def test_what_a_data_set_does_not_have_is_said_with_what_there_is(published, tmp_path):
    (published / "README.md").write_text(CARD)
    said, _ = rows_of(
        published,
        tmp_path / "cache",
        {"path": "some/model"},
        {"path": "some/model", "name": "main", "split": "dev"},
        {"path": "hf://datasets/some/model/dev/*.parquet"},
        {"path": "some/closed"},
        {"path": "hf://some/model"},
    )
    assert "no configuration 'default'; set name to one of ['main', 'other']" in said[0]
    assert "no split 'dev'; there are ['test', 'train']" in said[1]
    assert (
        "no files (.jsonl, .parquet) that match dev/*.parquet;"
        " name them, like hf://datasets/some/model" in said[2]
    )
    assert "some/closed is gated: accept its licence on the Hub and set HF_TOKEN" in said[3]
    assert "'hf://some/model' names no dataset; write hf://datasets/owner/name" in said[4]


def test_the_example_downloads_gsm8k_and_says_when_it_could_not(tmp_path):
    published = tmp_path / "gsm8k" / "main"
    published.mkdir(parents=True)
    for split, numbers in (("train", range(3)), ("test", range(3, 8))):
        problems = [{"question": f"Q{number}?", "answer": f"#### {number}"} for number in numbers]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(problems), published / f"{split}-00000-of-00001.parquet"
        )
    files = "[{split: train, path: main/train-*}, {split: test, path: main/test-*}]"
    configs = f"configs: [{{config_name: main, data_files: {files}}}]"
    (tmp_path / "gsm8k" / "README.md").write_text(f"---\n{configs}\n---\n")
    script = (
        f"import runpy; runpy.run_path({str(ROOT / 'examples/gsm8k_tool/prepare.py')!r},"
        " run_name='__main__')"
    )
    with Hub(tmp_path / "gsm8k") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online = load(
            server,
            tmp_path / "cache",
            "--out",
            str(tmp_path / "a"),
            "--heldout",
            "2",
            script=script,
        )
        offline = load(
            server,
            tmp_path / "none",
            "--out",
            str(tmp_path / "b"),
            script=script,
            HF_HUB_OFFLINE="1",
        )
        server.shutdown()

    def truths(folder: str) -> list[list[str]]:
        truths = []
        for part in ("train", "heldout"):
            rows = load_rows(tmp_path / folder / f"{part}.jsonl")
            truths.append([row["reward_model"]["ground_truth"] for row in rows])
        return truths

    assert truths("a") == [["0", "1", "2"], ["3", "4"]]
    assert "INSTEAD" not in online.stderr
    assert list(map(len, truths("b"))) == [16, 8]
    assert_message(offline.stderr, value="writing the problems of sample.jsonl INSTEAD")
