"""``--resume`` of a run that has ended: nothing to do, nothing touched; with more steps, killing it
loses nothing.

``KILLS=20`` kills it as often as that (default 3), at changes of the file system drawn from
``KILL_SEED``.
"""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.observe.run_dir import read_records
from tests.forked import Forker
from tests.run_results import require_same
from tests.tiny_run import tiny_recipe

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("KILL_SEED", "0"))


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


def run(
    forker: Forker, folder: Path, *arguments: str, status: int = 0, die_at: int | None = None
) -> str:
    """Runs a command to its end; returns what it printed."""
    log = folder / "log.txt"
    log.write_text("")
    assert forker.start(*arguments, log=log, die_at=die_at).wait() == status, log.read_text()[
        -3000:
    ]
    return log.read_text()


@pytest.fixture(scope="module")
def finished(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose run of two steps has ended, with a checkpoint of each and an evaluation before
    and after.
    """
    folder = tmp_path_factory.mktemp("finished")
    recipe = tiny_recipe(
        folder,
        trainer={"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 5},
        rollout={"deterministic": True},
        trace={"sinks": ["files"]},
    )
    run(forker, folder, "train", str(recipe))
    return recipe


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], ["2 steps", "trainer.steps=2", "--step", "[1, 2]"]),
        (["--auto-resume"], ["2 steps", "trainer.steps=2"]),
        (["--resume", "trainer.steps=1"], ["step 2", "only 1 step"]),
        (["--resume", "--step", "2"], ["2 steps"]),
    ],
)
def test_a_finished_run_has_nothing_to_do_and_says_how_to_go_on(
    forker, finished: Path, tmp_path, arguments, said
):
    files = content(finished.parent / "run")
    printed = " ".join(run(forker, tmp_path, "train", str(finished), *arguments).split())
    assert "nothing to do" in printed
    assert all(words in printed for words in said)
    assert content(finished.parent / "run") == files


def test_so_has_a_finished_fine_tuning(forker: Forker, finished: Path, tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    ] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "sft.yaml"
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(finished.parent / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "agent": {"tool_format": "hermes"},
        "learner": {"pack_length": 64},
        "trainer": {"batch_size": 2, "epochs": 1},
    }
    recipe.write_text(yaml.safe_dump(tree))
    run(forker, tmp_path, "sft", str(recipe))
    files = content(tmp_path / "run")
    printed = run(forker, tmp_path, "sft", str(recipe), "--resume")
    assert "nothing to do" in printed and "trainer.epochs=1" in printed
    assert content(tmp_path / "run") == files
    run(forker, tmp_path, "sft", str(recipe), "--resume", "trainer.epochs=2")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
    assert [
        r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"
    ] == [1, 2, 3, 4]


@pytest.mark.parametrize("way", ["goes on", "goes back"])
@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_after_it_was_resumed_with_more_steps_it_has_lost_nothing(
    forker, finished: Path, tmp_path, way: str
):
    arguments = [
        "train",
        str(finished),
        "--resume",
        "trainer.steps=4",
        *(["--step", "1"] if way == "goes back" else []),
    ]
    undisturbed = tmp_path / "undisturbed"
    killed = tmp_path / "killed"
    shutil.copytree(finished.parent / "run", undisturbed)
    printed = run(forker, tmp_path, *arguments, f"run_dir={undisturbed}")
    changes = int(re.findall(r"(\d+) changes of the file system", printed)[-1])
    old = records_of(finished.parent / "run")
    chance = random.Random(f"{SEED} {way}")
    for _ in range(KILLS):
        shutil.rmtree(killed, ignore_errors=True)
        shutil.copytree(finished.parent / "run", killed)
        point = chance.randint(1, changes)
        run(forker, tmp_path, *arguments, f"run_dir={killed}", die_at=point, status=-signal.SIGKILL)
        print(f"{way}: killed at change {point} of {changes}")  # shown if it fails
        require_nothing_lost(old, killed, after_step=1 if way == "goes back" else 2)
    newest = max(int(p.name) for p in (killed / "checkpoints").iterdir() if p.name.isdigit())
    again = arguments if newest == 2 else arguments[:4]  # it had gone back already, or not
    run(forker, tmp_path, *again, f"run_dir={killed}")
    require_same(undisturbed, killed)


def records_of(folder: Path) -> dict[str, set[str]]:
    return {
        name: {json.dumps(record, sort_keys=True) for record in read_records(folder / name)}
        for name in ("metrics.jsonl", "trajectories.jsonl", "traces.jsonl")
    }


def require_nothing_lost(old: dict[str, set[str]], folder: Path, *, after_step: int) -> None:
    now = records_of(folder)
    has_gone_on = any(
        r["kind"] == "step" and r["step"] > 2 for r in read_records(folder / "metrics.jsonl")
    )
    for name, records in old.items():
        gone = [json.loads(record) for record in records - now[name]]
        assert all(record["step"] > after_step for record in gone), name
        assert not gone or after_step == 1, name
    assert json.loads((folder / "summary.json").read_text())["steps"] in (2, 4)
    assert json.loads((folder / "config.json").read_text())["trainer"]["steps"] in (2, 4)
    checkpoints = {int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()}
    assert after_step in checkpoints
    assert {1, 2} <= checkpoints or has_gone_on or after_step == 1
