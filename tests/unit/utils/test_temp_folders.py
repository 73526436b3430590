"""Temporary folders go when their owner does, however it goes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder

OWNER = """
import os, sys
from pathlib import Path
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder, remove_temp_folders
folder = make_temp_folder("kept-", Path(sys.argv[1]))
(folder / "file").write_text("some")
print(folder, flush=True)
sys.stdin.readline()
remove_temp_folders()
os._exit(0)
"""


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and leaves at once when asked to."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_process_that_leaves_in_haste_takes_its_folders_with_it(tmp_path: Path):
    process, folder = owner(tmp_path)
    assert (folder / "file").read_text() == "some"
    assert folder.parent == tmp_path
    process.communicate("go\n", timeout=60)
    assert not list(tmp_path.iterdir())


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path):
    (tmp_path / "other-kind").mkdir()
    killed, orphaned_folder = owner(tmp_path)
    living, living_folder = owner(tmp_path)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL and orphaned_folder.is_dir()
    mine = make_temp_folder("kept-", tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"other-kind", living_folder.name, mine.name}
    assert (living_folder / "file").exists()
    remove_temp_folder(mine)
    remove_temp_folder(mine)
    assert not mine.exists()
    living.communicate("go\n", timeout=60)
    assert [p.name for p in tmp_path.iterdir()] == ["other-kind"]
    for process in (killed, living):
        process.stdin.close(), process.stdout.close()
