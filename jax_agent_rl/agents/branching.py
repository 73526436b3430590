"""Branching off a finished trajectory: the prefix that a branch inherits, and the replay of what answered its turns.

A trajectory that was interrupted with its run goes on likewise, from a prefix of its own. A branch inherits ids, never
text that would be tokenized again. Tools, tool servers, environments and simulated users keep state per trajectory, and
a branch is a trajectory of its own: they answer the inherited turns once more, in order
(:meth:`~jax_agent_rl.agents.turn_loop.Responder.replay_turn`). Their answers must not change, as the ids that follow
were sampled after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import ReplayError
from jax_agent_rl.types import Fork, StopReason, TokenOutput, ToolCallRecord, Trajectory, Turn

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A trajectory up to a fork, or up to where its run was interrupted.

    Attributes:
        fork: where it branched off another one; None if the trajectory itself goes on.
        prompt_ids: the prompt.
        prompt_media: images and videos it shows, by kind.
        turns: whole turns, with what was appended to them.
        begun: the inherited ids of the next turn, as if it had been interrupted there, or all of it if it has not
            been answered; None if there are none.
        messages: the conversation as text, up to ``turns``.
    """

    fork: Fork | None
    prompt_ids: tuple[int, ...]
    prompt_media: Mapping[str, tuple[Any, ...]]
    turns: tuple[Turn, ...]
    begun: TokenOutput | None
    messages: Messages

    @classmethod
    def of(cls, parent: Trajectory, fork: Fork) -> Prefix:
        """Return the beginning of ``parent`` up to ``fork``.

        Raises:
            ValueError: the fork is of another trajectory, does not leave a turn to sample, or the parent edited its
                history, so that its last context is not all of it.
        """
        if fork.parent_id != parent.trajectory_id or parent.segments:
            raise ValueError(f"{fork} is no place in trajectory {parent.trajectory_id}")
        if not 0 <= fork.turns < parent.num_turns:
            raise ValueError(f"{fork}: trajectory {parent.trajectory_id} has {parent.num_turns} turns; keep fewer")
        cut = parent.turns[fork.turns].output
        if not 0 <= fork.tokens < len(cut.token_ids):
            raise ValueError(f"{fork}: turn {fork.turns} of {parent.trajectory_id} has {len(cut.token_ids)} ids")
        return cls(
            fork=fork,
            prompt_ids=parent.prompt_ids,
            prompt_media=parent.prompt_media,
            turns=parent.turns[: fork.turns],
            begun=cut.first(fork.tokens, stop_reason=StopReason.ABORTED, stop_match=None) if fork.tokens else None,
            messages=parent.messages[: turn_positions(parent.messages, parent.num_turns)[fork.turns]],
        )

    @property
    def context_ids(self) -> list[int]:
        """The prompt and the whole turns."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids

    def messages_before(self, turn: int) -> Messages:
        """Return the conversation before an inherited turn; before turn 0, that is the prompt."""
        return self.messages[: [*turn_positions(self.messages, len(self.turns)), len(self.messages)][turn]]

    def response_to(self, turn: int) -> Messages:
        """Return the messages that answered an inherited turn."""
        return self.messages_before(turn + 1)[len(self.messages_before(turn)) + 1 :]


def turn_positions(messages: Messages, turns: int) -> list[int]:
    """Return the index of each turn's message, counted from the end as the prompt may hold assistant messages."""
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return assistant[len(assistant) - turns :]


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
