"""The turn loop of all agents: the policy generates a turn, a responder answers it.

::

    restoring or replaying the inherited turns, on a branch
      ┌─► generate ──► respond ──► a FinishReason: the trajectory is over
      │                   │ None: the response was appended
      └───────────────────┘

What differs between agents is the :class:`Responder`: tools, a tool server, text markers, an
environment or a simulated user. It decides which part of a turn is an action, answers it, and says
when to stop. :meth:`AgentLoop.play` of each agent opens what its responder works on and closes it.

Tools, tool servers, environments and simulated users keep state per trajectory. A branch is a
trajectory of its own, so they answer the inherited turns once more, in order. Their answers must
not change: the ids that follow were sampled after them. An environment that takes snapshots is
restored instead, as far as there is one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ReplayError
from jax_agent_rl.types import (
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
)

SERVER_REMEDY = (
    "make the tool server answer the same actions alike (rollout.strategy branches trajectories)"
)


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
        if turns >= self.limits.max_user_turns:
            return FinishReason.MAX_USER_TURNS
        return None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        """Return further arguments of :meth:`Episode.generate`.

        ``last``: :meth:`turn_limit` allows no more turns.
        """
        return {}

    @abstractmethod
    async def respond(
        self, episode: Episode, output: TokenOutput, limit: FinishReason | None
    ) -> FinishReason | None:
        """Answer the turn just generated, and append the response to the episode.

        ``limit`` is the limit that allows no further turn, or None.

        Returns:
            Why the trajectory ends, or None if it goes on.
        """

    async def restore(self, prefix: Prefix) -> int:
        """Restore a state behind this responder that was kept, before any turn is replayed.

        Returns:
            The number of inherited turns that need no replay. The default restores none.

        Raises:
            ReplayError: it cannot be restored, or what was not kept cannot be replayed.
        """
        return 0

    @abstractmethod
    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        """Answer an inherited turn again, to restore the state behind this responder.

        Turns come in order.

        Returns:
            The number of calls made for it.

        Raises:
            ReplayError: the answer is not the recorded one.
        """


async def run_turns(episode: Episode, responder: Responder) -> FinishReason:
    """Run turns from where the episode stands until one ends the trajectory, and return why."""
    prefix = episode.request.prefix
    if prefix is not None:
        await _replay(episode, prefix, responder)

    while True:
        limit = responder.turn_limit(len(episode.turns))
        is_last = limit is not None
        options = responder.generate_options(last=is_last)
        output = await episode.generate(session_ends=is_last, **options)
        finish_reason = await responder.respond(episode, output, limit)
        if finish_reason is not None:
            return finish_reason


async def _replay(episode: Episode, prefix: Prefix, responder: Responder) -> None:
    """Restore the state after the inherited turns, or answer them once more."""
    start_time = time.perf_counter()
    restored_turns = await responder.restore(prefix)
    calls = 0
    for turn in range(restored_turns, len(prefix.turns)):
        calls += await responder.replay_turn(prefix, turn)
    seconds = time.perf_counter() - start_time
    episode.add_metrics(
        {"restored_turns": restored_turns, "replayed_calls": calls, "replay_seconds": seconds}
    )


def check_replay(
    turn: int, source: str, recorded: object, replayed: object, *, remedy: str
) -> None:
    """Check that a replayed answer is the recorded one.

    Args:
        turn: number of the answered turn.
        source: what answered.
        recorded: the answer in the parent.
        replayed: the answer of the replay.
        remedy: how to make the two equal.

    Raises:
        ReplayError: they differ.
    """
    if recorded != replayed:
        raise ReplayError(
            f"{source} answered {replayed!s:.300} where it had answered {recorded!s:.300} in turn"
            f" {turn}; {remedy}, or set rollout.strategy.name=chain"
        )


def describe_call(call: ToolCallRecord) -> str:
    """Return what a call answered, for :func:`check_replay`."""
    return f"{call.observation!r} (error {call.error}, reward {call.reward})"


def answer_or_cut(output: TokenOutput) -> FinishReason:
    """Return how a turn without action ends the trajectory: as an answer, or cut off."""
    if output.stop_reason is StopReason.LENGTH:
        return FinishReason.RESPONSE_LENGTH
    return FinishReason.ANSWER


@register_agent("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """One prompt, one answer, no tools."""

    continues_prefix = True

    async def play(self, request: EpisodeRequest) -> Trajectory:
        episode = self.start(request)
        output = await episode.generate(session_ends=True)
        return episode.finish(answer_or_cut(output))
