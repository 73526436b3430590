"""A job: a command that the runner starts for a task, the machine it runs on, and the sandbox as that machine.

The program runs in one sandbox, the tests in another, on the working folder that the program left.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ValidationError

from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.errors import ToolError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox

RUNNER = Path(__file__).with_name("runner.py")
GRACE_SECONDS = 10.0  # for the runner to unpack, to pack the working folder and to end
OUTPUT_BYTES = 16 << 20  # of the runner, whose result holds the working folder
PORT = 8080  # of the endpoint, on the loopback of the program
REWARD_FILE = "logs/verifier/reward.txt"


class JobResult(BaseModel):
    """What the runner printed; a program beside it could have forged it, so its shape is checked."""

    exit_code: int | None = None
    stopped: str | None = None
    stdout: str = ""
    stderr: str = ""
    workspace: str | None = None
    read_back: str | None = None

    @classmethod
    def parse(cls, printed: str | bytes, *, stopped: str, stderr: str) -> JobResult:
        """Return what the runner printed; if that is no result, one that says what ``stopped`` it."""
        try:
            return cls.model_validate_json(printed)
        except ValidationError:
            return cls(stopped=stopped, stderr=stderr[-4000:])


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentProgram:
    """The agent's program.

    Attributes:
        argv: the command line.
        env: variables besides the task's own.
        files: its files, by path below ``/tmp``.
        endpoint: Unix socket of the endpoint, which the program reaches at ``127.0.0.1:PORT``.
        seconds: its time limit.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    endpoint: Path
    seconds: float


class TaskMachine(ABC):
    """Where the program of one task runs, and afterwards the task's tests on the files it left."""

    @abstractmethod
    async def run_program(self, program: AgentProgram) -> JobResult:
        """Run the agent's program to its end.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    @abstractmethod
    async def run_tests(self, seconds: float) -> JobResult:
        """Run the task's tests on the files the program left; ``read_back`` is the reward file's text.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    async def close(self) -> None:
        """Remove what is left of the machine. The default has nothing to remove."""
        return None


def archive(files: Mapping[str, bytes], *, folders: Sequence[str], workspace: bytes | None = None) -> bytes:
    """Return a tar archive.

    Args:
        files: contents by path.
        folders: folders that exist even if they are empty.
        workspace: another tar archive, whose files and folders go below ``folders[0]``.

    Raises:
        tarfile.TarError: ``workspace`` is not a tar archive.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            packed.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            packed.addfile(entry, io.BytesIO(data))
        if workspace is not None:
            _add_workspace(packed, workspace, folders[0])
    return buffer.getvalue()


def _add_workspace(packed: tarfile.TarFile, workspace: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(workspace), mode="r:") as left:
        for member in left:
            name = PurePosixPath(member.name)
            if not (member.isfile() or member.isdir()) or name.is_absolute() or ".." in name.parts:
                continue  # links could lead the tests elsewhere
            member.name = str(PurePosixPath(folder) / name)
            packed.addfile(member, left.extractfile(member) if member.isfile() else None)


_FOLDERS = ("app", "logs", "logs/verifier", "tests")


class SandboxedTask(TaskMachine):
    """Runs one task in ``sandbox``. The program never shares a sandbox with the tests."""

    def __init__(self, sandbox: Sandbox, task: CommandTask) -> None:
        self._sandbox = sandbox
        self._task = task
        self._workspace: str | None = None

    async def run_program(self, program: AgentProgram) -> JobResult:
        job = {"argv": list(program.argv), "env": {**self._task.env, **program.env}, "port": PORT, "read_back": None}
        files = {f"app/{name}": data for name, data in self._task.files.items()}
        packed = archive({**files, **program.files}, folders=_FOLDERS)
        done = await self._run(job, {"job.tar": packed, "endpoint.sock": program.endpoint}, program.seconds)
        self._workspace = done.workspace
        return done

    async def run_tests(self, seconds: float) -> JobResult:
        if self._workspace is None:
            return JobResult(stopped="the program left no working folder, or one that is too large")
        tests = {f"tests/{name}": data for name, data in self._task.tests.items()}
        try:
            packed = archive(tests, folders=_FOLDERS, workspace=base64.b64decode(self._workspace))
        except (OSError, tarfile.TarError, binascii.Error, EOFError) as error:
            return JobResult(stopped=f"the program left no readable working folder: {error}")
        job = {"argv": self._task.verifier, "env": dict(self._task.env), "port": None, "read_back": REWARD_FILE}
        return await self._run(job, {"job.tar": packed}, seconds)

    async def _run(self, job: dict[str, Any], files: dict[str, Any], seconds: float) -> JobResult:
        links = {self._task.workdir: Link("app"), "/tests": Link("tests"), "/logs": Link("logs")}
        job |= {"seconds": seconds, "root": ".", "workdir": "app"}
        try:
            result = await self._sandbox.run(
                [self._sandbox.python, "runner.py"],
                stdin=json.dumps(job).encode(),
                files={"runner.py": RUNNER.read_bytes(), **links, **files},
                limits=replace(self._sandbox.limits, wall_seconds=seconds + GRACE_SECONDS),
            )
        except ToolError as error:
            raise TrajectoryError(f"agent 'command': {error}") from error
        stopped = str(result.stopped or f"exit status {result.exit_code} of the sandbox")
        return JobResult.parse(result.stdout, stopped=stopped, stderr=result.stderr)
