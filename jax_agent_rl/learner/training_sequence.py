"""Sequences that a loss is computed of: contexts, the tokens scored in them, and what the loss reads of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A context and what is trained on in it. S tokens are scored: those of the loss mask.

    Attributes:
        token_ids: int32 [n].
        loss_mask: bool [n], tokens whose log-prob is computed; not the first one, which follows nothing.
        targets: int32 [S], ids that are scored in place of the sequence's own, in the same contexts; None: its own. Of
            ``cross_entropy`` also [S, K], K ids for each; then a weight is [S, K], too.
        weight: float [S], what each counts in the loss, a sum; None: 1 each.
        advantage: float [S], for all losses but ``cross_entropy``.
        old_logprob: float [S], log-probs under the policy that sampled them, for the same losses.
        ratio_mask: float [S], for ``gspo``: the sequence's ratio is the mean over tokens where it is not 0.
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
            raise ValueError(f"{len(self.token_ids)} token ids, but a loss mask of {len(self.loss_mask)}")
        if not np.any(self.loss_mask) or self.loss_mask[0]:
            raise ValueError(
                "a sequence needs a token to train on, and one before it: the loss mask of "
                f"{len(self.loss_mask)} tokens has {int(np.sum(self.loss_mask))}, the first "
                f"{'among' if self.loss_mask[0] else 'not among'} them"
            )
        shape = (self.num_scored,) if self.targets is None else (self.num_scored, *np.shape(self.targets)[1:])
        for name, values in self._per_target().items():
            if values is not None and np.shape(values) != shape:
                of_each = f" with {self.per_token} targets each" if self.per_token else ""
                raise ValueError(
                    f"{name} has shape {np.shape(values)}; there are {self.num_scored} scored tokens{of_each}"
                )

    @property
    def num_scored(self) -> int:
        """S."""
        return int(np.sum(self.loss_mask))

    @property
    def per_token(self) -> int | None:
        """K; None if each token has one target."""
        return None if self.targets is None or self.targets.ndim == 1 else self.targets.shape[1]

    def _per_target(self) -> dict[str, np.ndarray | None]:
        return {name: x for name, x in vars(self).items() if name not in ("token_ids", "loss_mask")}

    def columns(self) -> list[TrainingSequence]:
        """Return a sequence for each of the K targets per token, or itself if there is one."""
        if self.per_token is None:
            return [self]
        return [
            replace(self, **{name: None if x is None else x[:, column] for name, x in self._per_target().items()})
            for column in range(self.per_token)
        ]

    def trajectory(self, number: int) -> Trajectory:
        """Return it, its batch's ``number``-th, as what the learner packs: a turn whose scored tokens carry loss."""
        begin = int(np.argmax(self.loss_mask))
        ids, scored = self.token_ids.tolist(), np.asarray(self.loss_mask, bool)[begin:].tolist()
        output = TokenOutput(
            token_ids=tuple(ids[begin:]),
            log_probs=(0.0,) * len(scored),
            policy_versions=(0,) * len(scored),
            stop_reason=StopReason.EOS,
            context_digest="",
            constrained=tuple(not mark for mark in scored),
        )
        return Trajectory.from_turns(
            prompt_ids=ids[:begin],
            turns=(Turn(output=output),),
            trajectory_id=f"sequence {number}",
            group_id="",
            agent_name="",
            finish_reason=FinishReason.ANSWER,
        )


def terms_of(loss: str, data: Sequence[TrainingSequence]) -> dict[str, list[np.ndarray]]:
    """Return the terms of a batch by name, in the shape of each sequence's targets.

    Raises:
        ValueError: a sequence lacks what the loss reads, or has several targets per token, which only
            ``cross_entropy`` takes.
    """
    if loss != "cross_entropy" and any(sequence.per_token for sequence in data):
        raise ValueError(f"the loss {loss} takes one target per token; give it a sequence for each, see `columns`")
    needed = {"cross_entropy": (), "gspo": ("advantage", "old_logprob", "ratio_mask")}
    reads = ("weight", *needed.get(loss, ("advantage", "old_logprob")))
    shapes = [(s.num_scored,) if s.targets is None else s.targets.shape for s in data]
    terms: dict[str, list[np.ndarray]] = {"scored": [np.ones(shape) for shape in shapes]}
    for name, default in {"weight": 1.0, "advantage": 1.0, "old_logprob": 0.0, "ratio_mask": 1.0}.items():
        given = [getattr(sequence, name) if name in reads else None for sequence in data]
        if name in reads[1:] and (lacking := [number for number, values in enumerate(given) if values is None]):
            raise ValueError(f"the loss {loss} needs {name} of every sequence, which sequence {lacking[0]} lacks")
        pairs = zip(shapes, given, strict=True)
        terms[name] = [np.full(shape, default) if values is None else values for shape, values in pairs]
    terms["ratio_mask"] = [(mask != 0).astype(np.float32) for mask in terms["ratio_mask"]]
    if empty := [number for number, mask in enumerate(terms["ratio_mask"]) if not mask.any()]:
        raise ValueError(f"the ratio mask of sequence {empty[0]} is 0 everywhere; mark the tokens that were sampled")
    return terms
