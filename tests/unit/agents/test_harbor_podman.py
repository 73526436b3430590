"""A trial in Harbor's environment ``podman``, in an image of this machine's own programs."""

# pyright: reportMissingImports=false
# Harbor is in an environment of its own (launch/harbor_environment.sh).

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("harbor")

from harbor.environments.podman import PodmanEnvironment

from tests.harbor_harnesses import play, write_task

pytestmark = pytest.mark.harbor
IMAGE = "harbor.test/programs:1"
PROGRAMS = (
    "bash cat chmod chown env find gzip id ls mkdir mv pwd rm sh sleep stat tar test touch true"
).split()
NO_NETWORK = "services:\n  main:\n    network_mode: none\n"
TEST_SH = (
    'test "$(cat /work/answer.txt)" = 77 && reward=1 || reward=0\n'
    "ls /tests\necho $reward > /logs/verifier/reward.txt\n"
)


def skip_unless_it_runs(command: Sequence[str]) -> None:
    """Run a command; skip the test, and say what it printed, if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode != 0:
        pytest.skip(f"`{' '.join(command)}`: {result.stderr.strip()[-500:]}")


def write_image(archive: Path) -> None:
    """Write the file system of an image: programs of this machine, and what they are linked to."""
    files: set[str] = set()
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None, name
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files.add(program)
        files.update(re.findall(r"(/\S+) \(0x", linked))

    with tarfile.open(archive, "w", dereference=True) as tar:
        for file in sorted(files):
            # Where /bin and /lib are links, both of their names lead to the same file.
            inside = re.sub("^/(bin|lib|lib64|sbin)/", r"/usr/\1/", file)
            tar.add(file, inside)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = f"usr/{name}"
            tar.addfile(link)
        for name in ("tmp", "work"):
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o777
            tar.addfile(folder)
        users = b"root:x:0:0:root:/tmp:/bin/bash\n"
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(users)
        tar.addfile(passwd, io.BytesIO(users))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        PodmanEnvironment.preflight({})
    except SystemExit as error:
        pytest.skip(str(error))
    skip_unless_it_runs(PodmanEnvironment.runtime().compose_cmd("version"))

    archive = tmp_path_factory.mktemp("image") / "image.tar"
    write_image(archive)
    skip_unless_it_runs(["podman", "import", str(archive), IMAGE])
    try:
        skip_unless_it_runs(["podman", "run", "--rm", "--network", "none", IMAGE, "true"])
        yield IMAGE
    finally:
        subprocess.run(["podman", "rmi", "--force", IMAGE], capture_output=True, check=False)


async def test_a_trial_runs_in_podman_from_its_start_to_its_reward(image: str, tmp_path: Path):
    task = write_task(
        tmp_path,
        settings=f'[environment]\ndocker_image = "{image}"\nworkdir = "/work"\n',
        test_sh=TEST_SH,
    )
    (task / "environment" / "Dockerfile").unlink()
    (task / "environment" / "docker-compose.yaml").write_text(NO_NETWORK)
    script = ["pwd; id -u", "echo 77 > answer.txt", "done"]
    trajectory, output = await play(script, task, environment="podman")
    assert trajectory.num_turns == 3
    assert trajectory.messages[2]["content"].split()[:3] == ["output:", "/work", "0"]
    assert output["reward"] == 1.0
    assert "check.py" in output["verifier"]

    running = ["podman", "ps", "--all", "--quiet", "--filter", f"ancestor={image}"]
    left = subprocess.run(running, capture_output=True, text=True, check=True)
    assert left.stdout == ""
