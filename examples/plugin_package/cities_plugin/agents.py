"""What the rollout uses: an agent, a tool, a reward function, an environment, a simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.agents import AgentLoop, EpisodeRequest
from jax_agent_rl.environments import Environment, Observation
from jax_agent_rl.environments.users.base import BaseInteraction, UserReply
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tools import function_tool
from jax_agent_rl.types import FinishReason, StopReason, Trajectory

POPULATION = {"Paris": 2_100_000, "Oslo": 710_000}


class DoubleCheck(AgentLoop):
    """Two assistant turns, of which the second is scored."""

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Generate, ask for a check, and generate again if there is room."""
        episode = self.start(request)
        draft = await episode.generate()
        check = {"role": "user", "content": "Check that, then answer again."}
        if draft.stop_reason is StopReason.LENGTH or not episode.append([check]):
            return episode.finish(FinishReason.RESPONSE_LENGTH)
        await episode.generate(session_ends=True)
        return episode.finish(FinishReason.ANSWER)


@function_tool
def population(city: str) -> int:
    """Looks up how many people live in a city.

    Args:
        city: Its English name.
    """
    if city not in POPULATION:
        raise ToolError(f"no city is called {city!r}; there are {', '.join(POPULATION)}")
    return POPULATION[city]


def brevity(solution_str: str) -> float:
    """Return the share of an answer's characters that are left of a hundred."""
    return max(0.0, 1 - len(solution_str) / 100)


class GuessCity(Environment):
    """The episode ends with the right city, which is worth 1."""

    async def reset(self, *, city: str) -> Observation:
        """Ask for the city of a row's ``environment_kwargs``."""
        self._city = city
        return Observation.say(f"Which city has {POPULATION[city]} inhabitants?")

    async def step(self, reply: Any) -> Observation:
        """Look for its name in the reply."""
        right = self._city in reply.content
        return Observation(score=1.0, done=True) if right else Observation.say("Another one.")


class Tourist(BaseInteraction):
    """Goes on asking until the answer names its city."""

    stateful = False

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply:
        """Answer the policy; see the base class."""
        right = self.config["city"] in str(messages[-1]["content"])
        return UserReply(
            terminate=right, text="Thank you!" if right else "Where is that?", score=float(right)
        )
