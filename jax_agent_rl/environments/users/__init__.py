"""Simulated users: they answer the policy when it calls no tool.

``base`` the interface, and one conversation · ``registry`` the users of a run, from YAML · ``builtin`` a user with the
answer sheet, and a language model as the user · ``chat_model`` that model: behind an endpoint, or the run's engine.
"""

from jax_agent_rl.environments.users.base import BaseInteraction, InteractionSession, UserReply
from jax_agent_rl.environments.users.builtin import Gsm8kInteraction, ModelUserInteraction
from jax_agent_rl.environments.users.chat_model import EngineChat, OpenAIChat, UserModel
from jax_agent_rl.environments.users.registry import InteractionRegistry

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
