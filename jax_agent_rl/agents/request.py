"""What an agent plays: a row, the ids and the sampling of its trajectory, and where it begins.

::

    collector ──EpisodeRequest──► AgentLoop.play ──► AgentLoop.start ──► Episode ──► Trajectory
                                        │                  ▲
                                        └── as_role ───────┘   several roles: a request each

A request without ``prefix`` begins at the row's prompt. A branch inherits its prefix from its
parent: ids, never text that would be tokenized again. A trajectory that was interrupted with its
run goes on from a prefix of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from jax_agent_rl.environments.snapshots import EnvironmentSnapshot
from jax_agent_rl.types import Fork, SamplingParams, StopReason, TokenOutput, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """One trajectory to play.

    >>> request = EpisodeRequest(
    ...     row={"prompt": [{"role": "user", "content": "2 + 2?"}]},
    ...     trajectory_id="train-3-0-1",
    ...     group_id="train-3-0",
    ...     sampling=SamplingParams(max_tokens=64, seed=7),
    ... )
    >>> request.as_role("solver").trajectory_id
    'train-3-0-1/solver'

    Attributes:
        row: ``prompt`` (messages), ``data_source``, ``agent_name``, ``reward_model.ground_truth``,
            ``extra_info`` (``tools_kwargs``, ``tool_selection``, …). An agent may start its
            episodes with others: ``dataclasses.replace(request, row=…)``.
        trajectory_id: unique within the run; also the session id of its requests to the engine.
        group_id: shared by the trajectories of one prompt.
        sampling: ``max_tokens`` caps each turn, besides the budgets. Every turn derives its own
            seed from ``seed``.
        prefix: what was sampled already; None begins at the prompt.
        role: the role that the trajectory is of, see :meth:`as_role`; None if there is one alone.

    Raises:
        ValueError: a role has a prefix; episodes of several roles begin at their prompts.
    """

    row: Mapping[str, Any]
    trajectory_id: str
    group_id: str
    sampling: SamplingParams
    prefix: Prefix | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        if self.role is not None and self.prefix is not None:
            raise ValueError(
                f"{self.trajectory_id}: role {self.role!r} cannot go on from the middle of a"
                " trajectory; episodes of several roles begin at their prompts"
            )

    def as_role(self, role: str) -> EpisodeRequest:
        """Return the request of one of an agent's roles, with an id and a seed of its own."""
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=derive_seed(sampling.seed, role))
        return replace(
            self, role=role, trajectory_id=role_id(self.trajectory_id, role), sampling=sampling
        )


def role_id(trajectory_id: str, role: str) -> str:
    """Return the id of a role's trajectory in the episode with this id."""
    return f"{trajectory_id}/{role}"


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) from any parts: equal for equal parts, unrelated otherwise.

    >>> derive_seed(0, "train", 3) == derive_seed(0, "train", 3)
    True
    """
    text = json.dumps(parts)  # distinguishes 1 from "1", and (1, 23) from (12, 3)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A trajectory up to a fork, or up to where its run was interrupted.

    Attributes:
        fork: where it branched off another one; None if the trajectory itself goes on.
        prompt_media: images and videos of the prompt, by kind.
        turns: complete turns, with what was appended to them.
        partial_turn: the inherited ids of the next turn, as if it had been interrupted there, or
            all of it if it has not been answered; None if there are none. Checkpoints call it
            ``begun``.
        messages: the conversation as text, up to ``turns``.
        snapshot: of the environment, in a checkpoint; None: there is none.
    """

    fork: Fork | None
    prompt_ids: tuple[int, ...]
    prompt_media: Mapping[str, tuple[Any, ...]]
    turns: tuple[Turn, ...]
    partial_turn: Annotated[TokenOutput | None, Field(alias="begun")]
    messages: Messages
    snapshot: EnvironmentSnapshot | None = None

    @classmethod
    def of(cls, parent: Trajectory, fork: Fork) -> Prefix:
        """Return the beginning of ``parent`` up to ``fork``.

        Raises:
            ValueError: the fork is of another trajectory, does not leave a turn to sample, or the
                parent edited its history, so that its last context is not all of it.
        """
        if fork.parent_id != parent.trajectory_id or parent.segments:
            raise ValueError(f"{fork} is not a place in trajectory {parent.trajectory_id}")
        if not 0 <= fork.turns < parent.num_turns:
            raise ValueError(
                f"{fork}: trajectory {parent.trajectory_id} has {parent.num_turns} turns;"
                " keep fewer"
            )
        forked_output = parent.turns[fork.turns].output
        sampled_count = len(forked_output.token_ids)
        if not 0 <= fork.tokens < sampled_count:
            raise ValueError(
                f"{fork}: turn {fork.turns} of {parent.trajectory_id} has {sampled_count} ids"
            )

        partial_turn = None
        if fork.tokens:
            partial_turn = forked_output.first(
                fork.tokens, stop_reason=StopReason.ABORTED, stop_match=None
            )
        positions = turn_positions(parent.messages, parent.num_turns)
        return cls(
            fork=fork,
            prompt_ids=parent.prompt_ids,
            prompt_media=parent.prompt_media,
            turns=parent.turns[: fork.turns],
            partial_turn=partial_turn,
            messages=parent.messages[: positions[fork.turns]],
        )

    @property
    def context_ids(self) -> list[int]:
        """The ids of the prompt and of the complete turns."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids

    def messages_before(self, turn: int) -> Messages:
        """Return the conversation before an inherited turn; before turn 0, that is the prompt."""
        if turn == len(self.turns):
            return self.messages
        return self.messages[: turn_positions(self.messages, len(self.turns))[turn]]

    def response_to(self, turn: int) -> Messages:
        """Return the messages that answered an inherited turn."""
        turn_position = len(self.messages_before(turn))
        return self.messages_before(turn + 1)[turn_position + 1 :]


def turn_positions(messages: Messages, turns: int) -> list[int]:
    """Return the index of each turn's message.

    The prompt may hold assistant messages as well, so the last ``turns`` of them are the turns.
    """
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return positions[len(positions) - turns :]
