"""The agent loop ``command``: a program, in the sandbox, whose model is the endpoint; a verifier decides its reward.

::

    row ──► task ──► sandbox 1: command ──HTTP──► relay ──► endpoint ──► recorder ──► trajectory
                                   └─ working folder ──► sandbox 2: tests ──► reward in agent_output

The program finds the endpoint in ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL``, and a key of its own session. Tests
run in a sandbox of their own, on the files the program left, so it can neither read nor change them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import io
import json
import math
import secrets
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jax_agent_rl.agents.command.task import CommandTask, expand, read_files, read_task
from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.openai_loop import OpenAIAgentLoop, with_output
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import to_trajectory
from jax_agent_rl.errors import ConfigError, ToolError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox, SandboxLimits, open_sandbox
from jax_agent_rl.types import SamplingParams, Trajectory

_PORT = 8080
_GRACE_SECONDS = 10.0  # for the runner to unpack, to pack the working folder and to end
_OUTPUT_BYTES = 16 << 20  # of the runner, whose result holds the working folder
_RUNNER = Path(__file__).with_name("runner.py")


@register_agent("command")
class CommandAgent(OpenAIAgentLoop):
    """Runs ``agent.command.argv`` once per trajectory, see the module docstring."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self._settings = context.limits.command
        self._sandbox: Sandbox | None = None
        self._opening = asyncio.Lock()
        self._relay: _UnixRelay | None = None

    async def preflight(self) -> None:
        """Check the command and the sandbox.

        Raises:
            ConfigError: ``agent.command.argv`` is empty, or the sandbox does not work here.
        """
        if not self._settings.argv:
            raise ConfigError("agent 'command' needs agent.command.argv, the program to run, e.g. [python, agent.py]")
        _ = self._program
        await self._open_sandbox()

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            DataError: the row's task cannot be run.
            TrajectoryError: the program asked the model nothing, or a request of it failed.
        """
        from jax_agent_rl.agents.endpoint.sessions import Session

        task = read_task(row)
        sandbox = await self._open_sandbox()
        _, store = self._serve()
        socket = await self._open_relay()
        recorder = ChatRecorder(self.context, session_id=trajectory_id, adapter=row.get("adapter"))
        session_id, api_key = secrets.token_urlsafe(16), secrets.token_urlsafe(24)
        store.add(Session(session_id=session_id, recorder=recorder, sampling=sampling, api_key=api_key))
        try:
            done = await self._run_program(sandbox, task, socket, session_id, api_key)
        finally:
            store.end(session_id)
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
            output |= await self._verify(sandbox, task, done.workspace)
        return to_trajectory(
            recorder,
            row=with_output(row, output),
            group_id=group_id,
            agent_name=self.name,
            metrics={},
            tool_scores={},
        )

    async def close(self) -> None:
        """Close the relay and the endpoint."""
        if self._relay is not None:
            await self._relay.close()
            self._relay = None
        await super().close()

    async def _run_program(
        self, sandbox: Sandbox, task: CommandTask, socket: Path, session_id: str, api_key: str
    ) -> _JobResult:
        base_url = f"http://127.0.0.1:{_PORT}/sessions/{session_id}"
        seconds = min(task.agent_seconds or float("inf"), self.context.limits.run_timeout)
        job = {
            "argv": expand(self._settings.argv, task.instruction),
            "env": {
                **task.env,
                "OPENAI_BASE_URL": f"{base_url}/v1",
                "OPENAI_API_KEY": api_key,
                "ANTHROPIC_BASE_URL": base_url,
                "ANTHROPIC_API_KEY": api_key,
                "TASK_INSTRUCTION": task.instruction,
            },
            "port": _PORT,
            "read_back": None,
        }
        archive = _archive({f"app/{name}": data for name, data in task.files.items()} | self._program)
        files: dict[str, Any] = {"job.tar": archive, "endpoint.sock": socket}
        return await self._run_job(sandbox, task, job, files, seconds)

    async def _verify(self, sandbox: Sandbox, task: CommandTask, workspace: str | None) -> dict[str, Any]:
        """Run the task's tests on what the program left; return ``reward`` and the tests' output."""
        if workspace is None:
            return {"reward": 0.0, "verifier": "the program left no working folder, or one that is too large"}
        files = {f"tests/{name}": data for name, data in task.tests.items()}
        job = {
            "argv": list(task.verifier),
            "env": dict(task.env),
            "port": None,
            "read_back": "logs/verifier/reward.txt",
        }
        seconds = task.verifier_seconds or self._settings.verifier_timeout
        try:
            archive = _archive(files, base64.b64decode(workspace))
        except (OSError, tarfile.TarError, binascii.Error, EOFError) as error:
            return {"reward": 0.0, "verifier": f"the program left no readable working folder: {error}"}
        done = await self._run_job(sandbox, task, job, {"job.tar": archive}, seconds)
        return {"reward": _reward(done), "verifier": (done.stdout + done.stderr)[-4000:]}

    async def _run_job(
        self, sandbox: Sandbox, task: CommandTask, job: dict[str, Any], files: dict[str, Any], seconds: float
    ) -> _JobResult:
        """Run a command behind the runner; return its result, with ``stopped`` if a limit ended it all.

        Raises:
            TrajectoryError: the sandbox itself failed.
        """
        links = {task.workdir: Link("app"), "/tests": Link("tests"), "/logs": Link("logs")}
        job |= {"seconds": seconds, "workdir": "app"}
        limits = replace(sandbox.limits, wall_seconds=seconds + _GRACE_SECONDS)
        try:
            result = await sandbox.run(
                [sandbox.python, "runner.py"],
                stdin=json.dumps(job).encode(),
                files={"runner.py": _RUNNER.read_bytes(), **links, **files},
                limits=limits,
            )
        except ToolError as error:
            raise TrajectoryError(f"agent 'command': {error}") from error
        try:
            return _JobResult.model_validate_json(result.stdout)
        except ValidationError:
            stopped = str(result.stopped or f"exit status {result.exit_code} of the sandbox")
            return _JobResult(stopped=stopped, stderr=result.stderr[-4000:])

    @functools.cached_property
    def _program(self) -> dict[str, bytes]:
        """The program's own files, which are copied: the sandbox's user may not read the folder."""
        if self._settings.program_dir is None:
            return {}
        folder = Path(self._settings.program_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"agent.command.program_dir={str(folder)!r} is not a folder")
        return {f"agent/{name}": data for name, data in read_files(folder).items()}

    async def _open_sandbox(self) -> Sandbox:
        async with self._opening:
            if self._sandbox is None:
                settings = self._settings
                limits = SandboxLimits(
                    cpu_seconds=settings.cpu_seconds,
                    memory_bytes=settings.memory_mb << 20,
                    processes=settings.processes,
                    disk_bytes=settings.disk_mb << 20,
                    output_bytes=_OUTPUT_BYTES,
                )
                self._sandbox = await open_sandbox(
                    limits=limits, max_running=settings.max_running, otherwise="or choose another agent"
                )
            return self._sandbox

    async def _open_relay(self) -> Path:
        async with self._opening:
            if self._relay is None:
                server, _ = self._serve()
                await self._starting
                self._relay = _UnixRelay(server.port)
                await self._relay.start()
            return self._relay.path


class _JobResult(BaseModel):
    """What the runner printed; a program in the same sandbox could have forged it, so its shape is checked."""

    exit_code: int | None = None
    stopped: str | None = None
    stdout: str = ""
    stderr: str = ""
    workspace: str | None = None
    read_back: str | None = None


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
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()


def _archive(files: Mapping[str, bytes], workspace: bytes | None = None) -> bytes:
    """Return a tar of these files, and of another tar's files below ``app``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("app", "logs", "logs/verifier", "tests"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
        if workspace is not None:
            _add_workspace(archive, workspace)
    return buffer.getvalue()


def _add_workspace(archive: tarfile.TarFile, workspace: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(workspace), mode="r:") as left:
        for member in left:
            name = Path(member.name)
            if not (member.isfile() or member.isdir()) or name.is_absolute() or ".." in name.parts:
                continue  # links could lead the tests elsewhere
            member.name = str(Path("app") / name)
            archive.addfile(member, left.extractfile(member) if member.isfile() else None)


def _reward(done: _JobResult) -> float:
    """Return the reward file's number, as Harbor's verifiers write it, else 1 for success and 0 for failure."""
    with contextlib.suppress(ValueError):
        if done.read_back is not None and math.isfinite(reward := float(done.read_back)):
            return reward
    return float(done.exit_code == 0)
