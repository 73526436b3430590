"""What of a working tree goes to the hosts."""

import subprocess
import tarfile
from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.errors import LaunchError
from tests.messages import raises


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    for name, text in {"kept.py": "old", "gone.py": "", ".gitignore": "data/\n"}.items():
        (root / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root


def packed(root: Path, target: Path, **extra: bytes) -> dict[str, bytes]:
    job.pack(root, target, extra=extra)
    contents = {}
    with tarfile.open(target) as opened:
        for entry in opened:
            contents[entry.name] = opened.extractfile(entry).read()  # type: ignore[union-attr]
    return contents


def test_the_working_tree_goes_as_it_stands_but_for_what_git_ignores(
    checkout: Path, tmp_path: Path
):
    (checkout / "kept.py").write_text("changed")
    (checkout / "gone.py").unlink()
    (checkout / "new.py").write_text("new")
    (checkout / "data").mkdir()
    (checkout / "data" / "rows.jsonl").write_text("{}")
    names = packed(checkout, tmp_path / "x.tar.gz", config=b"seed: 1")
    assert names == {
        "kept.py": b"changed",
        "new.py": b"new",
        ".gitignore": b"data/\n",
        "config": b"seed: 1",
    }


def test_outside_a_checkout_nothing_tells_what_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with raises(LaunchError, value="not a git checkout"):
        job.pack(tmp_path, tmp_path / "x.tar.gz", extra={})
