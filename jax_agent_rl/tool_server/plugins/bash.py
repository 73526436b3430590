"""A shell that lives as long as its trajectory: folder, variables and files stay."""

from __future__ import annotations

import base64

from jax_agent_rl.tool_server.plugins.markup import code_of
from jax_agent_rl.tool_server.plugins.python import Code, StatefulPythonTool
from jax_agent_rl.tool_server.plugins.session import ProgramSession
from jax_agent_rl.tool_server.sandbox import SandboxLimits


def encode_shell(commands: str, mark: str) -> bytes:
    """Encode commands as one line that no quote or syntax error can break, and from which they cannot read on."""
    encoded = base64.b64encode(commands.replace("\0", "").encode("utf-8", "replace")).decode()
    decode = f'"$(printf %s {encoded} | base64 -d)"'
    return f"eval {decode} </dev/null; printf '{mark} %d\\n' \"$?\"\n".encode()


class BashTool(StatefulPythonTool):
    """Runs commands in the trajectory's shell; what they write is the observation."""

    name = "bash"
    usage = "<bash>commands</bash> or a fenced bash block; the shell keeps its folder and variables, not its jobs."

    def parse_action(self, action: str) -> Code | None:
        commands = code_of(action, "bash", "bash", "sh", "shell", "terminal")
        return None if commands is None else Code(source=commands, stdin=None, written=action)

    def make_session(self, limits: SandboxLimits) -> ProgramSession:
        shell = ["bash", "--noprofile", "--norc"]
        return ProgramSession(self.context.sandbox, shell, files={}, limits=limits, encode=encode_shell)
