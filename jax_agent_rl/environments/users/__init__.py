"""Simulated users: whoever answers the policy when it calls no tool.

``base`` the interface · ``registry`` the users of a run, from YAML · ``session`` one conversation, always finalized ·
``gsm8k`` tells right from wrong · ``model_user`` a language model as the user · ``chat_model`` where that model lives.
"""

from jax_agent_rl.environments.users.base import BaseInteraction, UserReply
from jax_agent_rl.environments.users.chat_model import EngineChat, OpenAIChat, UserModel
from jax_agent_rl.environments.users.gsm8k import Gsm8kInteraction
from jax_agent_rl.environments.users.model_user import ModelUserInteraction
from jax_agent_rl.environments.users.registry import InteractionRegistry
from jax_agent_rl.environments.users.session import InteractionSession

__all__ = [
    "BaseInteraction",
    "UserModel",
    "EngineChat",
    "Gsm8kInteraction",
    "InteractionRegistry",
    "InteractionSession",
    "ModelUserInteraction",
    "OpenAIChat",
    "UserReply",
]
