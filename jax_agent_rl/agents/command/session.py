"""A sandbox that runs one command after another, and takes and gives files in between.

::

    run, write, read, end ──► SandboxSession ──control.sock──► runner ──► commands
                                    │
                              Sandbox.run: limits of all commands together

The runner connects before the first command starts, with a token that no command sees, and nobody
can connect after it. What it answers is bounded, and entries are made anew (``workspace``), as with
a single command. Whatever ends the sandbox ends the session; closing the session ends the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jax_agent_rl.agents.command.machines import (
    GRACE_SECONDS,
    ISOLATED,
    RunnerJob,
    pack_job,
)
from jax_agent_rl.agents.command.runner import REQUEST_BYTES, SERVICE_CHARACTERS
from jax_agent_rl.agents.command.workspace import (
    MAX_HEADER_BYTES,
    Entry,
    JobResult,
    ResultHeader,
    WorkspaceLimits,
    make_result,
    pack_tree,
)
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox, SandboxResult

_START_SECONDS = 60.0
_TRANSFER_SECONDS = 120.0
_END_SECONDS = 15.0  # for the sandbox to end after its runner
_Output = Annotated[str, Field(max_length=SERVICE_CHARACTERS)]


class _CommandHeader(ResultHeader):
    """A result in a session, whose outputs may be longer."""

    stdout: _Output = ""
    stderr: _Output = ""


class _Answer(BaseModel):
    """First line of an answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    number: int
    size: Annotated[int, Field(ge=0)]
    result: _CommandHeader


class SandboxSession:
    """A sandbox in which commands run until it is closed; create it with :meth:`open`.

    Args:
        workdir: absolute path of the working folder.
        limits: of each folder that is read back.
    """

    def __init__(self, sandbox: Sandbox, *, workdir: str, limits: WorkspaceLimits) -> None:
        self._sandbox = sandbox
        self._sandbox_limits = sandbox.limits
        self._workdir = workdir
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(prefix="jax-agent-rl-")
        self._token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )
        self._sandbox_run: asyncio.Task[SandboxResult] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[JobResult]] = {}
        self._paths_inside: dict[int, str] = {}
        self._number = 0
        self.ended: str | None = None
        """Why the sandbox ended before the session was closed; None: it did not."""

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        job: RunnerJob,
        trees: Sequence[tuple[str, Sequence[Entry]]],
        files: Mapping[str, Path | Link],
        *,
        workdir: str,
        limits: WorkspaceLimits,
        wall_seconds: float,
    ) -> SandboxSession:
        """Start a sandbox.

        Args:
            job: its ``env`` holds for every command; ``argv`` and ``seconds`` are not used.
            trees: folders, with what to write into each.
            files: further files of the sandbox, see :class:`~jax_agent_rl.tool_server.sandbox`.
            workdir: absolute path of the working folder.
            limits: of each folder that is read back.
            wall_seconds: limit of the whole session.

        Raises:
            ToolError: it could not be started.
        """
        session = cls(sandbox, workdir=workdir, limits=limits)
        try:
            await session._start(job, trees, files, wall_seconds)
        except BaseException:
            await session.aclose()
            raise
        return session

    async def _start(
        self,
        job: RunnerJob,
        trees: Sequence[tuple[str, Sequence[Entry]]],
        files: Mapping[str, Path | Link],
        wall_seconds: float,
    ) -> None:
        control = Path(self._folder.name) / "control.sock"
        self._server = await asyncio.start_unix_server(
            self._accept, control, limit=MAX_HEADER_BYTES
        )
        control.chmod(0o666)  # the runner is another user; the folder keeps out everyone else

        packed = await pack_job(
            job,
            trees,
            {**files, control.name: control},
            workdir=self._workdir,
            limits=self._limits,
            token=self._token,
            control=control.name,
        )
        self._sandbox_limits = replace(self._sandbox.limits, wall_seconds=wall_seconds)
        self._sandbox_run = asyncio.create_task(
            self._sandbox.run(
                [self._sandbox.python, *ISOLATED, "runner.py"],
                stdin=packed.stdin,
                files=packed.files,
                limits=self._sandbox_limits,
            )
        )
        await asyncio.wait(
            {self._sandbox_run, self._connected},
            timeout=_START_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        self._server.close()
        if not self._connected.done():
            raise ToolError(f"the sandbox did not start: {await self._cause()}")
        reader, _ = self._connected.result()
        self._receiving = asyncio.create_task(self._receive(reader))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the runner's connection, which begins with the token."""
        line = b""
        with contextlib.suppress(ValueError, TimeoutError, OSError):
            async with asyncio.timeout(_START_SECONDS):
                line = await reader.readline()
        is_runner = hmac.compare_digest(line, self._token.encode() + b"\n")
        if not is_runner or self._connected.done():
            writer.close()
            return
        self._connected.set_result((reader, writer))

    # --- requests ---------------------------------------------------------------------------------

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, seconds: float
    ) -> JobResult:
        """Run a command to its end; what it leaves in the background goes on.

        Args:
            env: variables besides the session's.
            seconds: time limit; ``exit_code`` is None if it did not end within it.

        Raises:
            ToolError: the command is longer than requests may be, or the sandbox has ended.
        """
        request = {"argv": list(argv), "env": dict(env), "cwd": cwd, "seconds": seconds}
        return await self._request("run", timeout=seconds + GRACE_SECONDS, **request)

    async def write(self, entries: Sequence[Entry], folder: str) -> None:
        """Write entries into a folder, which is made if need be.

        Raises:
            ToolError: they cannot be written, or the sandbox has ended.
        """
        tree = await asyncio.to_thread(pack_tree, entries)
        result = await self._request("write", data=tree, folder=folder)
        if result.pack_problem is not None:
            raise ToolError(f"{folder} in the sandbox: {result.pack_problem}")

    async def read(self, path: str) -> tuple[Entry, ...]:
        """Return the entries of a folder, or a file as the only entry.

        Raises:
            ToolError: there is no such path, it is more than the limits, or the sandbox has ended.
        """
        limits = {"max_bytes": self._limits.max_bytes, "max_entries": self._limits.max_entries}
        result = await self._request("read", path_inside=path, path=path, limits=limits)
        if result.workspace is None:
            raise ToolError(f"{path} in the sandbox: {result.pack_problem}")
        return result.workspace

    async def end(self) -> JobResult:
        """End all processes and return the working folder; afterwards nothing runs any more.

        The result says why there is no working folder, if there is none.
        """
        try:
            result = await self._request("end")
        except ToolError as error:
            result = JobResult(stopped=str(error), pack_problem=str(error))
        await self.aclose()
        return result

    async def _request(
        self,
        do: Literal["run", "write", "read", "end"],
        *,
        data: bytes = b"",
        path_inside: str | None = None,
        timeout: float = _TRANSFER_SECONDS,
        **fields: Any,
    ) -> JobResult:
        """Send a request and return its result.

        Args:
            path_inside: absolute path of the entries that are read; None: the working folder's.
        """
        if self._receiving is None or self._receiving.done():
            raise ToolError(f"the sandbox has ended: {self.ended or 'it was closed'}")
        self._number += 1
        number = self._number
        answer: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._paths_inside[number] = path_inside or self._workdir

        try:
            async with asyncio.timeout(timeout):
                await self._send({"number": number, "do": do, "size": len(data), **fields}, data)
                return await answer
        except TimeoutError:
            raise ToolError(f"the sandbox did not answer within {timeout:g} seconds") from None
        except asyncio.CancelledError:
            if do == "run":  # otherwise the command would go on without anyone who waits for it
                cancel = {"number": number, "do": "cancel", "size": 0}
                self._write_line(cancel)
            raise
        finally:
            del self._answers[number]
            del self._paths_inside[number]

    async def _send(self, request: Mapping[str, Any], data: bytes) -> None:
        writer = self._write_line(request)
        try:
            writer.write(data)
            await writer.drain()
        except OSError:
            pass  # the answer, which does not come, says why

    def _write_line(self, request: Mapping[str, Any]) -> asyncio.StreamWriter:
        line = json.dumps(request).encode() + b"\n"
        if len(line) > REQUEST_BYTES:
            raise ToolError(f"a request of {len(line)} bytes, more than {REQUEST_BYTES}")
        _, writer = self._connected.result()
        writer.write(line)
        return writer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the connection ends, which ends the session."""
        problem = None
        try:
            while line := await reader.readline():
                answer = _Answer.model_validate(json.loads(line))
                if answer.size > self._limits.max_bytes:
                    raise ValueError(f"{answer.size} bytes, more than {self._limits.max_bytes}")
                contents = await reader.readexactly(answer.size)
                waiting = self._answers.get(answer.number)
                if waiting is None or waiting.done():  # it was cancelled
                    continue
                path_inside = self._paths_inside[answer.number]
                result = await asyncio.to_thread(
                    make_result,
                    answer.result,
                    contents,
                    limits=self._limits,
                    path_inside=path_inside,
                )
                if not waiting.done():
                    waiting.set_result(result)
        except (ValueError, RecursionError, EOFError, OSError) as error:
            problem = f"its runner's answer cannot be read: {str(error)[:500]}"
        finally:
            self.ended = problem or await self._cause()
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(ToolError(f"the sandbox has ended: {self.ended}"))

    async def _cause(self) -> str:
        """Return what ended the sandbox, whose runner is gone."""
        assert self._sandbox_run is not None
        done, _ = await asyncio.wait({self._sandbox_run}, timeout=_END_SECONDS)
        if not done:
            return "it does not answer"
        if self._sandbox_run.cancelled():
            return "it was closed"
        error = self._sandbox_run.exception()
        if error is not None:
            return str(error)
        result = self._sandbox_run.result()
        if result.stopped is not None:
            return result.stopped.describe(self._sandbox_limits)
        return f"exit status {result.exit_code}: {result.stderr[-500:]}"

    async def aclose(self) -> None:
        """Kill everything that runs in the sandbox, and wait until it is gone; idempotent."""
        tasks = [task for task in (self._sandbox_run, self._receiving) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._connected.done() and not self._connected.cancelled():
            _, writer = self._connected.result()
            writer.close()
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()
