"""A shell that lives as long as its trajectory: folder, variables and files stay."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.markup import code_of, result_block
from jax_agent_rl.tool_server.plugins.python import failures
from jax_agent_rl.tool_server.plugins.session import ProgramSession
from jax_agent_rl.tool_server.sandbox.limits import session_limits


def encode_shell(commands: str, mark: str) -> bytes:
    """Encode commands as one line that no quote or syntax error can break, and from which they cannot read on."""
    encoded = base64.b64encode(commands.replace("\0", "").encode("utf-8", "replace")).decode()
    decode = f'"$(printf %s {encoded} | base64 -d)"'
    return f"eval {decode} </dev/null; printf '{mark} %d\\n' \"$?\"\n".encode()


class BashTool(ServerTool[tuple[str, str], ProgramSession]):
    """Runs commands; what they write is the observation."""

    name = "bash"
    usage = "<bash>commands</bash> or a fenced bash block; the shell keeps its folder and variables, not its jobs."
    stateful = True
    needs_sandbox = True

    def parse_action(self, action: str) -> tuple[str, str] | None:
        commands = code_of(action, "bash", "bash", "sh", "shell", "terminal")
        return None if commands is None else (commands, action)

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> ProgramSession:
        limits = session_limits(self.context.settings.limits)
        session = ProgramSession(
            self.context.sandbox, ["bash", "--noprofile", "--norc"], files={}, limits=limits, encode=encode_shell
        )
        await session.start()
        return session

    async def act(self, action: ToolAction[tuple[str, str], ProgramSession]) -> ToolObservation:
        commands, written = action.parsed
        text, ok = await action.environment.run(commands)
        return ToolObservation(text=result_block(written, text), metrics=failures(ok))

    async def close(self, environment: ProgramSession) -> None:
        await environment.close()
