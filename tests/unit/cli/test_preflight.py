"""What a command needs and cannot have is told before anything is imported, loaded, printed or made
for it.
"""

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.cli.options import Panel, command
from jax_agent_rl.deploy.preflight import Preflight, require_writable
from jax_agent_rl.errors import ConfigError, JaxAgentRLError, StorageError

TRAIN = ["data.train=rows.jsonl", "data.eval=rows.jsonl", "model.path=model"]
READY = {
    "train": ["train", "quickstart", *TRAIN],
    "distill": ["distill", "distill", *TRAIN, "distill.teachers=model"],
    "sft": ["sft", "supervised/sft", "data.train=rows.jsonl", "model.path=model"],
    "dpo": ["dpo", "supervised/dpo", "data.train=rows.jsonl", "model.path=model"],
    "eval": ["eval", "quickstart", *TRAIN],
    "rollout": ["rollout", "quickstart", *TRAIN, "--out", "out/rows.parquet"],
    "serve": ["serve", "quickstart", *TRAIN, "--port", "0"],
    "rollout-server": ["rollout-server", "quickstart", *TRAIN, "--port", "0"],
    "tool-server": ["tool-server", "port=0"],
    "tinker-server": ["tinker-server", "model.path=model", "port=0"],
    "certify": ["certify", "quickstart", *TRAIN],
    "plan": ["plan", "quickstart", *TRAIN, "--topology=v5e:4x4"],
}
"""Command lines whose files are all there, see ``folder``."""
LISTEN = {
    "serve": ["--host", "0.0.0.0"],
    "rollout-server": ["--host", "0.0.0.0"],
    "tool-server": ["host=0.0.0.0"],
    "tinker-server": ["host=0.0.0.0"],
}
PORT = {
    "serve": "--port={}",
    "rollout-server": "--port={}",
    "tool-server": "port={}",
    "tinker-server": "port={}",
}
RUN_DIR = dict.fromkeys(("train", "distill", "sft", "dpo"), "run_dir={}")
RUN_DIR |= {
    "eval": "--out={}",
    "rollout": "--out={}/r.parquet",
    "certify": "--out={}",
    "tinker-server": "state_dir={}",
}
READS_ROWS = ("train", "distill", "sft", "dpo", "eval", "rollout", "certify")
LOADS_MODEL = tuple(name for name in READY if name != "tool-server")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rows and what looks like a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path


def cases() -> Iterator[tuple[str, list[str], str]]:
    """Command, its words with one thing wrong, and what has to be named."""
    for name in READS_ROWS:
        replaced = [word.replace("rows.jsonl", "no.jsonl") for word in READY[name]]
        yield name, replaced, "'no.jsonl' does not exist"
    for name in LOADS_MODEL:
        replaced = [
            word.replace("model.path=model", "model.path=/no/model") for word in READY[name]
        ]
        yield name, replaced, "no model at '/no/model'"
    for name, words in LISTEN.items():
        yield name, [*READY[name], *words], "needs a token"
    for name, option in RUN_DIR.items():
        yield (
            name,
            [*READY[name], option.format("rows.jsonl/run")],
            "rows.jsonl/run: the folder cannot be made",
        )
    yield (
        "distill",
        [*READY["distill"], "distill.teachers=/no/teacher"],
        "no model at '/no/teacher'",
    )
    for name in ("eval", "rollout", "serve", "rollout-server"):
        words = [word for word in READY[name] if not word.startswith("quickstart")]
        yield name, [*words, "--run", "no_run"], "no_run is not a run folder"
    yield "export", ["export", "no_run", "out"], "no_run is not a run folder"
    yield "diagnose", ["diagnose", "no_run"], "no_run is not a run folder"
    yield (
        "conformance",
        ["conformance", "--backend", "jetstream", "--model", "/no/model"],
        "no model at '/no/model'",
    )
    yield (
        "conformance",
        ["conformance", "--backend", "jetstream", "--engine-factory", "a:b", "--adapters"],
        "--engine-factory a:b does not go with --adapters",
    )
    yield (
        "conformance",
        ["conformance", "--backend", "vllm", "--engine-factory", "a:b"],
        "--engine-factory a:b needs backend jetstream",
    )
    yield (
        "conformance",
        ["conformance", "--backend", "ray", "--engine", "vllm", "--data-parallel", "2"],
        "--data-parallel 2 needs backend jetstream",
    )
    yield (
        "conformance",
        ["conformance", "--backend", "remote", "--url", "http://localhost:1"],
        "--url http://localhost:1 goes with --backend remote or sglang and --model",
    )


CASES = list(cases())


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("name", "words", "named"), CASES, ids=[f"{name}-{named}" for name, _, named in CASES]
)
def test_what_is_missing_is_named_and_nothing_is_made(
    name: str, words: list[str], named: str, folder: Path
):
    initial_contents = contents(folder)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, JaxAgentRLError), result.output
    assert named in str(result.exception)
    assert "run folder" not in result.output
    assert "loading" not in result.output
    assert contents(folder) == initial_contents


@pytest.mark.parametrize("name", PORT)
def test_a_busy_port_is_named(name: str, folder: Path):
    initial_contents = contents(folder)
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        busy_socket.listen()
        port = busy_socket.getsockname()[1]
        result = CliRunner().invoke(app, [*READY[name], PORT[name].format(port)])
    assert f"127.0.0.1:{port}" in str(result.exception)
    assert contents(folder) == initial_contents


@pytest.mark.parametrize("name", PORT)
def test_a_number_that_is_no_port_is_named(name: str, folder: Path):
    initial_contents = contents(folder)
    result = CliRunner().invoke(app, [*READY[name], PORT[name].format(99_999)])
    assert isinstance(result.exception, JaxAgentRLError), result.output
    assert "99999" in str(result.exception)
    assert "65535" in str(result.exception)
    assert contents(folder) == initial_contents


def test_nothing_that_computes_is_imported_for_it(folder: Path):
    """All in one process of its own: here, other tests have imported it."""
    program = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from jax_agent_rl.cli import app\n"
        "for words in json.load(sys.stdin):\n"
        "    result = CliRunner().invoke(app, words)\n"
        "    heavy = sorted({'jax', 'flax', 'orbax', 'transformers', 'torch',"
        " 'aiohttp'} & sys.modules.keys())\n"
        "    if heavy or not result.exception:\n"
        "        sys.exit(f'{words} imported {heavy}: {result.output}')\n"
    )
    case_words = json.dumps([words for _, words, _ in CASES])
    ended = subprocess.run(
        [sys.executable, "-c", program], input=case_words, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_all_that_is_missing_is_told_at_once(folder: Path):
    words = [
        "train",
        "quickstart",
        "data.train=a.jsonl",
        "data.eval=b.jsonl",
        "model.path=/no",
        "run_dir=rows.jsonl",
    ]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert len(result.exception.problems) == 4


@pytest.mark.parametrize("place", ["/proc/run", "rows.jsonl", "rows.jsonl/deep/run", "a\0b"])
def test_a_folder_that_cannot_be_made_is_refused_whoever_asks(place: str, folder: Path):
    with pytest.raises(StorageError):
        require_writable(Path(place), key="run_dir")


def test_a_folder_that_can_be_made_is_not_made(folder: Path):
    initial_contents = contents(folder)
    require_writable(folder / "runs" / "a" / "b", key="run_dir")
    require_writable(folder, key="run_dir")
    assert contents(folder) == initial_contents


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(folder: Path):
    folder.chmod(0o555)
    try:
        with pytest.raises(StorageError):
            require_writable(folder / "run", key="run_dir")
    finally:
        folder.chmod(0o755)


def test_what_the_hub_and_buckets_hold_is_left_to_the_run():
    checks = Preflight()
    checks.model("Qwen/Qwen3-0.6B")
    checks.folder("gs://bucket/run", key="run_dir")
    checks.finish()


LONG = "x" * 300
TAKES_A_NAME = {
    "train": ["train", LONG],
    "a recipe": ["train", "--config", LONG],
    "a key": ["train", "quickstart", f"run_dir={LONG}"],
    "a model": [
        "train",
        "quickstart",
        "data.train=rows.jsonl",
        "data.eval=rows.jsonl",
        f"model.path={LONG}",
    ],
    "rows": ["train", "quickstart", f"data.train={LONG}"],
    "eval": ["eval", "quickstart", "--model", LONG],
    "serve": ["serve", "--run", LONG],
    "view": ["view", LONG],
    "report": ["report", LONG],
    "export": ["export", LONG, "out"],
    "convert": ["convert", LONG, "out"],
    "import-config": ["import-config", "verl", LONG],
    "doctor": ["doctor", LONG],
    "config show": ["config", "show", LONG],
    "prepare": ["prepare", "shop", "--out", LONG],
    "init": ["init", LONG],
}


@pytest.mark.parametrize("words", TAKES_A_NAME.values(), ids=TAKES_A_NAME)
def test_a_name_that_the_system_refuses_is_told_as_an_error(words: list[str], folder: Path):
    initial_contents = contents(folder)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, JaxAgentRLError), result.output
    assert LONG[:20] in str(result.exception)
    assert contents(folder) == initial_contents


def test_a_value_may_be_longer_than_the_name_of_a_file():
    text = "x" * 10_000
    result = CliRunner().invoke(app, ["config", "show", "quickstart", f"model.path={text}"])
    assert result.exit_code == 0, result.exception
    assert text in result.output.replace("\n", "")


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError(errno.EACCES, "Permission denied", "mine"),
        OSError(errno.EROFS, "Read-only file system", b"mine"),
        OSError(errno.ENOSPC, "No space left on device", Path("mine")),
    ],
    ids=str,
)
def test_what_the_system_refuses_in_a_command_is_named(refusal: OSError):
    commands = typer.Typer()

    @command(commands, Panel.CHECK, "refused")
    def refused() -> None:
        """Do what is refused."""
        raise refusal

    result = CliRunner().invoke(commands, [])
    assert isinstance(result.exception, StorageError)
    assert f"mine: {refusal.strerror}" in str(result.exception)


def test_a_mistake_of_the_code_keeps_its_traceback():
    commands = typer.Typer()

    @command(commands, Panel.CHECK, "mistaken")
    def mistaken() -> None:
        """Look for a file that the code should have made."""
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "made-before")

    assert isinstance(CliRunner().invoke(commands, []).exception, FileNotFoundError)


def test_a_damaged_configuration_of_a_run_is_named_with_its_file(folder: Path):
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["eval", "--run", "run"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.problems
    assert all(problem.startswith("run/config.json: ") for problem in result.exception.problems)
