"""The turn loop of all agents: the policy generates a turn, a responder answers it, until a turn ends the trajectory.

::

    replay of the inherited turns, on a branch
      ┌─► generate ──► respond ──► a FinishReason: the trajectory is over
      │                   │ None: the response was appended
      └───────────────────┘

What differs between agents is the :class:`Responder`: tools, a tool server, text markers, an environment or a simulated
user. It decides which part of a turn is an action, answers it, and says when to stop; :meth:`TurnLoopAgent.play` opens
what it works on and closes it.

Tools, tool servers, environments and simulated users keep state per trajectory. A branch is a trajectory of its own, so
they answer the inherited turns once more, in order. Their answers must not change, as the ids that follow were sampled
after them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax_agent_rl.agents.context import AgentContext, Prefix
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ReplayError
from jax_agent_rl.tools.base import truncate_text
from jax_agent_rl.types import (
    FinishReason,
    Fork,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
)

SERVER_REMEDY = "make the tool server answer the same actions alike (rollout.strategy branches trajectories)"


@dataclass
class Responder(ABC):
    """Answers the policy's turns in one trajectory."""

    context: AgentContext

    @property
    def limits(self) -> AgentConfig:
        """The ``agent`` section of the config."""
        return self.context.limits

    def turn_limit(self, turns: int) -> FinishReason | None:
        """Return the limit that makes the turn after so many ``turns`` the last one, or None."""
        if turns + 1 >= self.limits.max_assistant_turns:
            return FinishReason.MAX_ASSISTANT_TURNS
        return FinishReason.MAX_USER_TURNS if turns >= self.limits.max_user_turns else None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        """Return further arguments of :meth:`Episode.generate`; ``last`` as :meth:`turn_limit` has it."""
        return {}

    @abstractmethod
    async def respond(self, episode: Episode, output: TokenOutput, limit: FinishReason | None) -> FinishReason | None:
        """Answer the turn just generated.

        Args:
            episode: the trajectory; the response is appended to it.
            output: the turn.
            limit: the limit that allows no further turn, or None.

        Returns:
            Why the trajectory ends, or None if it goes on.
        """

    @abstractmethod
    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        """Answer an inherited turn again, after those before, to restore the state behind this responder.

        Returns:
            The number of calls made for it.

        Raises:
            ReplayError: the answer is not the recorded one.
        """

    def shorten(self, text: str) -> str:
        """Return ``text`` within ``agent.max_tool_response_length`` tokens."""
        codec, side = self.context.codec, self.limits.tool_response_truncate_side
        limit = self.limits.max_tool_response_length
        return truncate_text(text, limit, side, encode=codec.encode_text, decode=codec.decode)


async def run_turns(episode: Episode, responder: Responder) -> FinishReason:
    """Run turns from where the episode stands until one ends the trajectory, and return why."""
    if episode.prefix is not None:
        began = time.perf_counter()
        calls = [await responder.replay_turn(episode.prefix, turn) for turn in range(len(episode.prefix.turns))]
        episode.add_metrics({"replayed_calls": sum(calls), "replay_seconds": time.perf_counter() - began})
    while True:
        limit = responder.turn_limit(len(episode.turns))
        last = limit is not None
        output = await episode.generate(session_ends=last, **responder.generate_options(last=last))
        if (reason := await responder.respond(episode, output, limit)) is not None:
            return reason


def check_replay(turn: int, source: str, before: object, now: object, *, remedy: str) -> None:
    """Check that a replayed answer is the recorded one.

    Args:
        turn: number of the answered turn.
        source: what answered.
        before: the recorded answer.
        now: the answer of the replay.
        remedy: how to make the two equal.

    Raises:
        ReplayError: they differ.
    """
    if before != now:
        raise ReplayError(
            f"{source} answered {now!s:.300} where it had answered {before!s:.300} in turn {turn}; {remedy}, or set "
            "rollout.strategy.name=chain"
        )


def describe_call(call: ToolCallRecord) -> str:
    """Return what a call answered, for :func:`check_replay`."""
    return f"{call.observation!r} (error {call.error}, reward {call.reward})"


def answer_or_cut(output: TokenOutput) -> FinishReason:
    """Return how a turn without action ends the trajectory: as an answer, or cut off by the length limit."""
    return FinishReason.RESPONSE_LENGTH if output.stop_reason is StopReason.LENGTH else FinishReason.ANSWER


StartEpisode = Callable[..., Episode]
"""Starts the episode of a run or a branch; takes ``tools``, ``opening`` and ``tool_schemas`` of
:meth:`AgentLoop.start`."""


class TurnLoopAgent(AgentLoop):
    """An agent loop over :func:`run_turns`; its trajectories can branch."""

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        start = partial(self.start, row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
        return await self.play(start, row, trajectory_id)

    async def branch(
        self, parent: Trajectory, fork: Fork, *, trajectory_id: str, sampling: SamplingParams
    ) -> Trajectory:
        prefix, ids = Prefix.of(parent, fork), {"trajectory_id": trajectory_id, "group_id": parent.group_id}
        return await self.resume(prefix, parent.row, **ids, sampling=sampling)

    async def resume(
        self, prefix: Prefix, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        start = partial(
            self.start, row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling, prefix=prefix
        )
        return await self.play(start, row, trajectory_id)

    @abstractmethod
    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        """Open what the responder works on, start the episode, run its turns, and finish it.

        Args:
            start: starts the episode.
            row: the dataset row.
            trajectory_id: unique within the run.
        """


@register_agent("single_turn_agent")
class SingleTurnAgent(TurnLoopAgent):
    """One prompt, one answer, no tools."""

    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        episode = start()
        return episode.finish(answer_or_cut(await episode.generate(session_ends=True)))
