"""The model acts in an environment until the environment ends the episode, or a limit does.

::

    lease (started, or warm) ─► reset ─► row's prompt + first observation
      ┌─► generate ──cut──────────────────────────────────────► RESPONSE_LENGTH
      │      │
      │     step, snapshot ──done─────────────────────────────► ENVIRONMENT_DONE
      │      │  ──turn limit reached──────────────────────────► MAX_ASSISTANT_TURNS, MAX_USER_TURNS
      └─── append the observation, if it fits ──no────────────► RESPONSE_LENGTH
                                                     conclude: the last word on the score
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.agents.episode import Episode, read_turn
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.prompt import row_prompt
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.agents.turn_loop import Responder, check_replay, describe_call, run_turns
from jax_agent_rl.environments import (
    LeasedEnvironment,
    Observation,
    get_environment,
    row_environment,
)
from jax_agent_rl.environments.snapshots import EnvironmentSnapshot
from jax_agent_rl.errors import EnvironmentFailedError, ReplayError
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory
from jax_agent_rl.utils.media import text_message

_REMEDY = "seed it from its environment_kwargs, or set its `replayable` to False"


@dataclass
class EnvironmentResponder(Responder):
    """Steps the environment with every reply, so that the reply at a turn limit is scored.

    Attributes:
        trajectory_id: under which the environment's snapshots are kept.
        messages_not_shown: the environment's last answer, if it did not fit.
    """

    environment: LeasedEnvironment
    trajectory_id: str
    messages_not_shown: Sequence[Mapping[str, Any]] = ()

    async def respond(
        self, episode: Episode, output: TokenOutput, limit: FinishReason | None
    ) -> FinishReason | None:
        if output.stop_reason is StopReason.LENGTH:
            return FinishReason.RESPONSE_LENGTH
        start_time = time.perf_counter()
        with span("tool", "environment") as traced:
            traced.set(arguments={"reply": episode.messages[-1]["content"]})
            reply = episode.read_turn(tools=self.environment.tool_schemas)
            observation = await self.environment.step(reply)
            calls = observation.tool_calls
            errors = [call.error for call in calls if call.error]
            traced.set(
                observation="\n".join(message["content"] for message in observation.messages),
                tool_error=errors[0] if errors else None,
            )
        seconds = time.perf_counter() - start_time

        # Before the observation is part of the episode: a checkpoint holds both, or neither.
        snapshot = None
        if limit is None and not observation.done:
            snapshot = await self._take_snapshot(turns=len(episode.turns))

        episode.add_metrics({"environment_seconds": seconds, **observation.metrics})
        episode.record_calls(calls, seconds=sum(call.seconds for call in calls))
        episode.add_score(observation.score)

        if observation.done:
            return FinishReason.ENVIRONMENT_DONE
        if limit is not None:
            return limit
        messages = self._shortened_messages(observation)
        if not episode.append(messages):
            self.messages_not_shown = messages
            return FinishReason.RESPONSE_LENGTH
        if snapshot is not None:
            self._keep(snapshot)
        return None

    async def _take_snapshot(self, *, turns: int) -> EnvironmentSnapshot | None:
        """Return the environment's state after so many turns; None if nothing goes on from it."""
        context = self.context
        is_wanted = context.keep_sessions or context.in_checkpoints
        if not is_wanted or not self.environment.takes_snapshots:
            return None
        if not context.environments.snapshots.max_bytes:
            return None

        try:
            data = await self.environment.snapshot()
        except EnvironmentFailedError as error:  # what goes on from here is replayed
            context.failures.report(
                f"a snapshot of environment {self.environment.name!r} failed",
                str(error),
                error=error.__cause__,
            )
            return None
        return EnvironmentSnapshot(turns=turns, data=data)

    def _keep(self, snapshot: EnvironmentSnapshot) -> None:
        """Keep a snapshot; without branches, the trajectory's earlier ones are of no use."""
        snapshots = self.context.environments.snapshots
        if not self.context.keep_sessions:
            snapshots.forget(self.trajectory_id)
        if not snapshots.add(self.trajectory_id, snapshot):
            self.context.failures.report(
                f"a snapshot of environment {self.environment.name!r} is too large",
                f"a snapshot of environment {self.environment.name!r} has {len(snapshot.data)}"
                f" bytes, more than environments.snapshot_mb={snapshots.max_bytes >> 20}",
                hint="what goes on from there is replayed",
            )

    async def restore(self, prefix: Prefix) -> int:
        turns = len(prefix.turns)
        snapshots = self.context.environments.snapshots
        snapshot = prefix.snapshot
        if snapshot is None and prefix.fork is not None:
            # The parent went on after the fork, which is not a state of the branch.
            snapshot = snapshots.newest(prefix.fork.parent_id, prefix.fork.turns)

        restored_turns = 0
        if snapshot is not None and self.environment.takes_snapshots:
            if snapshot.turns > turns or len(snapshot.data) > snapshots.max_bytes:
                raise ReplayError(
                    f"the snapshot of environment {self.environment.name!r} is of {snapshot.turns}"
                    f" turns and {len(snapshot.data)} bytes; there are {turns} turns, and"
                    f" environments.snapshot_mb={snapshots.max_bytes >> 20}"
                )
            try:
                await self.environment.restore(snapshot.data)
            except EnvironmentFailedError as error:
                raise ReplayError(f"{error}; its snapshot cannot be used") from error
            self._keep(snapshot)  # a branch of this branch may leave here as well
            restored_turns = snapshot.turns

        if restored_turns < turns and not self.environment.replayable:
            raise ReplayError(
                f"environment {self.environment.name!r} cannot be replayed, and there is no"
                f" snapshot of it after {turns} turns; raise environments.snapshot_mb"
            )
        return restored_turns

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        recorded_turn = prefix.turns[turn]
        schemas = self.environment.tool_schemas
        reply = read_turn(self.context.codec, prefix.prompt_ids, prefix.turns[: turn + 1], schemas)
        observation = await self.environment.step(reply)

        recorded = (
            list(prefix.response_to(turn)),
            [describe_call(call) for call in recorded_turn.tool_calls],
            recorded_turn.score,
            False,  # the recorded trajectory went on
        )
        replayed = (
            self._shortened_messages(observation),
            [describe_call(call) for call in observation.tool_calls],
            observation.score,
            observation.done,
        )
        self.check(turn, recorded, replayed)
        return 1

    def check(self, turn: int, recorded: object, replayed: object) -> None:
        """Check a replayed answer of the environment; see :func:`check_replay`."""
        source = f"environment {self.environment.name!r}"
        check_replay(turn, source, recorded, replayed, remedy=_REMEDY)

    def _shortened_messages(self, observation: Observation) -> list[Mapping[str, Any]]:
        """Return the messages of an observation, each within ``agent.max_tool_response_length``."""
        messages = []
        for message in observation.messages:
            messages.append({**message, "content": self.context.shorten(message["content"])})
        return messages


@register_agent("environment_agent")
class EnvironmentAgent(AgentLoop):
    """Multi-turn in the environment that ``extra_info.environment_kwargs`` names.

    Observations are shortened as tool results are (``agent.max_tool_response_length``), and count
    as user turns.
    """

    continues_prefix = True

    def branching_problem(self, row: Mapping[str, Any]) -> str | None:
        name, _ = row_environment(row)
        cls = get_environment(name)
        keeps_snapshots = cls.takes_snapshots and self.context.environments.snapshots.max_bytes
        if not cls.replayable and not keeps_snapshots:
            return (
                f"environment {name!r} cannot be replayed (its `replayable` is False), and no"
                " snapshots of it are kept (`takes_snapshots`, environments.snapshot_mb)"
            )
        return super().branching_problem(row)

    async def play(self, request: EpisodeRequest) -> Trajectory:
        snapshots = self.context.environments.snapshots
        # A member that starts again has the id of the attempt before it, but not its states.
        snapshots.forget(request.trajectory_id)
        try:
            return await self._play(request)
        finally:
            if not self.context.keep_sessions:
                snapshots.forget(request.trajectory_id)

    async def _play(self, request: EpisodeRequest) -> Trajectory:
        name, kwargs = row_environment(request.row)
        async with self.context.environments.pool(name).lease(kwargs) as environment:
            opening = await environment.reset(**kwargs)
            episode = self.start(
                request, opening=opening.messages, tool_schemas=environment.tool_schemas
            )
            episode.add_metrics(environment.start_metrics)
            responder = EnvironmentResponder(self.context, environment, request.trajectory_id)
            if request.prefix is None:
                episode.add_metrics(opening.metrics)
            else:
                # A branch inherits its prompt, so the reset must have shown the same.
                recorded = list(request.prefix.messages_before(0))
                prompt = row_prompt(request.row, opening.messages)
                replayed = [text_message(message) for message in prompt]
                responder.check(0, recorded, replayed)

            reason = await run_turns(episode, responder)
            conversation = (*episode.messages, *responder.messages_not_shown)
            outcome = dict(await environment.conclude(conversation, reason))

        episode.add_score(outcome.pop("score"))
        episode.add_metrics(outcome)
        return episode.finish(reason)
