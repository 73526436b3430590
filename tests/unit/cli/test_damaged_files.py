"""No file, however damaged, shows a user a traceback: every command ends with a message, or shows
what can be read.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_agent_rl import cli
from jax_agent_rl.config import build
from jax_agent_rl.errors import JaxAgentRLError
from tests.report_runs import make_run

BINARY = bytes(range(256)) * 8
HALF_UTF16 = "run_dir: runs/x".encode("utf-16")
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "binary": BINARY,
    "UTF-16": HALF_UTF16,
    "a list": b"[1, 2]\n",
    "numbers": (
        b'{"kind": 3, "step": "x", "trainer": 5, "model": [], "settings": 1, "url": 2, "token":'
        b" 3}\n"
    ),
    "too large numbers": (
        b'{"kind": "step", "step": 1e999}\n{"kind": "step", "step": 1, "reward_mean": "x"}\n'
    ),
    "nested too deep": b"[" * 100_000,
    "half a record": b'{"kind": "step", "step": 1, "rewa',
}
REMOVALS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda file: (remove(file), file.mkdir()),
    "gone": lambda file: remove(file),
    "a file": lambda file: (remove(file), file.write_bytes(BINARY)),
}
RUN_FILES = (
    "config.json",
    "metrics.jsonl",
    "trajectories.jsonl",
    "summary.json",
    "rollout_server.json",
)
CHECKPOINT_FILES = (
    "checkpoints",
    "checkpoints/4",
    "checkpoints/4/notes",
    "checkpoints/4/notes/metadata",
)


def remove(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose model is gone, so that no command gets as far as loading one."""
    run = make_run(tmp_path_factory.mktemp("whole") / "run")
    rows = run.parent / "rows.jsonl"
    rows.write_text("{}\n")
    tree = {
        "run_dir": str(run),
        "model": {"path": "/no/model"},
        "data": {"train": str(rows), "eval": str(rows)},
    }
    (run / "config.json").write_text(json.dumps(build(tree).model_dump(mode="json")))
    (run / "summary.json").write_text("{}")
    (run / "rollout_server.json").write_text(
        json.dumps({"url": "http://127.0.0.1:9", "token": "t"})
    )
    notes = run / "checkpoints" / "4" / "notes"
    notes.mkdir(parents=True)
    (notes / "metadata").write_text("{}")
    return run


def commands(run: Path) -> Iterator[list[str]]:
    """Every command that reads a run."""
    yield ["view", str(run)]
    yield ["report", str(run), "--limit", "3"]
    yield ["eval", "--run", str(run)]
    yield ["rollout", "--run", str(run), "--out", str(run.parent / "out.jsonl")]
    yield ["serve", "--run", str(run), "--port", "0"]
    yield ["rollout-server", "--run", str(run), "--port", "0"]
    yield ["export", str(run), str(run.parent / "exported")]
    yield ["diagnose", str(run)]
    yield ["engines", "list", str(run)]
    yield ["config", "show", str(run / "config.json")]
    yield ["train", str(run / "config.json"), "--resume"]
    yield ["train", "quickstart", "--auto-resume", f"run_dir={run}", "model.path=/no/model"]
    yield ["sft", "supervised/sft", f"model.path={run}"]


def require_message(words: list[str]) -> None:
    """Run a command: it succeeds, or fails with an error of ours."""
    result = CliRunner().invoke(cli.app, words)
    if result.exception is not None and not isinstance(
        result.exception, (JaxAgentRLError, SystemExit)
    ):
        raise AssertionError(f"{words} ended with a traceback") from result.exception


def require_messages(name: str, damage: str, undamaged: Path, run: Path) -> None:
    """Damage one file of a copy of the run, and call every command."""
    shutil.copytree(undamaged, run)
    if damage in CONTENTS:
        (run / name).write_bytes(CONTENTS[damage])
    else:
        REMOVALS[damage](run / name)
    for words in commands(run):
        require_message(words)


@pytest.mark.parametrize("damage", [*CONTENTS, *REMOVALS])
@pytest.mark.parametrize("name", [*RUN_FILES, *CHECKPOINT_FILES])
def test_a_damaged_run_is_a_message_in_every_command(
    name: str, damage: str, undamaged: Path, tmp_path: Path
):
    if damage in CONTENTS and name in ("checkpoints", "checkpoints/4", "checkpoints/4/notes"):
        pytest.skip("it is a folder")
    require_messages(name, damage, undamaged, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "damage"), [*((name, "binary") for name in RUN_FILES), ("checkpoints/4", "a file")]
)
def test_a_run_with_other_bytes_in_a_file_is_a_message_in_every_command(
    name, damage, undamaged: Path, tmp_path: Path
):
    require_messages(name, damage, undamaged, tmp_path / "run")


@pytest.mark.parametrize("damage", CONTENTS)
@pytest.mark.parametrize(
    "file", ["rows.parquet", "rows.jsonl", "rows.parquet.summary.json", "rows.jsonl.summary.json"]
)
def test_a_damaged_table_is_a_message(file: str, damage: str, tmp_path: Path):
    table_file = tmp_path / file.removesuffix(".summary.json")
    table_file.write_bytes(b"")
    (tmp_path / file).write_bytes(CONTENTS[damage])
    for words in (
        ["view", str(table_file)],
        ["report", str(table_file), "--out", str(tmp_path / "page.html")],
    ):
        require_message(words)


WITH_CONFIG = [
    ["train"],
    ["distill"],
    ["sft"],
    ["dpo"],
    ["eval"],
    ["rollout", "--out", "rows.parquet"],
    ["serve"],
    ["rollout-server"],
    ["tool-server"],
    ["tinker-server"],
    ["doctor"],
    ["plan", "--topology", "v5e:4x4"],
    ["certify"],
    ["simulate"],
    ["config", "show"],
]


@pytest.mark.parametrize(
    "damage", ["UTF-16", "numbers", "a folder", "no name", "too long a name", "a base of none"]
)
def test_what_is_no_configuration_is_a_message_in_every_command(
    damage: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.yaml"
    name = str(file)
    if damage == "a folder":
        file.mkdir()
    elif damage == "no name":
        name = "a\0b.yaml"
    elif damage == "too long a name":
        name = "a" * 5000
    elif damage == "a base of none":
        file.write_text('base: "a\\0b"\nrun_dir: x\n')
    else:
        file.write_bytes(CONTENTS[damage])
    for words in WITH_CONFIG:
        result = CliRunner().invoke(cli.app, [*words, "--config", name])
        assert isinstance(result.exception, JaxAgentRLError), (words, result.exception)
    assert set(tmp_path.iterdir()) <= {file}


def test_a_message_is_one_error_line_on_stderr_and_the_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.yaml"
    file.write_bytes(HALF_UTF16)
    monkeypatch.setattr(sys, "argv", ["jax-agent-rl", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert said.err.count("\n") == said.err.count("error:") == 1
    assert said.err.startswith("error:")
    assert "Traceback" not in said.err
    assert "mine.yaml" in said.err
    assert "UTF-8" in said.err
