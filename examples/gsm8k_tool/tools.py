"""The tools of the GSM8K agent: a calculator, and verl's ``calc_gsm8k_reward``, which checks an
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.rewards.rules import last_number
from jax_agent_rl.tools import BaseTool, ToolResponse
from jax_agent_rl.tools.calculator import calculator

__all__ = ["calculator", "calc_gsm8k_reward"]


class Gsm8kTool(BaseTool):
    """Tells whether an answer is right; the row brings the truth as ``create_kwargs.ground_truth``.

    An answer that is no better than the one before costs a little, so that guessing does not pay.
    """

    PENALTY = -0.05

    def __init__(self) -> None:
        super().__init__(
            name="calc_gsm8k_reward",
            description="Checks whether a number is the answer to the problem.",
            parameters={
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The number."}},
                "required": ["answer"],
            },
        )
        self._truths: dict[str, str] = {}
        self._best: dict[str, float] = {}

    async def create(self, instance_id: str, *, ground_truth: str) -> None:
        self._truths[instance_id] = ground_truth
        self._best[instance_id] = 0.0

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResponse:
        right = float(last_number(arguments["answer"]) == last_number(self._truths[instance_id]))
        reward = 0.0 if right > self._best[instance_id] else self.PENALTY
        self._best[instance_id] = max(self._best[instance_id], right)
        return ToolResponse(text="right" if right else "wrong", reward=reward)

    async def release(self, instance_id: str) -> None:
        self._truths.pop(instance_id, None)
        self._best.pop(instance_id, None)


calc_gsm8k_reward = Gsm8kTool()
