"""A long-lived program in the sandbox that runs one piece of code after another.

A program that ended (the code made it exit, or a limit did) is started anew for the next piece; the model is told
that what it had defined is gone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence

from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, SandboxProcess
from jax_agent_rl.tool_server.sandbox.isolation import Files

_RESTARTED = "(the session ended; the next action starts a new one, in which nothing is defined)"
Encode = Callable[[str, str], bytes]
"""Code and mark -> what the program reads: it runs the code, then writes a line of the mark and an exit code."""


def encode_json(code: str, mark: str) -> bytes:
    """Encode code and mark as a line of JSON."""
    return json.dumps({"code": code, "mark": mark}).encode() + b"\n"


class ProgramSession:
    """Session of a long-lived program; see the module.

    Args:
        sandbox: where it runs.
        argv: the program.
        files: in its working folder.
        limits: of the program; ``wall_seconds`` is for each piece of code.
        encode: how code is sent.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        argv: Sequence[str],
        *,
        files: Files,
        limits: SandboxLimits,
        encode: Encode = encode_json,
    ):
        self._sandbox = sandbox
        self._argv = argv
        self._files = files
        self._limits = limits
        self._encode = encode
        self._process: SandboxProcess | None = None

    async def start(self) -> None:
        """Start the program unless it is running.

        Raises:
            ToolError: the sandbox failed.
        """
        if self._process is None or not self._process.alive:
            await self.close()
            self._process = await self._sandbox.start(self._argv, files=self._files, limits=self._limits)

    async def run(self, code: str) -> tuple[str, bool]:
        """Run code; return its output, with notes on what went wrong, and whether it succeeded."""
        await self.start()
        assert self._process is not None
        # Random, so that no program's ordinary output looks like it.
        mark = f"\x1e{secrets.token_hex(16)}"
        output, status, stopped = await self._sandbox.exchange(self._process, self._encode(code, mark), mark.encode())
        notes = [output.decode("utf-8", "replace").rstrip("\n")]
        if stopped is not None:
            notes.append(f"({stopped.describe(self._limits)})")
        if not status:
            await self.close()
            notes.append(_RESTARTED)
        return "\n".join(note for note in notes if note), status.strip() == b"0"

    async def close(self) -> None:
        """End the program and its child processes; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()
