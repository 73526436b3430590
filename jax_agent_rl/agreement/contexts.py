"""The contexts a diagnosis looks at: ids, the engine's log-probs, and which tokens can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_agent_rl.learner.comparison import comparable
from jax_agent_rl.types import Group, Trajectory, digest_ids

LONGEST = 1024
"""Ids that are looked at of a context; what comes later is left out."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One sequence of a trajectory.

    Attributes:
        name: of its trajectory.
        token_ids: prompt and response.
        prompt: ids before the first sampled one.
        at: int [S], places of the compared tokens in ``token_ids``.
        rollout: float64 [S], the engine's log-probs of them.
        learner: float64 [S], the learner's own, where it scored them.
        drifted: turns of which the engine reported another context than is trained on.
    """

    name: str
    token_ids: tuple[int, ...]
    prompt: int
    at: np.ndarray
    rollout: np.ndarray
    learner: np.ndarray | None = None
    drifted: int = 0

    def cut(self, longest: int) -> Context:
        """Its beginning: what is later has no effect on it."""
        kept = self.at < longest
        return replace(
            self,
            token_ids=self.token_ids[:longest],
            at=self.at[kept],
            rollout=self.rollout[kept],
            learner=None if self.learner is None else self.learner[kept],
        )

    def to_json(self) -> dict[str, Any]:
        arrays = {"at": self.at.tolist(), "rollout": self.rollout.tolist()}
        learner = None if self.learner is None else self.learner.tolist()
        ids = {"name": self.name, "token_ids": list(self.token_ids), "prompt": self.prompt, "drifted": self.drifted}
        return ids | arrays | {"learner": learner}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Context:
        """The inverse of :meth:`to_json`."""
        learner = None if saved["learner"] is None else np.asarray(saved["learner"], np.float64)
        return cls(
            name=saved["name"],
            token_ids=tuple(saved["token_ids"]),
            prompt=saved["prompt"],
            at=np.asarray(saved["at"], np.int64),
            rollout=np.asarray(saved["rollout"], np.float64),
            learner=learner,
            drifted=saved["drifted"],
        )


def contexts_of(
    groups: Sequence[Group], since: int, learner: Sequence[np.ndarray] | None = None, *, longest: int = LONGEST
) -> list[Context]:
    """Every context of text in which something can be compared.

    Args:
        since: first policy version of the parameters compared with.
        learner: for each trajectory the learner's log-probs of its tokens with loss, float64 [S].
        longest: ids that are kept of each.
    """
    found = []
    for i, trajectory in enumerate(t for group in groups for t in group.trajectories):
        own = None if learner is None else learner[i]
        found += [context.cut(longest) for context in _of_trajectory(trajectory, since, own)]
    return [context for context in found if len(context.at)]


def _of_trajectory(trajectory: Trajectory, since: int, learner: np.ndarray | None) -> Iterator[Context]:
    begin = 0
    for sequence in trajectory.sequences:
        with_loss = np.flatnonzero(sequence.loss_mask)
        mine = comparable(replace(sequence, history_window=None, segments=()), since)
        own = None if learner is None else learner[begin : begin + len(with_loss)][mine]
        begin += len(with_loss)
        if sequence.multi_modal:
            continue
        at = with_loss[mine]
        yield Context(
            name=sequence.trajectory_id,
            token_ids=(*sequence.prompt_ids, *sequence.response_ids),
            prompt=len(sequence.prompt_ids) + int(np.argmax(sequence.response_mask)),
            at=len(sequence.prompt_ids) + at,
            rollout=np.asarray(sequence.rollout_logprobs, np.float64)[at],
            learner=own,
            drifted=_drifted(sequence),
        )


def _drifted(sequence: Trajectory) -> int:
    """Turns whose context, as the engine saw it, is not the one trained on; engines that report none have none."""
    context, drifted = sequence.prompt_ids, 0
    for turn in sequence.turns:
        context += turn.output.token_ids
        reported = turn.output.context_digest
        drifted += bool(reported) and reported != digest_ids(context)
        context += turn.appended_ids
    return drifted
