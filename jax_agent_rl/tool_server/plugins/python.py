"""Python code: in a fresh interpreter each time, or in one that lives as long as its trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import code_of, fenced_blocks, result_block, tool_call
from jax_agent_rl.tool_server.plugins.session import ProgramSession
from jax_agent_rl.tool_server.sandbox import SandboxLimits, SandboxResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """Code of an action.

    Attributes:
        source: the program.
        stdin: from an ```` ```input ```` block; None if there is none.
        written: the action itself, which decides how the result is written.
    """

    source: str
    stdin: str | None
    written: str


def parse_python(action: str) -> Code | None:
    """Parse ``<python>…</python>``, fenced ``python`` blocks, or a tool call ``python`` with the argument ``code``."""
    source = code_of(action, "python", "python", "py")
    if source is None and (call := tool_call(action)) is not None and call[0] == "python":
        source = call[1].get("code")
    if not isinstance(source, str):
        return None
    stdin = next(fenced_blocks(action, "input"), None)
    return Code(source=source, stdin=stdin and stdin.lstrip(" \t\r").removeprefix("\n"), written=action)


class PythonTool(ServerTool[Code, None]):
    """Runs code in an interpreter of its own; what it prints is the observation.

    ``extra_fields.stdin`` is its input unless the action brings one.
    """

    name = "python"
    usage = "<python>code</python> or a fenced python block; print what you want to see."
    needs_sandbox = True

    def parse_action(self, action: str) -> Code | None:
        return parse_python(action)

    async def act(self, action: ToolAction[Code, None]) -> ToolObservation:
        code, sandbox = action.parsed, self.context.sandbox
        stdin = code.stdin if code.stdin is not None else str(action.extra.get("stdin") or "")
        files = {"main.py": code.source.encode("utf-8", "replace")}
        result = await sandbox.run([sandbox.python, "main.py"], stdin=stdin.encode("utf-8", "replace"), files=files)
        text = describe(result, sandbox.limits)
        return ToolObservation(text=result_block(code.written, text), metrics=failures(result.ok))


def failures(ok: bool) -> dict[str, float]:
    """Return an action's metrics: a success has none, so that its observation is plain text."""
    return {} if ok else {"failed": 1.0}


def describe(result: SandboxResult, limits: Any) -> str:
    """Return what a program wrote, then what went wrong."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.stopped is not None:
        parts.append(f"({result.stopped.describe(limits)})")
    elif result.exit_code and not result.stderr:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part for part in parts if part)


class StatefulPythonTool(ServerTool[Code, ProgramSession]):
    """Runs code in the trajectory's interpreter: names stay defined, and the value of a last expression is shown."""

    name = "stateful_python"
    usage = "<python>code</python> or a fenced python block; variables stay defined between actions."
    stateful = True
    needs_sandbox = True

    def parse_action(self, action: str) -> Code | None:
        return parse_python(action)

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> ProgramSession:
        session = self.make_session(SandboxLimits.from_settings(self.context.settings.limits, session=True))
        await session.start()
        return session

    def make_session(self, limits: SandboxLimits) -> ProgramSession:
        """Return the program that runs a trajectory's code, not started."""
        sandbox, files = self.context.sandbox, {"kernel.py": _kernel_source()}
        return ProgramSession(sandbox, [sandbox.python, "kernel.py"], files=files, limits=limits)

    async def act(self, action: ToolAction[Code, ProgramSession]) -> ToolObservation:
        text, ok = await action.environment.run(action.parsed.source)
        return ToolObservation(text=result_block(action.parsed.written, text), metrics=failures(ok))

    async def close(self, environment: ProgramSession) -> None:
        await environment.close()


@cache
def _kernel_source() -> bytes:
    return Path(__file__).with_name("kernel.py").read_bytes()
