"""Tool-call formats by name (``agent.tool_format``)."""

from __future__ import annotations

from types import ModuleType

from jax_agent_rl.chat.formats import hermes
from jax_agent_rl.chat.formats.types import Reply, ToolCall
from jax_agent_rl.errors import ConfigError

FORMATS: dict[str, ModuleType] = {"hermes": hermes}

__all__ = ["FORMATS", "Reply", "ToolCall", "get_format"]


def get_format(name: str) -> ModuleType:
    """The format's module: ``parse``, ``system_section``, ``tool_result``.

    Raises:
        ConfigError: unknown name.
    """
    if name not in FORMATS:
        raise ConfigError(f"agent.tool_format={name!r} is unknown; there are {sorted(FORMATS)}")
    return FORMATS[name]
