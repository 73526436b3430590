"""Tools: what a policy may call.

``base`` the interface · ``function_tool`` and ``signature`` tools from functions · ``registry`` the tools of a run,
``loading`` where they come from, ``mcp`` those of MCP servers · ``session`` the tools of one trajectory (``arguments``
and ``truncate`` are its parts) · ``client`` and ``search_client`` of tool and retrieval servers · ``builtin``.
"""

from jax_agent_rl.tools.base import BaseTool, ToolResponse
from jax_agent_rl.tools.function_tool import FunctionTool, function_tool
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.tools.session import ToolSession

__all__ = ["BaseTool", "FunctionTool", "ToolRegistry", "ToolResponse", "ToolSession", "function_tool"]
