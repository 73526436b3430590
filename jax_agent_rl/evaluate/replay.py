"""Recorded replies, played again in their environments, which may score them otherwise by now.

::

    recorded trajectory ─► reset ─► each recorded turn ─► step ─► the same answer? ─► its new score
                             └─ another opening: ReplayError      └─ no: ReplayError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_agent_rl.agents.environment_agent import EnvironmentAgent
from jax_agent_rl.agents.episode import read_turn
from jax_agent_rl.agents.prompt import codec_of_row
from jax_agent_rl.agents.request import turn_positions
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.environments import EnvironmentPools, get_environment, row_environment
from jax_agent_rl.errors import DataError, ReplayError
from jax_agent_rl.types import FinishReason, StopReason, Trajectory
from jax_agent_rl.utils.media import text_message

_REMEDY = "score such trajectories without --replay"


class EnvironmentReplay:
    """Plays trajectories of ``environment_agent`` again.

    Args:
        codec: the policy's, by which recorded token ids are replies.
        limits: how long an environment's answers may be.
    """

    def __init__(self, pools: EnvironmentPools, codec: ChatCodec, limits: AgentConfig) -> None:
        self._pools = pools
        self._codec = codec
        self._limits = limits

    async def play(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the scores that its environment gives it now.

        One of another agent has no environment, and stays as it is.

        Raises:
            ReplayError: the environment cannot be replayed, or answers otherwise than recorded.
            EnvironmentFailedError: the environment failed.
        """
        if trajectory.agent_name != EnvironmentAgent.name:
            return trajectory
        try:
            name, kwargs = row_environment(trajectory.row)
            codec = codec_of_row(self._codec, trajectory.row)
        except DataError as error:
            raise ReplayError(f"{trajectory.trajectory_id}: {error}") from None
        if not get_environment(name).replayable:
            raise ReplayError(
                f"environment {name!r} cannot be replayed (its `replayable` is False); {_REMEDY}"
            )

        source = f"environment {name!r}"
        scores: list[float | None] = [None] * trajectory.num_turns
        async with self._pools.pool(name).lease(kwargs) as environment:
            opening = await environment.reset(**kwargs)
            _check_opening(trajectory, source, opening.messages)
            for number, turn in enumerate(trajectory.turns):
                if turn.output.stop_reason is StopReason.LENGTH:
                    break  # it was cut off, and did not get to the environment
                turns = trajectory.turns[: number + 1]
                schemas = environment.tool_schemas
                reply = read_turn(codec, trajectory.prompt_ids, turns, schemas)
                observation = await environment.step(reply)
                scores[number] = observation.score
                answer = None
                if not observation.done:
                    answer = self._texts(observation.messages)
                _check(trajectory, number, source, answer)
            outcome = await environment.conclude(trajectory.messages, trajectory.finish_reason)

        scores[-1] = (scores[-1] or 0.0) + outcome["score"]
        scored_turns = []
        for turn, score in zip(trajectory.turns, scores, strict=True):
            scored_turns.append(replace(turn, score=score))
        return replace(trajectory, turns=tuple(scored_turns))

    def _texts(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Return messages as they were shown, within ``agent.max_tool_response_length``."""
        texts = []
        for message in messages:
            content = self._codec.truncate(
                message["content"],
                self._limits.max_tool_response_length,
                self._limits.tool_response_truncate_side,
            )
            texts.append((message["role"], content))
        return texts


def _check_opening(
    trajectory: Trajectory, source: str, opening: Sequence[Mapping[str, Any]]
) -> None:
    """Check that an environment begins as it had when it was recorded."""
    first_turn = turn_positions(trajectory.messages, trajectory.num_turns)[0]
    start = max(0, first_turn - len(opening))  # the row's prompt comes before
    recorded = _spoken(trajectory.messages[start:first_turn])
    replayed = _spoken([text_message(message) for message in opening])
    if recorded != replayed:
        raise ReplayError(
            f"{source} begins with {replayed!s:.300} where it had begun with {recorded!s:.300};"
            f" {_REMEDY}"
        )


def _check(
    trajectory: Trajectory, turn: int, source: str, answer: list[tuple[str, str]] | None
) -> None:
    """Check that an environment answered a turn as it had when it was recorded.

    Args:
        answer: role and text of its messages; None: it ended the episode.
    """
    is_last = turn == trajectory.num_turns - 1
    had_ended = is_last and trajectory.finish_reason is FinishReason.ENVIRONMENT_DONE
    has_ended = answer is None
    if has_ended != had_ended:
        ending = "ended the episode" if has_ended else "went on"
        raise ReplayError(
            f"{source} {ending} after turn {turn}, other than when it was recorded; {_REMEDY}"
        )
    if is_last:
        return  # what followed it was not recorded

    positions = turn_positions(trajectory.messages, trajectory.num_turns)
    recorded = _spoken(trajectory.messages[positions[turn] + 1 : positions[turn + 1]])
    if recorded != answer:
        raise ReplayError(
            f"{source} answered {answer!s:.300} where it had answered {recorded!s:.300} in turn"
            f" {turn}; {_REMEDY}"
        )


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return role and text of messages of text."""
    return [(message["role"], message["content"]) for message in messages]
