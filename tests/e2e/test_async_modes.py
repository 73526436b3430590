"""The asynchronous trainers on a real engine and a real learner: whole runs, and a run that was
killed.
"""

import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_run import saved_steps, step_records, tiny_recipe
from tests.warm import python

COMMAND = ["-m", "jax_agent_rl.cli", "train"]
MODES = {
    "one_step_off": {"mode": "one_step_off"},
    "keep": {"mode": "fully_async", "max_staleness": 2, "in_flight_update": "keep"},
    "recompute": {"mode": "fully_async", "max_staleness": 1, "in_flight_update": "recompute"},
}
PPO = {"one_step_off": {"adv_estimator": "gae"}}  # with a critic, whose state has to go on, too


def recipe_of(folder: Path, name: str, steps: int) -> Path:
    return tiny_recipe(
        folder,
        trainer={"steps": steps, "checkpoint_every": 5, **MODES[name]},
        rollout={"max_in_flight": 16},
        algorithm=PPO.get(name, {}),
    )


def train(recipe: Path, *arguments: str) -> str:
    result = subprocess.run(
        [*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def check_run(run: Path, *, steps: int, bound: int) -> None:
    """Every step consumed a batch, no token was too old, and no group was trained on twice."""
    lines = step_records(run)
    assert [r["step"] for r in lines] == list(range(1, steps + 1))
    for line in lines:
        books = line["accounting"]
        assert books["started"] == books["trained"] + books["dropped"] + books["in_flight"]
        assert line["staleness_max"] <= bound
        assert sum(line["staleness_histogram"].values()) > 0
        assert 0 <= line["learner_idle_share"] <= 1
        assert line["engine_busy_share"] >= 0
        assert "rollout_is_mean" in line, "stale tokens are corrected for"
    trained = [r for r in read_records(run / "trajectories.jsonl") if r["split"] == "train"]
    for record in trained:
        ages = [record["step"] - 1 - v for v in record["policy_versions"] if v >= 0]
        assert min(ages) >= 0
        assert max(ages) <= bound
    assert set(Counter(r["trajectory_id"] for r in trained).values()) == {1}
    groups = {tuple(map(int, r["group_id"].split("-")[1:])) for r in trained}
    assert sorted(2 * a + b for a, b in groups) == list(range(2 * steps)), "no row was left out"


@pytest.mark.parametrize("name", MODES)
def test_a_run_trains_on_every_row_once_and_within_its_bound(tmp_path: Path, name: str):
    train(recipe_of(tmp_path, name, steps=12))
    check_run(tmp_path / "run", steps=12, bound=MODES[name].get("max_staleness", 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
@pytest.mark.parametrize("name", ["one_step_off", "keep"])
def test_a_run_that_was_ended_goes_on_and_loses_and_doubles_nothing(
    tmp_path: Path, name: str, number: signal.Signals
):
    recipe = recipe_of(tmp_path, name, steps=400)  # or it might be over before it is ended
    process = subprocess.Popen(
        [*python(), *COMMAND, str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["12/400"]:
            break
    process.send_signal(number)
    process.stdout.read()
    assert process.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    process.stdout.close()
    assert not (tmp_path / "run" / "summary.json").exists()
    saved = max(saved_steps(tmp_path / "run"))
    steps = max(20, saved + 8)
    resumed = re.search(
        r"resumed after step (\d+)", train(recipe, "--resume", f"trainer.steps={steps}")
    )
    # A kill may hit step 10's checkpoint while it is being written; that of step 5 was complete
    # before it began.
    assert resumed
    assert int(resumed[1]) >= (5 if number == signal.SIGKILL else 12)
    check_run(tmp_path / "run", steps=steps, bound=MODES[name].get("max_staleness", 1))
