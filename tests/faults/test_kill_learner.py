"""``kill -9`` anywhere in a run's life: it resumes, and ends as the run that was never disturbed,
to the bit.

Half of the points are moments of processor time, from the loading to the last checkpoint; the other
half are the n-th change of the file system, which is where checkpoints, metrics and trajectories
are half written. All are drawn from a seed. A killed run is resumed and killed again, until one
gets through; then the next one starts.

``KILLS=50 python -m pytest tests/faults/test_kill_learner.py`` kills as often as that (default 6),
``KILL_SEED=7`` draws other points.
"""

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.runtime.resume import newest_run
from tests.forked import Forker
from tests.run_results import require_same
from tests.tiny_run import tiny_recipe

KILLS = int(os.environ.get("KILLS", "6"))
SEED = int(os.environ.get("KILL_SEED", "0"))
SAME = (
    "steps",
    "started",
    "trained",
    "dropped",
    "heldout_accuracy_before",
    "heldout_accuracy_after",
)
PER_LIFE = 5  # kills of one run, before it may get through


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


def recipe_in(folder: Path) -> Path:
    return tiny_recipe(
        folder,
        trainer={"steps": 5, "checkpoint_every": 2, "eval_every": 2, "keep_checkpoints": 2},
        rollout={
            "deterministic": True
        },  # else log-probs may depend on which requests happened to arrive together
    )


class Life:
    """One run through its kills."""

    def __init__(self, forker: Forker, recipe: Path) -> None:
        self._forker = forker
        self.recipe = recipe
        self.run = recipe.parent / "run"
        self.log = recipe.parent / "log.txt"

    def command(self) -> list[str]:
        """What a user would type now."""
        try:
            recipe_run = self.recipe.parent / "run"
            self.run = newest_run(recipe_run)
        except CheckpointError:
            self.run = recipe_run  # nothing was saved: it starts anew
            return ["train", str(self.recipe)]
        return ["train", str(self.recipe), "--resume"]

    def killed(self, chance: random.Random, cpu_seconds: float, changes: int) -> tuple[bool, str]:
        """Starts or resumes it, and kills it at a random point; whether it was still there, and
        which point.
        """
        arguments = self.command()
        if chance.random() < 0.5:
            die_at = chance.randint(1, changes)
            moment = None
            running = self._forker.start(*arguments, log=self.log, die_at=die_at)
            point = f"change {die_at} of the file system"
        else:
            die_at = None
            moment = chance.uniform(0.0, cpu_seconds)
            running = self._forker.start(*arguments, log=self.log)
            running.reach(moment)
            running.kill()
            point = f"{moment:.2f} seconds of processor time"
        status = running.wait()
        assert status in (0, -signal.SIGKILL), self.log.read_text()[-3000:]
        return status != 0, f"{' '.join(arguments[2:]) or 'from the start'}, {point}"

    def ends_well(self) -> None:
        running = self._forker.start(*self.command(), log=self.log)
        assert running.wait() == 0, self.log.read_text()[-3000:]


@pytest.mark.timeout(300 + 60 * KILLS)
def test_whenever_a_run_is_killed_it_resumes_and_ends_with_the_same_bits(
    forker: Forker, tmp_path: Path
):
    chance = random.Random(SEED)
    undisturbed = Life(forker, recipe_in(tmp_path / "undisturbed"))
    running = forker.start("train", str(undisturbed.recipe), log=undisturbed.log)
    used = 0.0
    while not running.ended:
        used = running.cpu_seconds
    assert running.wait() == 0, undisturbed.log.read_text()[-3000:]
    changes = int(re.findall(r"(\d+) changes of the file system", undisturbed.log.read_text())[-1])
    kills = 0
    lives = 0
    while kills < KILLS:
        life = Life(forker, recipe_in(tmp_path / f"life-{lives}"))
        lives = lives + 1
        points = []
        for _ in range(PER_LIFE):
            killed, point = life.killed(chance, used, changes)
            points.append(point)
            kills += killed
            if not killed or kills == KILLS:
                break
        print(f"life {lives}:", *points, sep="\n  ")  # shown if it fails
        if killed:
            life.ends_well()
        require_same(undisturbed.run, newest_run(life.run))
        summaries = [
            json.loads((run / "summary.json").read_text())
            for run in (undisturbed.run, newest_run(life.run))
        ]
        assert len({json.dumps([s[key] for key in SAME], sort_keys=True) for s in summaries}) == 1
    assert kills == KILLS
