"""The tool server's tools.

=================  ==============================================================================
``base``           the interface
``registry``       the tools by name
``interpreters``   Python per action, Python and bash per trajectory (``kernel`` runs in the
                   sandbox), SQLite databases, programs against tests
``search``         passages of a local corpus
``files``          local pages as text, zooming into images
``mcp_gateway``    tools of MCP servers
``markup``         parsing of actions and formatting of results, for all of them
=================  ==============================================================================
"""

from jax_agent_rl.tool_server.plugins.base import (
    ServerTool,
    ToolAction,
    ToolContext,
    ToolObservation,
)

__all__ = ["ServerTool", "ToolAction", "ToolContext", "ToolObservation"]
