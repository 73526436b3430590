"""A user with the answer sheet: says whether ``#### number`` is right, and asks again if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jax_agent_rl.environments.users.base import BaseInteraction, UserReply
from jax_agent_rl.errors import ConfigError, InteractionError
from jax_agent_rl.rewards.rules import last_number, marked_number

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Scores every turn 1 or 0. ``interaction_kwargs``: ``ground_truth``.

    Args:
        config: ``answer_format``: ``strict`` (the default) wants ``####``, ``flexible`` takes the last number without
            it; ``right`` and ``wrong``: what to say.

    Raises:
        ConfigError: ``config`` holds something else.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        if unknown := sorted(config.keys() - {"answer_format", "right", "wrong"}):
            raise ConfigError(f"{unknown[0]}: Gsm8kInteraction takes answer_format, right and wrong")
        self._flexible = config.get("answer_format", "strict") == "flexible"
        self._truths: dict[str, Decimal] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        truth = last_number(str(kwargs.get("ground_truth", "")))
        if truth is None:
            raise InteractionError(
                f"interaction_kwargs.ground_truth={kwargs.get('ground_truth')!r} holds no number to compare with"
            )
        self._truths[instance_id] = truth

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply:
        text = messages[-1]["content"]
        answer = marked_number(text)
        if answer is None and self._flexible:
            answer = last_number(text)
        if answer == self._truths[instance_id]:
            return UserReply(True, self.config.get("right", RIGHT), 1.0)
        return UserReply(False, self.config.get("wrong", WRONG), 0.0)

    async def finalize_interaction(self, instance_id: str) -> None:
        self._truths.pop(instance_id, None)
