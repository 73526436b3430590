"""The agent loop ``command``: a program whose model is the endpoint; a verifier decides its reward.

::

    row ──► task ──► machine: command ──HTTP──► relay ──► endpoint ──► recorder ──► trajectory
                        └─ files it left ──► machine: tests ──► reward in agent_output

A machine is a sandbox, or a container where ``agent.command.container`` names a runtime. The
program finds the endpoint in ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` and
``GOOGLE_GEMINI_BASE_URL``, and a key of its own session. The tests run when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.command.containers import ContainerRuntime, ContainerTask
from jax_agent_rl.agents.command.machines import (
    PORT,
    SandboxedTask,
    TaskMachine,
    read_mounts,
    sandbox_limits,
    workspace_limits,
)
from jax_agent_rl.agents.command.relay import UnixRelay
from jax_agent_rl.agents.command.task import CommandTask, read_files, read_task
from jax_agent_rl.agents.command.workspace import JobResult, file_entries
from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.frameworks import ModelAccess, OpenAIAgentLoop
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.request import EpisodeRequest
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Sandbox, open_sandbox
from jax_agent_rl.types import Trajectory

if TYPE_CHECKING:
    from jax_agent_rl.agents.endpoint.sessions import Session


@register_agent("command")
class CommandAgent(OpenAIAgentLoop):
    """Runs ``agent.command.argv`` once per trajectory; the module's docstring shows how."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self._settings = context.limits.command
        self._runtime: Sandbox | ContainerRuntime | None = None
        self._opening = asyncio.Lock()

    async def preflight(self) -> None:
        """Check the command, and the sandbox or the container runtime.

        Raises:
            ConfigError: ``agent.command.argv`` is empty, a folder that the configuration names is
                not there, or neither sandboxes nor containers work here.
        """
        if not self._settings.argv:
            raise ConfigError(
                "agent 'command' needs agent.command.argv, the program to run,"
                " e.g. [python, agent.py]"
            )
        _ = self._program
        _ = self._mounts
        await self._open_runtime()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            TrajectoryError: the row's task cannot be run, the program asked the model nothing, or a
                request failed.
        """
        try:
            task = await asyncio.to_thread(
                read_task, request.row, containers=self._settings.container is not None
            )
        except DataError as error:
            raise TrajectoryError(str(error)) from error  # of this task alone
        machine = await self._make_machine(task)

        async with contextlib.aclosing(machine):
            with self._session(request) as session:
                result = await self._run_program(machine, task, session)
            recorder = session.recorder
            if recorder.failure is not None:
                raise recorder.failure
            if not recorder.turns:
                how = f"stopped: {result.stopped}"
                if result.stopped is None:
                    how = f"exit status {result.exit_code}"
                raise TrajectoryError(
                    f"{request.trajectory_id}: the program ended ({how}) without asking the model"
                    f" anything; the end of its stderr: {result.stderr[-1000:]!r}"
                )

            # What a program did not end is scored by its files as well; a run counts it.
            recorder.metrics["program_timeout"] = float(ran_out_of_time(result))
            recorder.metrics["program_error"] = float(failed(result))
            output: dict[str, Any] = {
                "exit_code": result.exit_code,
                "stopped": result.stopped,
                "stdout": result.stdout,
                "stderr": result.stderr,
            }
            if task.verifier:
                seconds = task.verifier_seconds or self._settings.verifier_timeout
                verdict = await machine.run_tests(seconds)
                output["reward"], note = read_verdict(verdict)
                output["verifier"] = (verdict.stdout + verdict.stderr)[-4000:] + note
        return self._trajectory(recorder, request, output)

    async def _make_machine(self, task: CommandTask) -> TaskMachine:
        """Return where a task runs.

        Raises:
            TrajectoryError: the sandbox could not hand its files to the tests.
        """
        runtime = await self._open_runtime()
        if not isinstance(runtime, Sandbox):
            return ContainerTask(runtime, task)
        limits = workspace_limits(self._settings)
        try:
            return SandboxedTask(runtime, task, limits, mounts=self._mounts)
        except DataError as error:
            raise TrajectoryError(str(error)) from error  # of this task alone

    async def _run_program(
        self, machine: TaskMachine, task: CommandTask, session: Session
    ) -> JobResult:
        """Run the program on its machine, with the session as its model."""
        access = ModelAccess.of_session(session, f"http://127.0.0.1:{PORT}")
        env = access.env | {"TASK_INSTRUCTION": task.instruction}
        argv = [part.replace("{instruction}", task.instruction) for part in self._settings.argv]
        seconds = self.context.limits.run_timeout
        if task.agent_seconds:
            seconds = min(seconds, task.agent_seconds)

        server, _ = self._serve()
        await self._starting
        async with contextlib.aclosing(UnixRelay(server.port)) as relay:
            await relay.start()
            return await machine.run_program(argv, env, self._program, relay.path, seconds=seconds)

    @functools.cached_property
    def _program(self) -> dict[str, bytes]:
        """The program's own files, which are copied: the sandbox's user may not read the folder."""
        if self._settings.program_dir is None:
            return {}
        folder = Path(self._settings.program_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"agent.command.program_dir={str(folder)!r} is not a folder")
        files = {
            f"agent/{name}": data for name, data in read_files(folder, links_may_leave=True).items()
        }
        try:
            file_entries(files)
        except ValueError as error:
            raise ConfigError(f"agent.command.program_dir={str(folder)!r}: {error}") from None
        return files

    @functools.cached_property
    def _mounts(self) -> dict[str, Path]:
        """The folders that programs see read-only, by name."""
        return read_mounts(self._settings.mounts, key="agent.command.mounts")

    async def _open_runtime(self) -> Sandbox | ContainerRuntime:
        """Return where tasks run, checked on first use."""
        settings = self._settings
        async with self._opening:
            if self._runtime is not None:
                return self._runtime

            if settings.container is not None:
                runtime = ContainerRuntime(settings)
                await runtime.check()
                self._runtime = runtime
                return runtime

            self._runtime = await open_sandbox(
                limits=sandbox_limits(settings),
                max_running=settings.max_running,
                otherwise="or set agent.command.container",
            )
            return self._runtime


def ran_out_of_time(result: JobResult) -> bool:
    """Return whether a program was ended because its time was over."""
    return result.exit_code is None and result.stopped is None


def failed(result: JobResult) -> bool:
    """Return whether a program ended with an error, or with its sandbox."""
    return result.stopped is not None or result.exit_code not in (None, 0)


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def read_verdict(result: JobResult) -> tuple[float, str]:
    """Return the reward that tests gave, and why it is 0 where their output does not say it.

    The reward is the number in the reward file, as Harbor's verifiers write it; without a file, 1
    for success and 0 for failure. Tests that did not end, and a file with something else in it,
    give 0: a program that the tests run could be the cause.
    """
    if result.stopped is not None:
        return 0.0, result.stopped
    if result.exit_code is None:
        return 0.0, "the tests did not end in time"
    if result.file_problem is not None:
        return 0.0, f"the reward cannot be read: {result.file_problem}"
    if result.file is None:
        reward = 1.0 if result.exit_code == 0 else 0.0
        return reward, ""

    text = result.file.strip()
    reward = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(reward):
        return 0.0, f"the reward file holds {text[:100]!a}, which is not a finite number"
    return reward, ""
