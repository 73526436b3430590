"""Tasks in the sandbox: the program in one, the tests in another one, on the working folder that the program left."""

from __future__ import annotations

import base64
import binascii
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_agent_rl.agents.command.jobs import (
    GRACE_SECONDS,
    PORT,
    REWARD_FILE,
    RUNNER,
    JobResult,
    TaskMachine,
    archive,
)
from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.errors import ToolError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox

_FOLDERS = ("app", "logs", "logs/verifier", "tests")


class SandboxedTask(TaskMachine):
    """Runs one task in ``sandbox``. The program never shares a sandbox with the tests."""

    def __init__(self, sandbox: Sandbox, task: CommandTask) -> None:
        self._sandbox = sandbox
        self._task = task
        self._workspace: str | None = None

    async def run_program(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        program: Mapping[str, bytes],
        endpoint: Path,
        seconds: float,
    ) -> JobResult:
        """See :class:`TaskMachine`."""
        job = {"argv": list(argv), "env": {**self._task.env, **env}, "port": PORT, "read_back": None}
        files = {f"app/{name}": data for name, data in self._task.files.items()}
        packed = archive({**files, **program}, folders=_FOLDERS)
        done = await self._run(job, {"job.tar": packed, "endpoint.sock": endpoint}, seconds)
        self._workspace = done.workspace
        return done

    async def run_tests(self, seconds: float) -> JobResult:
        """See :class:`TaskMachine`."""
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
