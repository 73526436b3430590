"""Tool-call formats: how a model writes a call as text, and how tools and results are told to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax_agent_rl.chat.formats.hermes import HermesFormat
from jax_agent_rl.chat.types import Reply
from jax_agent_rl.errors import ConfigError


class ToolFormat(Protocol):
    """One way to write tool calls. The ``render_*`` methods serve chat templates that know no tools themselves."""

    @property
    def markers(self) -> frozenset[str]:
        """Strings the parser looks for; they are kept in its input even where they are special tokens."""
        ...

    def parse(self, text: str, *, reasoning_open: bool = False) -> Reply:
        """Takes a sampled turn apart. Never raises, in time linear in the text.

        Args:
            text: the turn, without its end-of-turn token.
            reasoning_open: the generation prompt has already opened a reasoning block.
        """
        ...

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    def render_result(self, content: str) -> str: ...

    def render_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A section for the system message that tells which tools there are and how to call them."""
        ...


FORMATS: Mapping[str, type[ToolFormat]] = {"hermes": HermesFormat}


def get_format(name: str) -> ToolFormat:
    """The format registered as ``name``.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FORMATS:
        raise ConfigError(f"agent.tool_format={name!r} is unknown; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]()
