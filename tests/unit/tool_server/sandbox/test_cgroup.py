"""Cgroups, in folders that look like theirs; and, where this process may make some, real ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, StopCause, open_sandbox
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, find_bwrap
from jax_agent_rl.tool_server.sandbox.limits import (
    Cgroups,
    enter_cgroup,
    find_cgroups,
    ran_out_of_memory,
)
from tests.capabilities import needs_bwrap

LIMITS = SandboxLimits(memory_bytes=64 << 20, disk_bytes=1 << 20, processes=8)


class FakeCgroups(Cgroups):
    """Its folders are ordinary ones, in which the kernel's files have to be made."""

    created = ()

    def make(self, limits):
        group = super().make(limits)
        self.created += (group,)
        return group


@pytest.fixture
def hierarchy(tmp_path):
    """What a service sees: its own cgroup passes no controllers on, the one above does."""
    service = tmp_path / "mount" / "system.slice" / "own.service"
    service.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/system.slice/own.service\n")
    (tmp_path / "mountinfo").write_text(
        f"24 1 0:2 / / rw - ext4 x rw\n30 24 0:26 / {tmp_path}/mount rw - cgroup2 c rw\n"
    )
    for folder, controllers in (
        (service, ""),
        (service.parent, "cpu memory pids"),
        (service.parent.parent, "memory"),
    ):
        (folder / "cgroup.subtree_control").write_text(controllers + "\n")
    return tmp_path


def test_the_nearest_cgroup_whose_children_limit_memory_is_taken(hierarchy):
    cgroups = find_cgroups(hierarchy)
    assert cgroups is not None
    assert cgroups.make(LIMITS).parent == hierarchy / "mount" / "system.slice"


@pytest.mark.parametrize("controllers", ["", "cpu pids"])
def test_without_a_memory_controller_there_are_none(hierarchy, controllers):
    for file in (hierarchy / "mount").rglob("cgroup.subtree_control"):
        file.write_text(controllers)
    assert find_cgroups(hierarchy) is None
    (hierarchy / "mountinfo").write_text("24 1 0:2 / / rw - ext4 x rw\n")
    assert find_cgroups(hierarchy) is None


def test_a_cgroup_that_no_process_can_enter_is_passed_over(hierarchy, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.tool_server.sandbox.limits.ENTER", "exit 1")
    assert find_cgroups(hierarchy) is None


def test_memory_has_room_for_the_writable_folders(tmp_path):
    group = Cgroups(tmp_path).make(LIMITS)
    assert int((group / "memory.max").read_text()) == (64 + 2 + 16) << 20


def test_a_cgroup_that_is_still_busy_is_removed_when_the_next_is_made(tmp_path):
    cgroups = Cgroups(tmp_path)
    group = cgroups.make(LIMITS)
    cgroups.remove(group)
    assert (
        group.exists()
    )  # an ordinary folder with a file in it, as one with a process in it, cannot be removed
    (group / "memory.max").unlink()
    cgroups.make(LIMITS)
    assert not group.exists()


@pytest.mark.parametrize(
    ("events", "ended"),
    [("oom 3\noom_kill 0\n", False), ("oom 1\noom_kill 2\n", True), (None, False)],
)
def test_the_kernels_count_tells_whether_memory_ran_out(tmp_path, events, ended):
    if events is not None:
        (tmp_path / "memory.events").write_text(events)
    assert ran_out_of_memory(tmp_path) is ended


@needs_bwrap
async def test_a_program_runs_in_its_cgroup_and_ends_for_memory_when_that_says_so(tmp_path):
    cgroups = FakeCgroups(tmp_path)
    bwrap = find_bwrap()
    assert bwrap is not None
    sandbox = Sandbox(
        Bubblewrap(bwrap, Path(sys.executable), cgroups), SandboxLimits(), max_running=1
    )
    assert (await sandbox.run(["sh", "-c", "echo $PPID"])).stdout == "1\n"
    assert int((cgroups.created[0] / "cgroup.procs").read_text()) > 1
    process = await sandbox.start(["cat"])
    (cgroups.created[1] / "memory.events").write_text("oom_kill 1\n")
    assert (await process.exchange(b"MARK\n", b"MARK"))[2] is StopCause.MEMORY
    assert not process.alive


def test_a_command_enters_before_it_runs(tmp_path):
    entered = subprocess.run(
        enter_cgroup(tmp_path, ["sh", "-c", "echo $$ $0", "a b"]), capture_output=True, text=True
    )
    pid, argument = entered.stdout.rstrip("\n").split(" ", 1)
    assert argument == "a b"
    assert (tmp_path / "cgroup.procs").read_text().strip() == pid


@needs_bwrap
@pytest.mark.skipif(
    find_cgroups() is None, reason="a cgroup (version 2) below which this process may make others"
)
async def test_what_the_kernel_holds_counts_in_a_real_cgroup():
    """Pipes, which nothing else counts."""
    source = """
import fcntl, os, time
for _ in range(12):
    if os.fork() == 0:
        try:
            while True:
                out = os.pipe()[1]
                os.set_blocking(out, False)
                os.write(out, bytes(1 << 16))
        except OSError: pass
        time.sleep(600)
time.sleep(600)
"""
    sandbox = await open_sandbox(
        limits=SandboxLimits(memory_bytes=32 << 20, disk_bytes=1 << 20, wall_seconds=30)
    )
    result = await sandbox.run([sandbox.python, "-c", source])
    assert result.stopped is StopCause.MEMORY
