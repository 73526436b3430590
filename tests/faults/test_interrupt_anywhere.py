"""Ctrl-C and SIGTERM at any moment of a run: it ends, with the last finished step saved.

Moments are drawn from a seed: half of them of the processor time of a whole life, most of which is
loading and compiling, half of the time after one of its steps: evaluating, sampling, learning,
saving, closing. Ctrl-C goes to the whole process group, as a terminal sends it; some come twice.

``INTERRUPTS=50 python -m pytest -s tests/faults/test_interrupt_anywhere.py`` interrupts each
trainer as often as that (default 2) and prints how long each took (five seconds are promised on an
idle machine); ``INTERRUPT_SEED=7`` draws other moments.
"""

import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import Command, Forker
from tests.run_results import final_state
from tests.tiny_run import tiny_recipe

INTERRUPTS = int(os.environ.get("INTERRUPTS", "2"))
SEED = int(os.environ.get("INTERRUPT_SEED", "0"))
PATIENCE = 60.0  # seconds
STEPS = 5
A_STEP = 1.0  # processor seconds, about; evaluations and the end of the run are part of it
UNNOTICED = (
    -signal.SIGINT,
    -signal.SIGTERM,
    1,
)  # before the run had begun to listen: Python's or the shell's own way


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """When and how: so much processor time after a step (0: the start), with which signal."""

    step: int
    cpu_seconds: float
    signal: signal.Signals
    twice: bool

    @classmethod
    def draw(cls, chance: random.Random, life: float) -> "Interrupt":
        step = chance.choice([0, chance.randint(1, STEPS)])
        return cls(
            step=step,
            cpu_seconds=chance.uniform(0.0, A_STEP if step else life),
            signal=chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM]),
            twice=chance.random() < 0.2,
        )

    def send(self, running: Command, log: Path) -> float:
        """Interrupts it at its moment; returns the seconds until it was gone."""
        while self.step and finished_steps(log.read_text()) < self.step and not running.ended:
            pass
        running.reach(self.cpu_seconds + (running.cpu_seconds if self.step else 0.0))
        began = time.monotonic()
        for _ in range(1 + self.twice):
            if not running.ended:
                send = os.kill if self.signal == signal.SIGTERM else os.killpg
                send(running.pid, self.signal)
        running.wait()
        return time.monotonic() - began


def finished_steps(said: str) -> int:
    return max(map(int, re.findall(rf"^ *(\d+)/{STEPS} ", said, re.MULTILINE)), default=0)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def forker(scratch: Path):
    with Forker(TMPDIR=str(scratch)) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Path]:
    """Processor time of a whole synchronous run, and its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    running = forker.start("train", str(recipe_in(folder, "sync")), log=folder / "log.txt")
    used = 0.0
    while not running.ended:
        used = running.cpu_seconds
    assert running.wait() == 0, (folder / "log.txt").read_text()[-3000:]
    return used, folder / "run"


def recipe_in(folder: Path, mode: str) -> Path:
    trainer = {"mode": mode, "steps": STEPS, "checkpoint_every": 0, "eval_every": 2}
    # Two updates a step: it can be interrupted between them.
    return tiny_recipe(
        folder, trainer=trainer, rollout={"deterministic": True}, learner={"ppo_epochs": 2}
    )


@pytest.mark.timeout(300 + 60 * INTERRUPTS)
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_an_interrupted_run_saves_its_last_step_and_leaves_nothing(
    mode: str, forker: Forker, undisturbed: tuple[float, Path], scratch: Path, tmp_path: Path
):
    chance = random.Random(f"{SEED} {mode}")
    recipe = recipe_in(tmp_path, mode)
    saved = []
    caches = set(scratch.iterdir())  # of libraries; the undisturbed run left nothing else
    for number in range(INTERRUPTS):
        interrupt = Interrupt.draw(chance, undisturbed[0])
        run = tmp_path / f"interrupted-{number}"
        log = tmp_path / f"log-{number}.txt"
        log.touch()
        running = forker.start("train", str(recipe), f"run_dir={run}", log=log)
        seconds = interrupt.send(running, log)
        said = log.read_text()
        step = require_saved(running.wait(), interrupt, run, said)
        saved += [run] if step else []
        outcome = "nothing to save" if step is None else f"step {step} saved"
        print(f"{mode}: {interrupt}: {seconds:.1f} s, {outcome}")
        require_gone(forker, running)
        assert set(scratch.iterdir()) == caches
    for run in saved[-1:]:
        resumed = forker.start(
            "train", str(recipe), f"run_dir={run}", "--resume", log=tmp_path / "resumed.txt"
        )
        assert resumed.wait() == 0, (tmp_path / "resumed.txt").read_text()[-3000:]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert summary["trained"] == STEPS * 8
        assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())
        if mode == "sync":
            expected = final_state(undisturbed[1])
            got = final_state(run)
            assert {name: x.tobytes() for name, x in expected.items()} == {
                name: x.tobytes() for name, x in got.items()
            }


def require_saved(status: int, interrupt: Interrupt, run: Path, said: str) -> int | None:
    """Return the saved step; None if there was nothing to save, or no time to (a second signal)."""
    assert "Traceback" not in said, said[-3000:]
    assert status in (0, 130) or (status in UNNOTICED and "run folder" not in said), (
        status,
        interrupt,
        said[-2000:],
    )
    checkpoints = {p.name for p in (run / "checkpoints").glob("*")}
    finished = finished_steps(said)
    if status == 0 or "everything is saved" in said:
        assert checkpoints == {str(STEPS)}
        return None
    if named := re.search(r"a checkpoint of step (\d+) is saved", said):
        assert checkpoints == {named[1]} == {str(finished)}
        return finished
    assert interrupt.twice or (not finished and not checkpoints), said[-2000:]
    return None


def require_gone(forker: Forker, running: Command) -> None:
    """No process of its group, nor one it has started in another: so no port is bound either."""
    deadline = time.monotonic() + PATIENCE
    while forker.orphans and time.monotonic() < deadline:
        assert not running.wait() > 255  # helpers end when they notice that their input has ended
    assert not forker.orphans
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)
