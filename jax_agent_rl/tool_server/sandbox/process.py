"""One sandboxed program, from start to end.

There are two ways to use it. ``finish`` writes the input once and waits for the end. ``exchange``
sends a request and reads the answer up to a mark, any number of times, with the program paused in
between. Both kill the program when it exceeds a limit. When the first process ends, the kernel
kills all others, because they share its process namespace.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox.isolation import Files, Isolation, Launch
from jax_agent_rl.tool_server.sandbox.limits import (
    ENDED,
    SandboxLimits,
    SandboxResult,
    StopCause,
    exceeded,
    process_tree,
    watch,
)
from jax_agent_rl.utils.tasks import gather_or_cancel

logger = logging.getLogger(__name__)
_CHUNK = 64 << 10  # bytes
_KILL_SECONDS = 10.0  # for the kernel to end a killed tree
MAX_CHECKS = 500  # while the program is paused
_CHECK_SECONDS = 0.001
# States in /proc; a dead process remains until its parent has waited for it.
_DEAD = "ZX"
_STOPPED = "TtZX"
_CPU_SIGNALS = (128 + signal.SIGXCPU, -signal.SIGXCPU)


class SandboxProcess:
    """A started program; create it with :meth:`start`, and always :meth:`close` it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        launch: Launch,
        limits: SandboxLimits,
        *,
        lifeline: socket.socket,
    ):
        self._process = process
        self._lifeline = lifeline
        self._launch = launch
        self._limits = limits
        self._start_time = time.perf_counter()
        self._out = bytearray()
        self._err = bytearray()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        isolation: Isolation,
        argv: Sequence[str],
        limits: SandboxLimits,
        files: Files,
        *,
        join_output: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """Start a program.

        Args:
            argv: the program and its arguments.
            files: files of its working folder, read-only.
            join_output: redirect stderr to stdout.
            pass_fds: descriptors that the program inherits, under the same numbers.

        Raises:
            ToolError: the program cannot be started, for lack of memory for example.
        """

        async def start() -> SandboxProcess:
            ours, theirs = socket.socketpair()
            try:
                launch = isolation.launch(argv, limits, files, lifeline=theirs.fileno())
                try:
                    inherited = (theirs.fileno(), *pass_fds)
                    process = await _execute(launch, inherited, join_output=join_output)
                except BaseException:
                    launch.clean_up()
                    raise
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):
                    raise ToolError(f"the sandbox could not be started: {error}") from error
                raise
            finally:
                theirs.close()
            return cls(process, launch, limits, lifeline=ours)

        # A start is not interrupted: a cancelled caller waits, and the program is closed.
        starting = asyncio.ensure_future(start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(_abandon(starting)))
            raise

    @property
    def alive(self) -> bool:
        """Whether the program still runs."""
        return self._closing is None and self._process.returncode is None

    async def finish(self, stdin: bytes = b"") -> SandboxResult:
        """Write the program's input, wait for its end and return the result.

        Raises:
            ToolError: the sandbox itself could not be set up.
        """
        failure = None
        try:
            stopped = await self._within_limits(self._to_the_end(stdin))
            if stopped is None:
                stopped = self._out_of_memory()
            if stopped is None:
                failure = self._failure()
        finally:
            await self.close()

        exit_code = self._process.returncode
        if stopped is None and exit_code in _CPU_SIGNALS:
            stopped = StopCause.CPU
        if stopped is not None:
            exit_code = None

        stdout = await _decode(self._out)
        stderr = await _decode(self._err)
        if failure is not None:
            raise ToolError(f"the sandbox could not be set up: {(failure or stderr).strip()[:500]}")
        return SandboxResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            stopped=stopped,
            seconds=time.perf_counter() - self._start_time,
        )

    async def exchange(self, request: bytes, mark: bytes) -> tuple[bytes, bytes, StopCause | None]:
        """Send a request and read stdout up to the line that begins with ``mark``.

        Afterwards the program is paused until the next request, and what it started in the
        background is killed.

        Returns:
            The output before the mark (all of it if the program ended or was stopped); the
            remainder of the mark's line, empty if the mark never came; the limit that ended the
            program.
        """
        self._out.clear()
        program, _ = self._split()
        if program is not None:
            _send(program, signal.SIGCONT)

        stopped = await self._within_limits(self._to_mark(request, mark))
        if stopped is None:
            stopped = self._out_of_memory()
        if stopped is None:
            stopped = await self._pause()
        if stopped is not None:
            await self.close()

        output, _, status = bytes(self._out).partition(mark)
        return output, status.rstrip(b"\n"), stopped

    async def close(self) -> None:
        """Kill the program and everything it started, and wait until they are gone; idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # completes even if the caller is cancelled

    async def _close(self) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self.kill()
            async with asyncio.timeout(_KILL_SECONDS):
                # The output first: a full pipe keeps wait() waiting.
                for stream in (self._process.stdout, self._process.stderr):
                    while stream is not None and await stream.read(_CHUNK):
                        pass
                await self._process.wait()
                if self._process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        await self._process.stdin.wait_closed()
                await asyncio.sleep(0)  # runs the callbacks in which asyncio closes the pipes
        except TimeoutError:
            logger.error(
                "processes of sandbox %d are still there %g s after SIGKILL",
                self._process.pid,
                _KILL_SECONDS,
            )
        finally:
            self._lifeline.close()
            self._launch.clean_up()

    def _failure(self) -> str | None:
        """Return why the ended program was never started.

        An empty text means that not even the guard was started; None, that the program was started.
        """
        try:
            message = self._lifeline.recv(_CHUNK, socket.MSG_DONTWAIT).decode("utf-8", "replace")
        except BlockingIOError:
            message = ""
        if message:
            _, _, reason = message.partition(": ")
            return reason or None

        exit_code = self._process.returncode or 0
        if exit_code > 0:
            return ""
        return None  # below 0: it was killed before it could tell

    def _out_of_memory(self) -> StopCause | None:
        if self._launch.out_of_memory():
            return StopCause.MEMORY
        return None

    async def _pause(self) -> StopCause | None:
        """Stop the program and kill everything it started.

        Returns:
            The limit that it exceeded since the last check, if any.
        """
        previous_dead: set[int] | None = None  # None: something still ran
        for _ in range(MAX_CHECKS):
            program, descendants = self._split()
            if program is None:
                break
            _send(program, signal.SIGSTOP)

            running = [pid for pid in descendants if not _all_in(pid, _DEAD)]
            for pid in running:
                _send(pid, signal.SIGKILL)

            if running or not _all_in(program, _STOPPED):
                previous_dead = None
                await asyncio.sleep(_CHECK_SECONDS)
                continue

            # Twice in a row, since one check may miss a process that is just being started. Both
            # with the same dead ones: another has ended since, and may have started one more.
            dead = set(descendants)
            if dead == previous_dead:
                break
            previous_dead = dead
            await asyncio.sleep(0)
        else:
            return StopCause.BACKGROUND
        return exceeded(self._process.pid, self._limits)

    def _split(self) -> tuple[int | None, list[int]]:
        """Return the program's first process (None if it has ended) and all that it started."""
        # The program is the oldest child of its namespace's first process, hence the first here.
        pids = process_tree(self._process.pid)[self._launch.wrappers :]
        if not pids:
            return None, []
        return pids[0], pids[1:]

    def kill(self) -> None:
        """Kill the program and everything it started.

        :meth:`finish`, or :meth:`close`, then returns soon.
        """
        # Before the kill, which a program that is still being set up may survive.
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    # --- limits -----------------------------------------------------------------------------------

    async def _within_limits(self, work: Awaitable[None]) -> StopCause | None:
        """Await ``work``; return the limit that was exceeded first, if any.

        If there is one, the caller closes the program.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(watch(self._process.pid, self._limits))
        try:
            await asyncio.wait(
                {working, watching},
                timeout=self._limits.wall_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done():
                working.result()  # raises what the work raised
                return None
            if watching.done():
                return watching.result()
            return StopCause.WALL
        except _TooMuchOutput:
            return StopCause.OUTPUT
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _to_the_end(self, stdin: bytes) -> None:
        """Write the input, and read both outputs until the program has ended."""
        work = [self._write(stdin, close=True)]
        if self._process.stdout is not None:
            work.append(self._read(self._process.stdout, self._out))
        if self._process.stderr is not None:
            work.append(self._read(self._process.stderr, self._err))
        await gather_or_cancel(work)
        await self._process.wait()

    async def _to_mark(self, request: bytes, mark: bytes) -> None:
        """Write a request, and read the output up to the mark's line."""
        assert self._process.stdout is not None
        reading = self._read(self._process.stdout, self._out, until=mark)
        await gather_or_cancel([self._write(request), reading])

    async def _write(self, data: bytes, *, close: bool = False) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(data)
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # a program need not read its input
        finally:
            if close:
                stdin.close()

    async def _read(
        self, stream: asyncio.StreamReader, buffer: bytearray, until: bytes | None = None
    ) -> None:
        """Read to the end of the stream, or to the end of the line that contains ``until``."""
        mark_start = -1  # not found yet
        while True:
            chunk = await stream.read(_CHUNK)
            if not chunk:
                return
            chunk_start = len(buffer)
            buffer += chunk

            excess_bytes = len(self._out) + len(self._err) - self._limits.output_bytes
            if excess_bytes > 0:
                del buffer[len(buffer) - excess_bytes :]
                raise _TooMuchOutput

            if until is None:
                continue
            if mark_start < 0:
                # The mark may have begun in an earlier chunk.
                mark_start = buffer.find(until, max(0, chunk_start - len(until)))
            # So may its line, which ends in any later one.
            if mark_start >= 0 and buffer.find(b"\n", max(mark_start, chunk_start)) >= 0:
                return


async def _execute(
    launch: Launch, inherited: Sequence[int], *, join_output: bool
) -> asyncio.subprocess.Process:
    """Start a launch's command, with further inherited descriptors."""
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT if join_output else pipe,
            env=launch.env,
            cwd=launch.cwd,
            pass_fds=(*launch.fds, *inherited),
            start_new_session=True,
        )
    finally:
        for fd in launch.fds:
            os.close(fd)


async def _decode(output: bytearray) -> str:
    """Decode output piece by piece.

    Decoding 16 MiB that are not UTF-8 at once would hold the event loop for half a second.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = []
    for start in range(0, len(output), _CHUNK):
        pieces.append(decoder.decode(output[start : start + _CHUNK]))
        if len(output) > _CHUNK:
            await asyncio.sleep(0)
    pieces.append(decoder.decode(b"", final=True))
    return "".join(pieces)


async def _abandon(starting: asyncio.Future[SandboxProcess]) -> None:
    """Close a program whose caller was cancelled, once it has started."""
    try:
        process = await starting
    except ToolError:
        return
    await process.close()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _all_in(pid: int, states: str) -> bool:
    """Return whether every thread of a process is in one of the states.

    The first thread may be dead while others run.
    """
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            stat = Path(f"/proc/{pid}/task/{task}/stat").read_text()
            # Behind the name, which may itself contain brackets and blanks.
            state = stat.rpartition(")")[2].split()[0]
            if state not in states:
                return False
    except ENDED:
        return False  # it is changing; the next check decides
    return True


class _TooMuchOutput(Exception):
    """The program wrote more than ``output_bytes``."""
