"""What setting a host up does to the project's folder there. The command is run here, in a home
folder of its own.
"""

import os
import subprocess
from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.tpu import job
from tests.cloud import job_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    subprocess.run(["git", "-C", str(root), "init", "-q"], check=True)
    return root


def set_up(checkout: Path, home: Path, *, prepare: str) -> set[str]:
    """Copies and sets up; the files in the project's folder then."""
    home.mkdir(exist_ok=True)
    job.pack(checkout, home / job.ARCHIVE, extra={job.CONFIG: b"seed: 1"})
    task = job_of("v5e:2x2", bucket=None, prepare=prepare, install=False)
    command = job.set_up(task, 0)[-1].removeprefix("--command=")
    subprocess.run(
        ["bash", "-c", command], cwd=home, env=os.environ | {"HOME": str(home)}, check=True
    )
    folder = home / job.CODE
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_renamed_file_is_gone_there_and_what_was_prepared_stays(checkout: Path, tmp_path: Path):
    for name in ("kept.py", "old name.py", "alt é.py"):
        (checkout / name).write_text("1")
    prepare = "mkdir -p data .venv-tpu && touch data/rows.jsonl .venv-tpu/python"
    prepared = {"data/rows.jsonl", ".venv-tpu/python", job.CONFIG}
    assert set_up(checkout, tmp_path / "home", prepare=prepare) == {
        "kept.py",
        "old name.py",
        "alt é.py",
        *prepared,
    }
    (checkout / "old name.py").rename(checkout / "new.py")
    (checkout / "alt é.py").unlink()
    assert set_up(checkout, tmp_path / "home", prepare="true") == {"kept.py", "new.py", *prepared}
