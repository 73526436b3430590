"""The agent loop ``command``: a program whose model is the endpoint; a verifier decides its reward.

::

    row ──► task ──► machine: command ──HTTP──► relay ──► endpoint ──► recorder ──► trajectory
                        └─ files it left ──► machine: tests ──► reward in agent_output

A machine is a sandbox, or a container where ``agent.command.container`` names a runtime. The program finds the endpoint
in ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL``, and a key of its own session. The tests run when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.command.machines import (
    OUTPUT_BYTES,
    PORT,
    ContainerRuntime,
    ContainerTask,
    JobResult,
    SandboxedTask,
    TaskMachine,
)
from jax_agent_rl.agents.command.runner import relay
from jax_agent_rl.agents.command.task import CommandTask, read_files, read_task
from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.frameworks import OpenAIAgentLoop
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.session_tree import to_trajectory
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, open_sandbox
from jax_agent_rl.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from jax_agent_rl.agents.endpoint.sessions import Session


@register_agent("command")
class CommandAgent(OpenAIAgentLoop):
    """Runs ``agent.command.argv`` once per trajectory, see the module docstring."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self._settings = context.limits.command
        self._runtime: Sandbox | ContainerRuntime | None = None
        self._opening = asyncio.Lock()
        self._relay: _UnixRelay | None = None

    async def preflight(self) -> None:
        """Check the command, and the sandbox or the container runtime.

        Raises:
            ConfigError: ``agent.command.argv`` is empty, or neither sandboxes nor containers work here.
        """
        if not self._settings.argv:
            raise ConfigError("agent 'command' needs agent.command.argv, the program to run, e.g. [python, agent.py]")
        _ = self._program
        await self._open_runtime()

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            TrajectoryError: the row's task cannot be run, the program asked the model nothing, or a request failed.
        """
        try:
            task = await asyncio.to_thread(read_task, row, containers=self._settings.container is not None)
        except DataError as error:
            raise TrajectoryError(str(error)) from error  # of this task alone
        runtime = await self._open_runtime()
        machine = SandboxedTask(runtime, task) if isinstance(runtime, Sandbox) else ContainerTask(runtime, task)
        async with contextlib.aclosing(machine):
            with self._session(row, trajectory_id, sampling) as session:
                done = await self._run_program(machine, task, session)
            recorder = session.recorder
            if recorder.failure is not None:
                raise recorder.failure
            if not recorder.turns:
                ended = f"exit status {done.exit_code}" if done.stopped is None else f"stopped: {done.stopped}"
                raise TrajectoryError(
                    f"{trajectory_id}: the program ended ({ended}) without asking the model anything; the end of its "
                    f"stderr: {done.stderr[-1000:]!r}"
                )
            output = done.model_dump(include={"exit_code", "stopped", "stdout", "stderr"})
            if task.verifier:
                verdict = await machine.run_tests(task.verifier_seconds or self._settings.verifier_timeout)
                text = (verdict.stdout + verdict.stderr)[-4000:] + (verdict.stopped or "")
                output |= {"reward": _reward(verdict), "verifier": text}
        return to_trajectory(recorder, row=row, output=output, group_id=group_id, agent_name=self.name)

    async def close(self) -> None:
        """Close the relay and the endpoint."""
        if self._relay is not None:
            await self._relay.close()
            self._relay = None
        await super().close()

    async def _run_program(self, machine: TaskMachine, task: CommandTask, session: Session) -> JobResult:
        base_url = f"http://127.0.0.1:{PORT}/sessions/{session.session_id}"
        env = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": session.api_key or "",
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": session.api_key or "",
            "TASK_INSTRUCTION": task.instruction,
        }
        argv = [part.replace("{instruction}", task.instruction) for part in self._settings.argv]
        seconds = min(task.agent_seconds or float("inf"), self.context.limits.run_timeout)
        return await machine.run_program(argv, env, self._program, await self._open_relay(), seconds=seconds)

    @functools.cached_property
    def _program(self) -> dict[str, bytes]:
        """The program's own files, which are copied: the sandbox's user may not read the folder."""
        if self._settings.program_dir is None:
            return {}
        folder = Path(self._settings.program_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"agent.command.program_dir={str(folder)!r} is not a folder")
        return {f"agent/{name}": data for name, data in read_files(folder).items()}

    async def _open_runtime(self) -> Sandbox | ContainerRuntime:
        """Return where tasks run, checked on first use."""
        async with self._opening:
            if self._runtime is None:
                settings = self._settings
                if settings.container is not None:
                    runtime = ContainerRuntime(settings)
                    await runtime.check()
                    self._runtime = runtime
                    return runtime
                limits = SandboxLimits(
                    cpu_seconds=settings.cpu_seconds,
                    memory_bytes=settings.memory_mb << 20,
                    processes=settings.processes,
                    disk_bytes=settings.disk_mb << 20,
                    output_bytes=OUTPUT_BYTES,
                )
                self._runtime = await open_sandbox(
                    limits=limits, max_running=settings.max_running, otherwise="or set agent.command.container"
                )
            return self._runtime

    async def _open_relay(self) -> Path:
        async with self._opening:
            if self._relay is None:
                server, _ = self._serve()
                await self._starting
                self._relay = _UnixRelay(server.port)
                await self._relay.start()
            return self._relay.path


class _UnixRelay:
    """A Unix socket, which can be shown in a sandbox, whose connections are those of a port on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._folder = tempfile.TemporaryDirectory(prefix="jax-agent-rl-")
        self.path = Path(self._folder.name) / "endpoint.sock"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connect, self.path)
        self.path.chmod(0o666)  # a sandboxed program is another user; the folder keeps out everyone else

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()
        self._folder.cleanup()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay(reader, writer, asyncio.open_connection("127.0.0.1", self._port))


def _reward(done: JobResult) -> float:
    """Return the reward file's number, as Harbor's verifiers write it, else 1 for success and 0 for failure."""
    with contextlib.suppress(ValueError):
        if done.read_back is not None and math.isfinite(reward := float(done.read_back)):
            return reward
    return float(done.exit_code == 0)
