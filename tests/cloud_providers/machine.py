"""A sandbox of a provider: a folder, in which commands run as root of its own file system."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.isolation import find_bwrap


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a command ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class CloudMachine:
    """A sandbox until it is removed.

    Args:
        folder: its file system; the system's programs are shown in it.
        labels: what its creator knows it by.
    """

    def __init__(self, folder: Path, labels: Mapping[str, str]) -> None:
        self.machine_id = uuid.uuid4().hex
        self.labels = dict(labels)
        self._folder = folder / self.machine_id
        self._folder.mkdir(parents=True)
        for name in ("etc", "tmp", "work"):
            (self._folder / name).mkdir()
        (self._folder / "etc" / "passwd").write_text("root:x:0:0::/tmp:/bin/bash\n")
        # There is no other user to become: of `su root -s /bin/bash -c COMMAND`, bash is left.
        self.write("/sbin/su", b'#!/bin/sh\nshift 3\nexec bash "$@"\n')
        (self._folder / "sbin" / "su").chmod(0o755)
        self._processes: set[asyncio.subprocess.Process] = set()

    async def run(
        self,
        command: str,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command of the shell to its end."""
        bwrap = find_bwrap()
        assert bwrap is not None
        isolation = [
            *(str(bwrap), "--die-with-parent", "--unshare-user", "--unshare-pid", "--uid", "0"),
            *("--gid", "0", "--bind", str(self._folder), "/", "--ro-bind", "/usr", "/usr"),
            *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
            *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
            *("--chdir", cwd, "--clearenv", "--setenv", "PATH", "/sbin:/usr/bin:/bin"),
        ]
        for name, value in (env or {}).items():
            isolation += ["--setenv", name, value]
        process = await asyncio.create_subprocess_exec(
            *isolation,
            *("bash", "-c", command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._processes.add(process)
        try:
            stdout, stderr = await process.communicate(stdin)
        finally:
            self._processes.discard(process)
        assert process.returncode is not None
        return CommandResult(exit_code=process.returncode, stdout=stdout, stderr=stderr)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, with the folders that it is in."""
        file = self._folder / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def read(self, path: str) -> bytes | None:
        """Return the contents of a file; None if there is none."""
        file = self._folder / path.lstrip("/")
        if not file.is_file():
            return None
        return file.read_bytes()

    def remove(self) -> None:
        """End everything that runs in it, and forget its files."""
        for process in self._processes:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class CloudServer:
    """The machines of a provider, and what goes wrong with them.

    Args:
        folder: file systems of the machines.

    Attributes:
        machines: those that exist, by id.
        created: number of machines that there have been.
        create_status: HTTP status with which creations are refused; None: they are not.
        answers_creations: whether whoever creates a machine is told.
        dies_at: text of a command at which a machine is gone; None: it stays.
    """

    name: str
    needs_dockerfile = False
    """Whether the environment builds an image, instead of taking the task's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.machines: dict[str, CloudMachine] = {}
        self.created = 0
        self.create_requests = 0
        self.create_status: int | None = None
        self.answers_creations = True
        self.dies_at: str | None = None

    def create(self, labels: Mapping[str, str]) -> CloudMachine:
        """Return a new machine."""
        machine = CloudMachine(self._folder, labels)
        self.machines[machine.machine_id] = machine
        self.created += 1
        return machine

    def remove(self, machine_id: str) -> None:
        """Remove a machine, if it is still there."""
        machine = self.machines.pop(machine_id, None)
        if machine is not None:
            machine.remove()

    def machine_for(self, machine_id: str, command: str) -> CloudMachine | None:
        """Return the machine that a command is for; None if it is gone."""
        if self.dies_at is not None and self.dies_at in command:
            self.remove(machine_id)
        return self.machines.get(machine_id)
