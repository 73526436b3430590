"""A cgroup (version 2) for each program, where this process may make them: it counts what the kernel holds, too.

Everything a program occupies is charged there: its pages, its files in memory, sockets, pipes, page tables, file
locks. Without one, limits of single processes and the count of their sockets have to do.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits

_OWN_BYTES = 16 << 20  # of bubblewrap, and of the program's start
_OWN_PROCESSES = 4
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Cgroups:
    """Factory of cgroups below a parent.

    Args:
        parent: a cgroup whose children have a memory controller.
    """

    def __init__(self, parent: Path):
        self._parent = parent
        self._ended: list[Path] = []

    def work(self) -> bool:
        """Whether a process can be put into a new cgroup here."""
        try:
            if "memory" not in (self._parent / "cgroup.subtree_control").read_text().split():
                return False
            group = self.make(SandboxLimits())
        except OSError:
            return False
        try:
            return subprocess.run(entering(group, ["true"]), capture_output=True, timeout=60).returncode == 0
        finally:
            self.remove(group)

    def make(self, limits: SandboxLimits) -> Path:
        """Return a new cgroup with the limits of a program; raises OSError."""
        self._remove_ended()
        group = self._parent / f"jax-agent-rl-{secrets.token_hex(8)}"
        group.mkdir()
        values = {
            "memory.max": limits.memory_bytes + 2 * limits.disk_bytes + _OWN_BYTES,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes + _OWN_PROCESSES,
        }
        try:
            for name, value in values.items():
                # Swap and the number of processes are not everywhere among what can be limited.
                if name == "memory.max" or (group / name).exists():
                    (group / name).write_text(str(value))
        except OSError:
            self.remove(group)
            raise
        return group

    def remove(self, group: Path) -> None:
        """Remove a cgroup now or, if its last processes are still ending, when the next one is made."""
        self._ended.append(group)
        self._remove_ended()

    def _remove_ended(self) -> None:
        for group in list(self._ended):
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                self._ended.remove(group)


def entering(group: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` in a cgroup."""
    return ["/bin/sh", "-c", _ENTER, str(group), *command]


def ran_out_of_memory(group: Path) -> bool:
    """Whether the kernel ended a process of the cgroup because it was full."""
    try:
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    except OSError:
        return False
    return int(events.get("oom_kill", 0)) > 0


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """Return where this process may make cgroups that limit memory: below its own one, or below one above that."""
    mount = _mount(proc / "mountinfo")
    own = next((line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")), None)
    if mount is None or own is None:
        return None
    place = mount / own.strip("/")
    for parent in [place, *place.parents]:
        if not parent.is_relative_to(mount):
            break
        cgroups = Cgroups(parent)
        if cgroups.work():
            return cgroups
    return None


def _mount(mountinfo: Path) -> Path | None:
    for line in mountinfo.read_text().splitlines():
        where, _, what = line.partition(" - ")
        if what.startswith("cgroup2 "):
            return Path(where.split()[4])
    return None
