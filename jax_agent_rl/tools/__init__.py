"""Tools that a policy can call.

``base`` the interface, and truncated results · ``function_tool`` tools from functions · ``schema``
JSON Schemas and arguments · ``registry`` the tools of a run · ``mcp`` tools of MCP servers ·
``session`` the tools of one trajectory · ``client`` the client of tool servers ·
``marker_services`` what agents ask with text between markers · ``request_limiter`` how often they
may · ``calculator``, ``shop`` tools of the built-in tasks.
"""

from jax_agent_rl.tools.base import BaseTool, ToolResponse
from jax_agent_rl.tools.function_tool import FunctionTool, function_tool
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.tools.session import ToolSession

__all__ = [
    "BaseTool",
    "FunctionTool",
    "ToolRegistry",
    "ToolResponse",
    "ToolSession",
    "function_tool",
]
