"""A run that was killed and resumed is, to the bit, the run that never was."""

import json
import random
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import pytest

from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.runtime.resume import CHANGES
from tests.run_results import require_same
from tests.tiny_chat import CONFIG, params
from tests.tiny_run import REWARD, step_records, tiny_recipe
from tests.warm import python

COMMAND = ["-m", "jax_agent_rl.cli", "train"]
STEPS = 20
BEFORE = 10

PPO = {
    "adv_estimator": "gae",
    "kl": {"where": "loss", "coef": 0.05, "controller": "adaptive", "target": 0.001, "horizon": 50},
}
ALGORITHMS = {"grpo": {}, "ppo with a critic and adaptive KL": PPO}


def train(recipe: Path, *arguments: str) -> None:
    result = subprocess.run(
        [*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def train_until_killed(recipe: Path, seed: int) -> None:
    """Starts a run and kills it at a random moment of one of the steps 11 to 14 (of the evaluation
    before, perhaps).
    """
    chance = random.Random(seed)
    last = chance.randint(BEFORE, BEFORE + 3)
    process = subprocess.Popen(
        [*python(), *COMMAND, str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [f"{last}/{STEPS}"]:
            break
    try:
        process.wait(timeout=chance.uniform(0, 0.3))  # the random moment; nothing waits for it
    except subprocess.TimeoutExpired:
        pass
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL, "it was over before it was killed"


@pytest.mark.parametrize(
    ("algorithm", "seed"), [("grpo", 1), ("ppo with a critic and adaptive KL", 2)]
)
def test_twenty_steps_are_ten_a_kill_and_ten_more(tmp_path: Path, algorithm: str, seed: int):
    runs = {}
    for name in ("whole", "killed"):
        recipe = tiny_recipe(
            tmp_path / name,
            algorithm={"filter_zero_variance": False, **ALGORITHMS[algorithm]},
            trainer={"steps": STEPS, "checkpoint_every": 5, "eval_every": 5},
            rollout={
                "deterministic": True
            },  # else log-probs may depend on which requests happened to arrive together
        )
        runs[name] = tmp_path / name / "run"
        if name == "killed":
            train_until_killed(recipe, seed)
            assert not (runs[name] / "summary.json").exists()
            train(recipe, "--resume")
        else:
            train(recipe)

    require_same(runs["whole"], runs["killed"])
    assert len(step_records(runs["killed"])) == STEPS


def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_folder(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 400, "checkpoint_every": 400})
    process = subprocess.Popen(
        [*python(), *COMMAND, str(recipe), "--auto-resume"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["2/400"]:
            break
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) > 2
    arguments = ["--auto-resume", "trainer.steps=2"]
    again = subprocess.run(
        [*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500
    )
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert "it ended before its first checkpoint: it begins again in this folder" in again.stdout
    assert [folder.name for folder in tmp_path.glob("run*")] == ["run"]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [0, 2]
    steps = {
        r["step"]
        for r in read_records(tmp_path / "run" / "trajectories.jsonl")
        if r["split"] == "train"
    }
    assert steps == {1, 2}
    assert (tmp_path / "run" / "summary.json").exists()


def resume(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), *COMMAND, str(recipe), "--resume", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_run_goes_on_as_what_it_is_of_or_not_at_all(tmp_path: Path):
    """Another model, other rows, other code and another alpha are named before a file changes."""
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 1},
        learner={"pack_length": 64, "lora": {"rank": 2, "alpha": 4.0}},
    )
    train(recipe)
    run = tmp_path / "run"
    initial_contents = contents(run)

    model = shutil.copytree(tmp_path / "model", tmp_path / "other")
    save_hf(tmp_path / "scaled", CONFIG, jax.tree.map(lambda x: 0.9 * x, params()))
    shutil.copy(tmp_path / "scaled" / "model.safetensors", model)
    (tmp_path / "rows.jsonl").write_text("".join((tmp_path / "train.jsonl").open().readlines()[1:]))
    (tmp_path / "scores.py").write_text(REWARD.replace("% 3", "% 4"))
    changes = [
        f"model.path={model}",
        f"data.train={tmp_path / 'rows.jsonl'}",
        f"reward.path={tmp_path / 'scores.py'}",
        "learner.lora.alpha=8",
    ]
    result = resume(recipe, "trainer.steps=2", *changes)
    assert result.returncode != 0
    for key in (change.partition("=")[0] for change in changes):
        assert f"  {key}" in result.stdout + result.stderr
    assert "opt_state" not in result.stdout + result.stderr
    assert contents(run) == initial_contents

    result = resume(
        recipe, "trainer.steps=2", "--accept-change", "learner.lora.alpha", "learner.lora.alpha=8"
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    changed = {r["key"]: (r["step"], r["old"], r["new"]) for r in read_records(run / CHANGES)}
    assert changed == {"trainer.steps": (1, 1, 2), "learner.lora.alpha": (1, 4.0, 8.0)}
    assert json.loads((run / "config.json").read_text())["learner"]["lora"]["alpha"] == 8.0
