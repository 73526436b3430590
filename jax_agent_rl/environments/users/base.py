"""The interface of simulated users.

Life of one conversation (``instance_id`` is the trajectory's id)::

    start_interaction(id, **kwargs) ──► generate_response(id, messages, **kwargs) … ──► finalize_interaction(id)

``start_interaction`` and ``finalize_interaction`` are called exactly once, the latter also when the trajectory fails
or is cancelled. ``kwargs`` are the row's ``extra_info.interaction_kwargs`` without ``name``, which chooses the user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jax_agent_rl.environments.users.chat_model import UserModel


class UserReply(NamedTuple):
    """A user's answer; a plain ``(terminate, text, score, metadata)`` is accepted too.

    Attributes:
        terminate: the conversation is over; ``text`` is not shown to the policy any more.
        text: the user's message.
        score: the score of the policy's last turn.
        metadata: numbers among it are added to the trajectory's metrics.
    """

    terminate: bool
    text: str
    score: float = 0.0
    metadata: Mapping[str, Any] = {}


class BaseInteraction(ABC):
    """Base class of simulated users; one instance serves all conversations of a run.

    Args:
        config: the ``config`` mapping of its YAML entry.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def attach(self, engine: UserModel) -> None:  # noqa: B027 - few users need one
        """Receive the run's own engine, once, before the first conversation."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027
        """Begin a conversation."""

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply | tuple[bool, str, float, Mapping[str, Any]]:
        """Answer the policy.

        Args:
            instance_id: id of the trajectory.
            messages: the conversation so far; the last one is the assistant's.
            kwargs: the row's ``interaction_kwargs`` without ``name``.
        """

    async def finalize_interaction(self, instance_id: str) -> None:  # noqa: B027
        """End a conversation and free its state."""

    async def close(self) -> None:  # noqa: B027
        """Close what the instance holds open, after the last conversation."""
