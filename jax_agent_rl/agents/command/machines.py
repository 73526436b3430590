"""Machines that a task runs on: a sandbox, or containers of Docker or Podman (``containers``).

The program and the tests have a sandbox each. The tests start on the working folder that the
program left, rebuilt entry by entry (``workspace``), and with their own files, which the program
never sees::

    files, agent ──► sandbox: program ──► working folder ──checked──► sandbox: tests ──► reward
                                                             tests ──────┘

Nothing else of the first sandbox reaches the second. What interpreters would load from the working
folder on their own is switched off for the tests (``runner.environment``).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax_agent_rl.agents.command.runner import SHOWN_NAMES
from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.agents.command.workspace import (
    Entry,
    JobResult,
    WorkspaceLimits,
    file_entries,
    pack_tree,
    read_result,
)
from jax_agent_rl.config.command_agent import ProgramLimits
from jax_agent_rl.errors import ConfigError, DataError, EnvironmentFailedError, ToolError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox, SandboxLimits

RUNNER = Path(__file__).with_name("runner.py")
ISOLATED = ("-I", "-S", "-B")
"""Options of the runner's Python: nothing but the standard library is found, whatever lies beside
it."""
GRACE_SECONDS = 10.0  # for the runner to write its files, to pack the working folder and to end
PORT = 8080  # of the endpoint, on the loopback of the program
TESTS = "/tests"
LOGS = "/logs"
REWARD_FILE = "logs/verifier/reward.txt"
TEST_SETTINGS = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
"""Files in which pytest looks for settings, in the folder of the tests and those above."""
_SETTINGS_SECTIONS = {
    "pyproject.toml": b"[tool.pytest",
    "tox.ini": b"[pytest]",
    "setup.cfg": b"[tool:pytest]",
}
"""Such a file ends pytest's search for settings only if it has this section; a file of another name
always does."""


class TaskMachine(ABC):
    """Where the program of one task runs, and afterwards the task's tests on the files it left."""

    @abstractmethod
    async def run_program(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        endpoint: Path,
        *,
        seconds: float,
    ) -> JobResult:
        """Run the agent's program to its end.

        Args:
            env: variables besides the task's own.
            files: the program's files, by path below ``/tmp``.
            endpoint: Unix socket of the endpoint, which the program reaches at ``127.0.0.1:PORT``.
            seconds: time limit.

        Raises:
            EnvironmentFailedError: the machine itself failed.
        """

    @abstractmethod
    async def run_tests(self, seconds: float) -> JobResult:
        """Run the task's tests on the files the program left; ``file`` is the reward file's text.

        Raises:
            EnvironmentFailedError: the machine itself failed.
        """

    async def aclose(self) -> None:
        """Remove what is left of the machine. The default has nothing to remove."""
        return None


def with_settings(test_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a task's tests by their paths, with a settings file for pytest among them.

    Without one beside the tests, pytest takes one from the folders above, where the program may
    have written.
    """
    tests = dict(test_files)
    for name in TEST_SETTINGS[1:]:
        if name in tests and _SETTINGS_SECTIONS.get(name, b"") in tests[name]:
            return tests
    tests["pytest.ini"] = b"[pytest]\n"
    return tests


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerJob:
    """What the runner does; its module lists the fields.

    Attributes:
        verifies: whether the command decides the reward: then no interpreter is given the working
            folder's path, and the reward file is returned.
        port: of the relay to the endpoint; None: there is none.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    seconds: float
    verifies: bool = False
    port: int | None = None

    def as_json(self, **machine: Any) -> dict[str, Any]:
        """Return the runner's job; ``machine`` is what the machine adds."""
        return {
            "argv": list(self.argv),
            "env": dict(self.env),
            "seconds": self.seconds,
            "verifies": self.verifies,
            "tests": TESTS,
            "read_back": REWARD_FILE if self.verifies else None,
            "port": self.port,
            "pack": None,
            **machine,
        }


def sandbox_limits(settings: ProgramLimits) -> SandboxLimits:
    """Return the limits of a sandbox whose working folder is read back."""
    return SandboxLimits(
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=settings.memory_mb << 20,
        processes=settings.processes,
        disk_bytes=settings.disk_mb << 20,
        output_bytes=workspace_limits(settings).result_bytes,
    )


def workspace_limits(settings: ProgramLimits) -> WorkspaceLimits:
    """Return the limits of the working folder that tests are handed."""
    return WorkspaceLimits(
        max_bytes=settings.workspace_mb << 20, max_entries=settings.workspace_entries
    )


def check_first_files(entries: Sequence[Entry], limits: WorkspaceLimits) -> None:
    """Check that the tests can be handed at least what a program begins with.

    Raises:
        DataError: they cannot.
    """
    try:
        limits.check(entries)
    except ValueError as error:
        raise DataError(
            f"the working folder of the task: {error}; set workspace_mb and workspace_entries, and"
            " disk_mb above them"
        ) from None


def read_mounts(mounts: Mapping[str, str], *, key: str) -> dict[str, Path]:
    """Return the folders that programs see read-only, by name.

    Args:
        key: of the setting, for the message.

    Raises:
        ConfigError: one of them is not a folder.
    """
    folders = {}
    for name, path in mounts.items():
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"{key}.{name}={path!r} is not a folder")
        folders[name] = folder
    return folders


FOLDERS = ("logs/verifier", "tests")
"""Folders that programs and tests find in a sandbox besides the working folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedJob:
    """What a sandbox needs to run a job: the runner's standard input, and files."""

    stdin: bytes
    files: Mapping[str, bytes | Path | Link]


async def pack_job(
    job: RunnerJob,
    trees: Sequence[tuple[str, Sequence[Entry]]],
    files: Mapping[str, Path | Link],
    *,
    workdir: str,
    limits: WorkspaceLimits,
    **machine: Any,
) -> PackedJob:
    """Return what a sandbox needs to run a job.

    Args:
        trees: folders, with what to write into each.
        files: further files of the sandbox.
        workdir: absolute path of the working folder.
        limits: of what the program leaves there.
        machine: what else the machine adds to the job.
    """
    packed_files: dict[str, bytes | Path | Link] = {
        "runner.py": RUNNER.read_bytes(),
        workdir: Link("app"),
        TESTS: Link("tests"),
        LOGS: Link("logs"),
        **files,
    }
    tree_folders: list[tuple[str, str]] = []
    for number, (folder, entries) in enumerate(trees):
        name = f"{number}.tree"
        packed_files[name] = await asyncio.to_thread(pack_tree, entries)
        tree_folders.append((name, folder))

    pack = None
    if not job.verifies:  # nothing runs on what the tests leave
        pack = {"max_bytes": limits.max_bytes, "max_entries": limits.max_entries}
    job_json = job.as_json(
        trees=tree_folders, root=".", workdir="app", path_inside=workdir, pack=pack, **machine
    )
    return PackedJob(stdin=json.dumps(job_json).encode() + b"\n", files=packed_files)


def left_out_names(program: JobResult) -> str:
    """Return names of what a program left that its working folder does not hold; empty: none."""
    names = ", ".join(program.left_out_names)
    if program.left_out > SHOWN_NAMES:
        names += ", …"
    return names


def left_out_note(program: JobResult) -> str:
    """Return what a program left that the tests do not see; empty: they see all of it."""
    names = left_out_names(program)
    if not names:
        return ""
    return f"not in what the tests saw: {names} (devices, sockets, links that lead elsewhere)\n"


class SandboxedTask(TaskMachine):
    """Runs one task in sandboxes; the program never shares one with the tests.

    Args:
        sandbox: makes them.
        limits: of the working folder that the tests see.
        mounts: folders of this machine that the program sees read-only, by their names below
            ``/tmp``.

    Raises:
        DataError: the task's own files are more than the limits, so that no program could leave a
            folder that tests can run on.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        task: CommandTask,
        limits: WorkspaceLimits,
        *,
        mounts: Mapping[str, Path] | None = None,
    ) -> None:
        check_first_files(file_entries(task.files), limits)
        self._sandbox = sandbox
        self._task = task
        self._limits = limits
        self._mounts = mounts or {}
        self._program_result: JobResult | None = None

    async def run_program(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        endpoint: Path,
        *,
        seconds: float,
    ) -> JobResult:
        job = RunnerJob(argv=argv, env={**self._task.env, **env}, seconds=seconds, port=PORT)
        trees = [
            (".", file_entries(files, folders=FOLDERS)),
            ("app", file_entries(self._task.files)),
        ]
        paths = {"endpoint.sock": endpoint, **self._mounts}
        self._program_result = await self._run(job, trees, paths)
        return self._program_result

    async def run_tests(self, seconds: float) -> JobResult:
        program = self._program_result
        assert program is not None, "the program runs first"
        if program.workspace is None:
            problem = program.pack_problem or "its sandbox was stopped"
            return JobResult(
                stopped=f"the program left no working folder that tests can run on: {problem}"
            )

        result = await self.run_tests_on(program.workspace, seconds)
        return replace(result, stderr=result.stderr + left_out_note(program))

    async def run_tests_on(self, workspace: Sequence[Entry], seconds: float) -> JobResult:
        """Run the task's tests on a working folder, as :meth:`run_tests` does."""
        job = RunnerJob(
            argv=self._task.verifier, env=self._task.env, seconds=seconds, verifies=True
        )
        trees = [
            (".", file_entries({}, folders=FOLDERS)),
            ("app", workspace),
            ("tests", file_entries(with_settings(self._task.tests))),
        ]
        return await self._run(job, trees, {})

    async def run_command(
        self, argv: Sequence[str], workspace: Sequence[Entry], *, seconds: float
    ) -> JobResult:
        """Run a command on a working folder; the result holds the folder that it left.

        Raises:
            EnvironmentFailedError: the machine itself failed.
        """
        job = RunnerJob(argv=argv, env=self._task.env, seconds=seconds)
        trees = [(".", file_entries({}, folders=FOLDERS)), ("app", workspace)]
        return await self._run(job, trees, {})

    async def _run(
        self,
        job: RunnerJob,
        trees: Sequence[tuple[str, Sequence[Entry]]],
        files: Mapping[str, Path],
    ) -> JobResult:
        """Run a job in a new sandbox, on these folders with their entries, and read its result."""
        token = secrets.token_hex(32)
        packed = await pack_job(
            job, trees, files, workdir=self._task.workdir, limits=self._limits, token=token
        )
        try:
            result = await self._sandbox.run(
                [self._sandbox.python, *ISOLATED, "runner.py"],
                stdin=packed.stdin,
                files=packed.files,
                limits=replace(self._sandbox.limits, wall_seconds=job.seconds + GRACE_SECONDS),
            )
        except ToolError as error:
            raise EnvironmentFailedError(f"agent 'command': {error}") from error
        return await asyncio.to_thread(
            read_result,
            result.stdout,
            token,
            stopped=str(result.stopped or f"exit status {result.exit_code} of the sandbox"),
            stderr=result.stderr,
            limits=self._limits,
            path_inside=self._task.workdir,
        )
