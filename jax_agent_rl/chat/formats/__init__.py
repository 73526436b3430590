"""Tool-call formats by name (``agent.tool_format``), and which one a chat template uses.

``registry`` the formats by name · ``base`` the types and the scanner all share · one module for
each kind of notation: ``json_calls``, ``tagged``, ``sections``, ``literal_calls``.
"""

from jax_agent_rl.chat.formats.base import ToolFormat
from jax_agent_rl.chat.formats.registry import FORMATS, detect_format, get_format
from jax_agent_rl.chat.reply import Reply, ToolCall

__all__ = ["FORMATS", "Reply", "ToolCall", "ToolFormat", "detect_format", "get_format"]
