"""Sequences to train on that are given, not sampled, and what each of their tokens contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A context, and how its S tokens with loss are trained on.

    Attributes:
        token_ids: int32 [n].
        loss_mask: bool [n], tokens whose log-prob is computed; not the first one, which has no
            context.
        targets: int32 [S], ids that are scored in place of the sequence's own, in the same
            contexts. ``cross_entropy`` also takes [S, K], K ids for each token; then the weight is
            [S, K] as well. None: the sequence's own ids.
        weight: float [S], weight of each token in the loss, which is a sum. None: 1.
        advantage: float [S], for all losses but ``cross_entropy``.
        old_logprob: float [S], log-probs under the policy that sampled them, for the same losses.
        ratio_mask: float [S], for ``gspo``: the sequence's ratio is the mean over the tokens where
            the mask is not 0.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    targets: np.ndarray | None = None
    weight: np.ndarray | None = None
    advantage: np.ndarray | None = None
    old_logprob: np.ndarray | None = None
    ratio_mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"{len(self.token_ids)} token ids, but a loss mask of {len(self.loss_mask)}"
            )
        if not np.any(self.loss_mask) or self.loss_mask[0]:
            first = "among" if self.loss_mask[0] else "not among"
            raise ValueError(
                "a sequence needs a token to train on, and one before it: the loss mask of"
                f" {len(self.loss_mask)} tokens has {self.num_scored}, the first {first} them"
            )

        shape = self._shape
        for name, values in self._per_target().items():
            if values is not None and np.shape(values) != shape:
                expected = f"{self.num_scored} scored tokens"
                if self.per_token:
                    expected += f" with {self.per_token} targets each"
                raise ValueError(f"{name} has shape {np.shape(values)}; there are {expected}")

    @property
    def num_scored(self) -> int:
        """S."""
        return int(np.sum(self.loss_mask))

    @property
    def per_token(self) -> int | None:
        """K; None if each token has one target."""
        if self.targets is None or self.targets.ndim == 1:
            return None
        return self.targets.shape[1]

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of numbers per target: [S], or [S, K]."""
        if self.per_token is None:
            return (self.num_scored,)
        return (self.num_scored, self.per_token)

    def _per_target(self) -> dict[str, np.ndarray | None]:
        return {
            "targets": self.targets,
            "weight": self.weight,
            "advantage": self.advantage,
            "old_logprob": self.old_logprob,
            "ratio_mask": self.ratio_mask,
        }

    def columns(self) -> list[TrainingSequence]:
        """Return a sequence for each of the K targets per token, or itself if there is one."""
        if self.per_token is None:
            return [self]

        sequences = []
        for column in range(self.per_token):
            values_of_column = {}
            for name, values in self._per_target().items():
                values_of_column[name] = None if values is None else values[:, column]
            sequences.append(replace(self, **values_of_column))
        return sequences

    def trajectory(self, number: int) -> Trajectory:
        """Return the sequence as the learner packs it: a turn whose scored tokens carry loss.

        Args:
            number: of the sequence in its batch; names it in messages.
        """
        begin = int(np.argmax(self.loss_mask))  # of the response: everything before is the prompt
        ids = self.token_ids.tolist()
        is_scored = np.asarray(self.loss_mask, bool)[begin:].tolist()
        output = TokenOutput(
            token_ids=tuple(ids[begin:]),
            log_probs=(0.0,) * len(is_scored),
            policy_versions=(0,) * len(is_scored),
            stop_reason=StopReason.EOS,
            context_digest="",
            constrained=tuple(not scored for scored in is_scored),
        )
        return Trajectory.from_turns(
            prompt_ids=ids[:begin],
            turns=(Turn(output=output),),
            trajectory_id=f"sequence {number}",
            group_id="",
            agent_name="",
            finish_reason=FinishReason.ANSWER,
        )


_NEEDED_TERMS = {
    "cross_entropy": (),
    "importance_sampling": ("advantage", "old_logprob"),
    "ppo": ("advantage", "old_logprob"),
    "cispo": ("advantage", "old_logprob"),
    "dro": ("advantage", "old_logprob"),
    "gspo": ("advantage", "old_logprob", "ratio_mask"),
}
"""For each loss the fields of a :class:`TrainingSequence` that it needs."""

_UNREAD_TERMS = {"advantage": 1.0, "old_logprob": 0.0, "ratio_mask": 1.0}
"""Values of the terms that a loss does not read: the program of all losses takes them anyway."""


def sequence_terms(loss: str, data: Sequence[TrainingSequence]) -> dict[str, list[np.ndarray]]:
    """Return the terms of a batch by name, in the shape of each sequence's targets.

    Raises:
        ValueError: a sequence lacks what the loss reads, or has several targets per token, which
            only ``cross_entropy`` takes.
    """
    if loss != "cross_entropy" and any(sequence.per_token for sequence in data):
        raise ValueError(
            f"the loss {loss} takes one target per token;"
            " give it a sequence for each, see `columns`"
        )

    terms: dict[str, list[np.ndarray]] = {"scored": [], "weight": []}
    for sequence in data:
        ones = np.ones(sequence._shape)
        terms["scored"].append(ones)
        terms["weight"].append(ones if sequence.weight is None else sequence.weight)

    for name, unread_value in _UNREAD_TERMS.items():
        terms[name] = []
        for number, sequence in enumerate(data):
            if name not in _NEEDED_TERMS[loss]:
                terms[name].append(np.full(sequence._shape, unread_value))
                continue
            values = getattr(sequence, name)
            if values is None:
                raise ValueError(
                    f"the loss {loss} needs {name} of every sequence, which sequence {number} lacks"
                )
            terms[name].append(values)

    for number, mask in enumerate(terms["ratio_mask"]):
        if not np.any(mask):
            raise ValueError(
                f"the ratio mask of sequence {number} is 0 everywhere;"
                " mark the tokens that were sampled"
            )
        terms["ratio_mask"][number] = (mask != 0).astype(np.float32)
    return terms
