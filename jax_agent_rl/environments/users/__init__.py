"""Simulated users: they answer the policy when it calls no tool.

``base`` the interface, one conversation, and the users of a run from YAML · ``builtin`` a user with
the answer sheet, and a language model as the user.
"""

from jax_agent_rl.environments.users.base import (
    BaseInteraction,
    InteractionRegistry,
    InteractionSession,
    UserModel,
    UserReply,
)
from jax_agent_rl.environments.users.builtin import (
    EngineChat,
    Gsm8kInteraction,
    ModelUserInteraction,
    OpenAIChat,
)

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
