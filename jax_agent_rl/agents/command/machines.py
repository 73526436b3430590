"""Machines that a task runs on: a sandbox, or containers of Docker or Podman (``containers``).

The program and the tests have a sandbox each. The tests start on the working folder that the program left, rebuilt
entry by entry (``workspace``), and with their own files, which the program never sees::

    files, agent ──► sandbox: program ──► working folder ──checked──► sandbox: tests ──► reward
                                                             tests ──────┘

Nothing else of the first sandbox reaches the second. What interpreters would load from the working folder on their own
is switched off for the tests (``runner.environment``).
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
from jax_agent_rl.errors import ToolError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox

RUNNER = Path(__file__).with_name("runner.py")
ISOLATED = ("-I", "-S", "-B")
"""Options of the runner's Python: nothing but the standard library is found, whatever lies beside it."""
GRACE_SECONDS = 10.0  # for the runner to write its files, to pack the working folder and to end
PORT = 8080  # of the endpoint, on the loopback of the program
TESTS, LOGS = "/tests", "/logs"
REWARD_FILE = "logs/verifier/reward.txt"
TEST_SETTINGS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml")
TEST_SETTINGS += ("tox.ini", "setup.cfg")
"""Files in which pytest looks for settings, in the folder of the tests and those above."""
_SETTINGS_SECTIONS = {"pyproject.toml": b"[tool.pytest", "tox.ini": b"[pytest]", "setup.cfg": b"[tool:pytest]"}
"""Without its section, such a file does not end pytest's search for settings; a file of another name always does."""


class TaskMachine(ABC):
    """Where the program of one task runs, and afterwards the task's tests on the files it left."""

    @abstractmethod
    async def run_program(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes], endpoint: Path, *, seconds: float
    ) -> JobResult:
        """Run the agent's program to its end.

        Args:
            argv: the command line.
            env: variables besides the task's own.
            files: its files, by path below ``/tmp``.
            endpoint: Unix socket of the endpoint, which the program reaches at ``127.0.0.1:PORT``.
            seconds: its time limit.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    @abstractmethod
    async def run_tests(self, seconds: float) -> JobResult:
        """Run the task's tests on the files the program left; ``file`` is the reward file's text.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    async def aclose(self) -> None:
        """Remove what is left of the machine. The default has nothing to remove."""
        return None


def tests_of(task: CommandTask) -> dict[str, bytes]:
    """Return a task's tests by their paths, with settings that end pytest's search for some.

    Without any beside the tests, pytest takes those of the folders above, where the program may have written.
    """
    tests = dict(task.tests)
    for name in TEST_SETTINGS[1:]:
        if name in tests and _SETTINGS_SECTIONS.get(name, b"") in tests[name]:
            return tests
    tests["pytest.ini"] = b"[pytest]\n"
    return tests


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerJob:
    """What the runner does; see there.

    Attributes:
        argv: command line.
        env: variables of the command.
        seconds: its time limit.
        verifies: whether it decides the reward: then it gets the working folder's path for no interpreter, and its
            reward file is returned.
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


_FOLDERS = ("logs/verifier", "tests")


class SandboxedTask(TaskMachine):
    """Runs one task in ``sandbox``. The program never shares a sandbox with the tests.

    Args:
        sandbox: where both run.
        task: the task.
        limits: of the working folder that the tests see.
    """

    def __init__(self, sandbox: Sandbox, task: CommandTask, limits: WorkspaceLimits) -> None:
        self._sandbox = sandbox
        self._task = task
        self._limits = limits
        self._left: JobResult | None = None

    async def run_program(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes], endpoint: Path, *, seconds: float
    ) -> JobResult:
        job = RunnerJob(argv=argv, env={**self._task.env, **env}, seconds=seconds, port=PORT)
        trees = [(".", file_entries(files, folders=_FOLDERS)), ("app", file_entries(self._task.files))]
        self._left = await self._run(job, trees, {"endpoint.sock": endpoint})
        return self._left

    async def run_tests(self, seconds: float) -> JobResult:
        assert self._left is not None, "the program runs first"
        if self._left.workspace is None:
            problem = self._left.pack_problem or "its sandbox was stopped"
            return JobResult(stopped=f"the program left no working folder that tests can run on: {problem}")
        job = RunnerJob(argv=self._task.verifier, env=self._task.env, seconds=seconds, verifies=True)
        trees = [
            (".", file_entries({}, folders=_FOLDERS)),
            ("app", self._left.workspace),
            ("tests", file_entries(tests_of(self._task))),
        ]
        done = await self._run(job, trees, {})
        if not self._left.left_out:
            return done
        names = ", ".join(self._left.left_out_names)
        more = "" if self._left.left_out <= SHOWN_NAMES else ", …"
        note = f"not in what the tests saw: {names}{more} (devices, sockets, links that lead elsewhere)\n"
        return replace(done, stderr=done.stderr + note)

    async def _run(
        self, job: RunnerJob, trees: Sequence[tuple[str, Sequence[Entry]]], files: Mapping[str, Path]
    ) -> JobResult:
        token = secrets.token_hex(32)
        links = {self._task.workdir: Link("app"), TESTS: Link("tests"), LOGS: Link("logs")}
        pack = {"max_bytes": self._limits.max_bytes, "max_entries": self._limits.max_entries}
        described = job.as_json(
            token=token,
            trees=[[f"{number}.tree", folder] for number, (folder, _) in enumerate(trees)],
            root=".",
            workdir="app",
            place=self._task.workdir,
            pack=None if job.verifies else pack,
        )
        packed: dict[str, bytes] = {}
        for number, (_, entries) in enumerate(trees):
            packed[f"{number}.tree"] = await asyncio.to_thread(pack_tree, entries)
        try:
            result = await self._sandbox.run(
                [self._sandbox.python, *ISOLATED, "runner.py"],
                stdin=json.dumps(described).encode() + b"\n",
                files={"runner.py": RUNNER.read_bytes(), **packed, **links, **files},
                limits=replace(self._sandbox.limits, wall_seconds=job.seconds + GRACE_SECONDS),
            )
        except ToolError as error:
            raise TrajectoryError(f"agent 'command': {error}") from error
        return await asyncio.to_thread(
            read_result,
            result.stdout,
            token,
            stopped=str(result.stopped or f"exit status {result.exit_code} of the sandbox"),
            stderr=result.stderr,
            limits=self._limits,
            place=self._task.workdir,
        )
