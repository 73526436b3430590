"""Storage that fills up or rots: said loudly, and an intact checkpoint is left to go on from."""

import gc
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer
from tests.messages import assert_message, raises
from tests.tiny_run import tiny_recipe
from tests.warm import python


def state(step: int) -> dict:
    rng = np.random.default_rng(step)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {
        "params": {"w": draw(64, 300), "v": draw(7).astype(jnp.bfloat16)},
        "updates": jnp.int32(step),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    checkpointer = Checkpointer(tmp_path / "c", keep=3)
    for step in (1, 2):
        checkpointer.save(step, state(step), {"step": step})
    checkpointer.close()
    return tmp_path / "c"


def restored_equals(
    folder: Path, step: int, *, named: int | None = None, saved: dict | None = None
) -> bool:
    """Whether what comes back (of the newest checkpoint, or the one named) is ``saved``, or else
    ``state(step)``.
    """
    checkpointer = Checkpointer(folder, keep=3)
    try:
        found_step, got, progress = checkpointer.restore(state(0), step=named)
    finally:
        checkpointer.close()
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), got, saved or state(step)
    )
    return found_step == progress["step"] == step and all(jax.tree.leaves(same))


def damages(folder: Path) -> dict[str, tuple[Path, bytes | None]]:
    """Ways to damage the newest checkpoint: each of its files gone, cut short, or with a bit
    flipped.
    """
    damaged: dict[str, tuple[Path, bytes | None]] = {}
    for file in sorted(p for p in (folder / "2").rglob("*") if p.is_file()):
        name = str(file.relative_to(folder))
        content = file.read_bytes()
        flipped = bytearray(content)
        if content:
            flipped[len(content) // 2] ^= 0x10
        damaged |= {
            f"no {name}": (file, None),
            f"half of {name}": (file, content[: len(content) // 2]),
        }
        damaged |= {f"a bit of {name}": (file, bytes(flipped))}
    return damaged


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_damage_does_not_matter_or_is_reported_with_the_previous_checkpoint(
    folder: Path, tmp_path: Path
):
    """Never a silently wrong state, and nothing is printed later of reads that were left."""
    noticed = []
    for name, (file, content) in damages(folder).items():
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        target = copy / file.relative_to(folder)
        target.unlink()
        if content is not None:
            target.write_bytes(content)
        try:
            assert restored_equals(copy, 2), name
        except CheckpointError as error:
            assert "checkpoint 2 in" in str(error) and "damaged" in str(error), (name, str(error))
            assert "--resume --step 1" in str(error)
            assert restored_equals(copy, 1, named=1), name
            noticed.append(name)
    gc.collect()  # ends reads that Orbax has left unfinished
    assert any("a bit of 2/state/ocdbt" in name for name in noticed), noticed
    assert any("half of 2/state/ocdbt" in name for name in noticed), noticed


def test_going_back_to_a_step_forgets_the_ones_after_it(folder: Path):
    checkpointer = Checkpointer(folder, keep=3)
    checkpointer.save(3, state(3), {"step": 3})
    checkpointer.close()
    assert restored_equals(folder, 1, named=1)

    checkpointer = Checkpointer(folder, keep=3)
    checkpointer.save(2, state(22), {"step": 2})
    checkpointer.close()
    assert restored_equals(folder, 2, named=2, saved=state(22))
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_a_state_that_is_saved_already_is_not_written_again(folder: Path):
    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    checkpointer = Checkpointer(folder, keep=3)
    checkpointer.save(2, state(2), {"step": 2})
    checkpointer.close()
    assert {
        file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()
    } == written


def test_a_damaged_checkpoint_of_the_step_is_replaced(folder: Path):
    (folder / "2" / "notes" / "metadata").write_text("[]")
    checkpointer = Checkpointer(folder, keep=3)
    checkpointer.save(2, state(2), {"step": 2})
    checkpointer.close()
    assert restored_equals(folder, 2)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(folder: Path):
    with raises(CheckpointError, value="step 7", fix="[1, 2]"):
        restored_equals(folder, 7, named=7)


FULL = """
import gc, pathlib, resource, sys, threading
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer
from tests.faults.test_checkpoint_faults import restored_equals, state

def check_later(checkpointer):
    "As the next step does, when the writing has ended."
    for thread in threading.enumerate():
        if thread.name == "save_finalize":
            threading.Thread.join(thread)  # Orbax's own join raises
    checkpointer.check()

folder = pathlib.Path(sys.argv[1])
checkpointer = Checkpointer(folder, keep=1)
checkpointer.save(1, state(1), {"step": 1})
checkpointer.wait()
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
# No file can grow beyond this: like a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
for finish in (check_later, Checkpointer.wait, Checkpointer.close):
    try:
        checkpointer.save(2, state(2), {"step": 2})
        finish(checkpointer)
        print("not noticed")
    except CheckpointError as error:
        print("said:", error)
gc.collect()  # asyncio tells only then of writes that nothing awaited
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
print("kept:", restored_equals(folder, 1))
checkpointer = Checkpointer(folder, keep=1)
checkpointer.save(2, state(2), {"step": 2})
checkpointer.close()
print("later:", restored_equals(folder, 2), sorted(p.name for p in folder.iterdir()))
"""


def output_of(code: str, *arguments: object) -> str:
    command = [*python(), "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "never retrieved" not in result.stderr, result.stderr[:2000]
    return result.stdout


def test_a_full_disk_is_said_and_the_checkpoint_before_restores(tmp_path: Path):
    output = output_of(FULL, tmp_path / "c")
    assert "not noticed" not in output and output.count("said:") == 3, output
    assert "could not be written" in output
    assert "checkpoint 1 is intact" in output
    assert "too large" in output
    assert "kept: True" in output and "later: True ['2']" in output, output


def test_a_run_whose_disk_fills_up_ends_with_a_message_and_resumes(tmp_path: Path):
    """The disk is full, as it were, from the third checkpoint on."""
    recipe = tiny_recipe(tmp_path, trainer={"steps": 6, "checkpoint_every": 1})
    code = """
import resource, sys
from jax_agent_rl import cli
from jax_agent_rl.learner import checkpoint

save = checkpoint.Checkpointer.save

def limited(self, step, *arguments):
    if step == 3:
        self.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    save(self, step, *arguments)

checkpoint.Checkpointer.save = limited
sys.argv = ["jax-agent-rl", "train", sys.argv[1]]
cli.main()
"""
    command = [*python(), "-c", code, str(recipe)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2, result.stderr[-3000:]
    assert_message(result.stderr, key="checkpoint", value="could not be written")
    assert "checkpoint 2 is intact" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr[:3000]
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe), "--resume"]
    resumed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert resumed.returncode == 0 and "resumed after step 2" in resumed.stdout, resumed.stderr[
        -2000:
    ]
