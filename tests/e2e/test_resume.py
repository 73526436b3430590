"""A run that was killed and resumed is, to the bit, the run that never was."""

import random
import signal
import subprocess
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.run_results import require_same
from tests.tiny_run import tiny_recipe
from tests.warm import python

COMMAND = ["-m", "jax_agent_rl.cli", "train"]
STEPS, BEFORE = 20, 10

PPO = {
    "adv_estimator": "gae",
    "kl": {"where": "loss", "coef": 0.05, "controller": "adaptive", "target": 0.001, "horizon": 50},
}
ALGORITHMS = {"grpo": {}, "ppo with a critic and adaptive KL": PPO}


def train(recipe: Path, *arguments: str) -> None:
    result = subprocess.run([*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def train_until_killed(recipe: Path, seed: int) -> None:
    """Starts a run and kills it at a random moment of one of the steps 11 to 14 (of the evaluation before, perhaps)."""
    chance = random.Random(seed)
    last = chance.randint(BEFORE, BEFORE + 3)
    process = subprocess.Popen(
        [*python(), *COMMAND, str(recipe)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@pytest.mark.parametrize(("algorithm", "seed"), [("grpo", 1), ("ppo with a critic and adaptive KL", 2)])
def test_twenty_steps_are_ten_a_kill_and_ten_more(tmp_path: Path, algorithm: str, seed: int):
    runs = {}
    for name in ("whole", "killed"):
        recipe = tiny_recipe(
            tmp_path / name,
            algorithm={"filter_zero_variance": False, **ALGORITHMS[algorithm]},
            trainer={"steps": STEPS, "checkpoint_every": 5, "eval_every": 5},
            rollout={"deterministic": True},  # else log-probs may depend on which requests happened to arrive together
        )
        runs[name] = tmp_path / name / "run"
        if name == "killed":
            train_until_killed(recipe, seed)
            assert not (runs[name] / "summary.json").exists()
            train(recipe, "--resume")
        else:
            train(recipe)

    require_same(runs["whole"], runs["killed"])
    assert len([r for r in read_records(runs["killed"] / "metrics.jsonl") if r["kind"] == "step"]) == STEPS


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_in_its_folder(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 400, "checkpoint_every": 400})
    process = subprocess.Popen(
        [*python(), *COMMAND, str(recipe), "--auto-resume"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    again = subprocess.run([*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert "it ended before its first checkpoint: it begins again in this folder" in again.stdout
    assert [folder.name for folder in tmp_path.glob("run*")] == ["run"]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [0, 2]
    steps = {r["step"] for r in read_records(tmp_path / "run" / "trajectories.jsonl") if r["split"] == "train"}
    assert steps == {1, 2} and (tmp_path / "run" / "summary.json").exists()
