"""What a branch takes over from the trajectory it leaves: ids, never text that would be tokenized again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.types import Fork, StopReason, TokenOutput, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A trajectory up to a fork.

    Attributes:
        fork: where it ends.
        prompt_ids: the prompt.
        turns: whole turns, with what was appended to them.
        begun: the ids taken over of the next turn, as if it had been interrupted there; None if there are none.
        messages: the conversation as text, up to ``turns``.
    """

    fork: Fork
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    begun: TokenOutput | None
    messages: tuple[Mapping[str, Any], ...]

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
            turns=parent.turns[: fork.turns],
            begun=_first_ids(cut, fork.tokens) if fork.tokens else None,
            messages=_messages_before(parent, fork.turns),
        )

    @property
    def context_ids(self) -> list[int]:
        """The prompt and the whole turns."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids


def _first_ids(output: TokenOutput, count: int) -> TokenOutput:
    return replace(
        output,
        token_ids=output.token_ids[:count],
        log_probs=output.log_probs[:count],
        policy_versions=output.policy_versions[:count],
        stop_reason=StopReason.ABORTED,
        stop_match=None,
        context_digest="",
    )


def _messages_before(trajectory: Trajectory, turn: int) -> tuple[Mapping[str, Any], ...]:
    """Return the messages before a turn, counted from the end as the prompt may hold assistant messages."""
    spoken = [i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    return trajectory.messages[: spoken[turn - trajectory.num_turns]]
