"""The policy as LangChain sees it: ``ChatModel`` a chat model, ``TrajectoryTool`` the run's tools.

Needs the extra ``langgraph``; nothing else of the package imports LangChain.
"""

from jax_agent_rl.agents.langgraph.chat_model import ChatModel
from jax_agent_rl.agents.langgraph.tools import TrajectoryTool

__all__ = ["ChatModel", "TrajectoryTool"]
