"""What a run is of, and what a resumed run may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_agent_rl.config import Config
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.runtime.identity import RunIdentity, run_identity
from jax_agent_rl.runtime.resume import check_resumed
from tests.messages import assert_message, raises
from tests.tiny import TINY, tiny_params

Tree = dict[str, Any]


def row(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "data_source": "x"}


def lines(*texts: str) -> str:
    return "".join(json.dumps(row(text)) + "\n" for text in texts)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A run with every kind of thing that a key may name."""
    for name, seed in (("model", 0), ("judge", 1), ("teacher", 2), ("opponent", 3)):
        save_hf(tmp_path / name, TINY, tiny_params(seed))
        (tmp_path / name / "tokenizer.json").write_text(name)
    (tmp_path / "rows.jsonl").write_text(lines("a", "b"))
    for name in ("reward.py", "agents.py", "tools.py", "tools.yaml"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "main.py").write_text("x = 1\n")
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "reward": {
            "path": str(tmp_path / "reward.py"),
            "judge": {"model": str(tmp_path / "judge")},
        },
        "agent": {
            "module": str(tmp_path / "agents.py"),
            "command": {"program_dir": str(tmp_path / "program")},
            "role_models": {"opponent": str(tmp_path / "opponent")},
        },
        "tools": {
            "function_tool_path": str(tmp_path / "tools.py"),
            "tool_config_path": str(tmp_path / "tools.yaml"),
        },
        "distill": {"teachers": [str(tmp_path / "teacher")]},
        "learner": {"lora": {"rank": 4, "alpha": 8.0}},
        "rollout": {"group_size": 4},
    }


def identity(tree: Tree) -> RunIdentity:
    config = build_tree(Config, tree)
    whole_identity = run_identity(config, [open_dataset(config.data.train).fingerprint])
    return RunIdentity.from_json(json.loads(json.dumps(whole_identity.to_json())))


def check(old: RunIdentity, new: RunIdentity, *accepted: str):
    return check_resumed(Config, old, new, accepted=accepted, checkpoint="checkpoint 5 in runs/a")


def test_the_same_run_has_no_difference(tree: Tree):
    assert check(identity(tree), identity(tree)) == []


def replace_file(path: str, text: str) -> Callable[[Tree, Path], None]:
    return lambda tree, folder: (folder / path).write_text(text) and None


def other_model(name: str) -> Callable[[Tree, Path], None]:
    def change(tree: Tree, folder: Path) -> None:
        shutil.rmtree(folder / name)
        save_hf(folder / name, TINY, tiny_params(9))
        (folder / name / "tokenizer.json").write_text(name)

    return change


def set_key(path: str, value: Any) -> Callable[[Tree, Path], None]:
    def change(tree: Tree, folder: Path) -> None:
        *sections, name = path.split(".")
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[name] = value

    return change


CHANGED = {
    "another model of the same shape": (other_model("model"), "model.path", "other weights (is"),
    "another tokenizer": (
        replace_file("model/tokenizer.json", "x"),
        "model.path",
        "other tokenizer.json",
    ),
    "other rows": (replace_file("rows.jsonl", lines("b", "a")), "data.train", "other rows"),
    "another alpha": (
        set_key("learner.lora.alpha", 16.0),
        "learner.lora.alpha",
        "was 8.0, is 16.0",
    ),
    "no adapters": (set_key("learner.lora", None), "learner.lora", "is null"),
    "another seed": (set_key("seed", 7), "seed", "was 0, is 7"),
    "another objective": (
        set_key("algorithm.entropy_coeff", 0.5),
        "algorithm.entropy_coeff",
        "was 0.0, is 0.5",
    ),
    "another reward": (replace_file("reward.py", "x = 2\n"), "reward.path", "another content"),
    "other agents": (replace_file("agents.py", "x = 2\n"), "agent.module", "another content"),
    "other tools": (
        replace_file("tools.py", "x = 2\n"),
        "tools.function_tool_path",
        "another content",
    ),
    "other settings of tools": (
        replace_file("tools.yaml", "x: 2\n"),
        "tools.tool_config_path",
        "other file",
    ),
    "another program": (
        replace_file("program/main.py", "x = 2\n"),
        "agent.command.program_dir",
        "another content",
    ),
    "another judge": (other_model("judge"), "reward.judge.model", "other weights"),
    "another opponent": (other_model("opponent"), "agent.role_models", "other opponent"),
    "another teacher": (other_model("teacher"), "distill.teachers", "another content"),
    "a reward that is gone": (set_key("reward.path", None), "reward.path", "another content"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_defines_the_run_is_refused_or_accepted_by_key(tree: Tree, tmp_path: Path, name: str):
    change, key, named = CHANGED[name]
    old = identity(tree)
    change(tree, tmp_path)
    new = identity(tree)
    with raises(CheckpointError, key=(key, "checkpoint 5 in runs/a"), value=named) as caught:
        check(old, new)
    assert_message(caught.value, fix=f"--accept-change {key}")
    assert [difference.key for difference in check(old, new, key)] == [key]


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        ("tools", "tool_config_path", "tools"),
        ("interactions", "interaction_config_path", "interaction"),
    ],
)
@pytest.mark.parametrize("named", ["FOLDER/somebodys_classes.py:Some", "somebodys_classes.Some"])
def test_the_code_of_classes_that_a_file_names_is_part_of_the_run(
    tree: Tree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    key: str,
    name: str,
    named: str,
):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "somebodys_classes.py"
    code.write_text("x = 1\n")
    (tmp_path / "entries.yaml").write_text(
        json.dumps({name: [{"class_name": named.replace("FOLDER", str(tmp_path))}]})
    )
    tree[section] = {key: str(tmp_path / "entries.yaml")}
    old = identity(tree)
    assert check(old, identity(tree)) == []

    code.write_text("x = 2\n")
    with raises(CheckpointError, key=f"{section}.{key}", value="somebodys_classes"):
        check(old, identity(tree))


def test_several_differences_are_told_together(tree: Tree):
    old = identity(tree)
    set_key("seed", 7)(tree, Path())
    set_key("learner.lora.rank", 8)(tree, Path())
    with raises(
        CheckpointError, key="learner.lora.rank", value=("was 4", "is 8"), fix="--accept-change"
    ):
        check(old, identity(tree), "seed")


def test_what_was_moved_or_is_another_file_of_the_same_content_passes(tree: Tree, tmp_path: Path):
    old = identity(tree)
    (tmp_path / "model").rename(tmp_path / "moved")
    set_key("model.path", str(tmp_path / "moved"))(tree, tmp_path)
    (tmp_path / "reward.py").rename(tmp_path / "renamed.py")
    set_key("reward.path", str(tmp_path / "renamed.py"))(tree, tmp_path)
    first, second = (tmp_path / "rows.jsonl").read_text().splitlines()
    for name, line in (("a", first), ("b", second)):
        (tmp_path / f"{name}.jsonl").write_text(f" {line}\n")
    set_key("data.train", [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])(tree, tmp_path)
    assert check(old, identity(tree)) == []


def test_rows_of_a_parquet_file_are_those_of_its_twin(tree: Tree, tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet

    old = identity(tree)
    pa.parquet.write_table(pa.Table.from_pylist([row("a"), row("b")]), tmp_path / "rows.parquet")
    set_key("data.train", str(tmp_path / "rows.parquet"))(tree, tmp_path)
    assert check(old, identity(tree)) == []


def test_what_may_change_is_returned_for_the_record(tree: Tree):
    old = identity(tree)
    set_key("trainer", {"steps": 500, "checkpoint_every": 7})(tree, Path())
    set_key("learner.pack_length", 2048)(tree, Path())
    differences = {
        difference.key: (difference.old, difference.new)
        for difference in check(old, identity(tree))
    }
    assert differences == {
        "trainer.steps": (100, 500),
        "trainer.checkpoint_every": (10, 7),
        "learner.pack_length": (1024, 2048),
    }


def test_a_record_without_fingerprints_is_compared_by_its_values(tree: Tree):
    """Runs of earlier versions have their configuration alone."""
    old = RunIdentity(config=identity(tree).config)
    assert check(old, identity(tree)) == []
    set_key("learner.lora.alpha", 2.0)(tree, Path())
    with pytest.raises(CheckpointError, match="learner.lora.alpha"):
        check(old, identity(tree))
