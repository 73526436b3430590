"""Temporary folders of processes that were killed."""

import subprocess
import sys
from pathlib import Path

from jax_agent_rl.owned_folder import OwnedFolder

OWNER = """
import sys
from jax_agent_rl.owned_folder import OwnedFolder
folder = OwnedFolder("kind-", sys.argv[1])
(folder.path / "large").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def owner(parent: Path) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_of_its_kind_and_that_of_a_living_one_is_not(tmp_path):
    killed, abandoned = owner(tmp_path)
    living, owned = owner(tmp_path)
    with killed, living:
        killed.kill()
        killed.wait()
        assert (abandoned / "large").exists()
        OwnedFolder("another-kind-", tmp_path).close()
        assert abandoned.exists()
        mine = OwnedFolder("kind-", tmp_path)
        assert not abandoned.exists() and (owned / "large").exists()
        living.kill()
    mine.close()
    assert not mine.path.exists()


def test_folders_without_a_lock_are_left_alone_and_closing_twice_is_no_error(tmp_path):
    (stranger := tmp_path / "kind-of-somebody").mkdir()
    folder = OwnedFolder("kind-", tmp_path)
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == [stranger]
