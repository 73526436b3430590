"""Batches: packed rows in which every common token is computed once, and the sequences that losses are computed of.

``packing`` makes the rows of trajectories. A row is a forest of tokens in depth-first order. Trajectories that begin
alike (one prompt, one few-shot prefix, one tree of branches) share nodes; a node's position is its depth, and it
attends to its ancestors::

    t1 = [10 11 20 21]      index          0  1  2  3  4
    t2 = [10 11 30]         token_ids     10 11 20 21 30
                            positions      0  1  2  3  2
                            subtree_end    5  5  4  4  5      i sees j  iff  j <= i < subtree_end[j]

With sharing off every trajectory is its own chain, and the same mask is that of a plain packed row.

What is trained on are *targets*, nodes of the loss mask (their log-prob is read at the parent), and *terms*, one per
such token and trajectory: several trajectories may have sampled the same token in the same context, each with its
own advantage.

The layout is made once; numbers about terms (advantages, weights, old log-probs) come and go between it and plain
per-trajectory arrays by :meth:`Batch.with_terms`, :meth:`Batch.gather_terms` and :meth:`Batch.gather_states`. A
trajectory with segments is packed as several sequences; its arrays are theirs, one after another.

For models with vision, placeholders of different images count as different ids until rows are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.generation import decode_supports, mask_words
from jax_agent_rl.learner.image_packing import RowImages
from jax_agent_rl.types import FinishReason, Group, StopReason, Support, TokenOutput, Trajectory, Turn

TERMS_PER_TOKEN = 2  # room for terms in a row, per token of its length
UNKNOWN_EXPERT = -1  # in ``Batch.routed_experts``: the router chooses itself


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one sequence of a trajectory in the batch.

    Attributes:
        row: its row.
        terms: its terms in the row, in the order in which they were sampled.
        path: int64 [L + 1], nodes of the last prompt id and of every response id: the states before and after each.
    """

    row: int
    terms: slice
    path: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Batch:
    """R packed rows. Padding has term weight 0 and attends to itself only.

    Attributes:
        token_ids, positions, subtree_end: int32 [R, T], see the module docstring.
        copies: int32 [R, T], sequences a node stands for; 0 at padding.
        target_parent: int32 [R, M]: index of the node whose logits score the target.
        target_id: int32 [R, M].
        target_valid: bool [R, M]; valid targets come first.
        term_target: int32 [R, K]: index into the targets.
        term_sequence: int32 [R, K]: which of the row's sequences; terms of one are contiguous.
        terms: float32 [R, K] each, by name, 0 at padding. ``weight`` is what a term weighs in the loss; a term of
            weight 0 is not trained on.
        places: for each trajectory given to :func:`~jax_agent_rl.learner.packing.pack`, where its sequences lie.
        images: of the rows; None for a text model.
        routed_experts: int16 [R, T, L, k], experts of nodes by the engine's choice, -1 where unknown; None without any.
        supports: of each row's valid targets in order, None where all ids were left; None if no draw was restricted.
            They stay encoded until a micro-batch is made: their masks take V / 8 bytes a target.
        vocab_size: V, of the supports.
        candidates: int32 [R, M, k], ids to score at each target beside its own, and float32 [R, M, k], the log-probs
            that a reference gives them; None without any.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    copies: np.ndarray
    target_parent: np.ndarray
    target_id: np.ndarray
    target_valid: np.ndarray
    term_target: np.ndarray
    term_sequence: np.ndarray
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)
    places: tuple[tuple[Place, ...], ...]
    images: RowImages | None = None
    routed_experts: np.ndarray | None = None
    supports: tuple[tuple[Support | None, ...], ...] | None = None
    vocab_size: int = 0
    candidates: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_nodes(self) -> int:
        """Tokens that are computed."""
        return int(np.count_nonzero(self.copies))

    @property
    def num_tokens(self) -> int:
        """Tokens that would be computed without prefix sharing."""
        return int(self.copies.sum())

    def with_terms(self, **values: Sequence[np.ndarray]) -> Batch:
        """Add named numbers of the terms: for each trajectory one per sampled token, [S], or several, [S, k]."""
        made = {name: self._scatter(per_trajectory) for name, per_trajectory in values.items()}
        return replace(self, terms={**self.terms, **made})

    def with_candidates(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> Batch:
        """Add ids to score beside the sampled ones, and a reference's log-probs: [S, k] for each trajectory.

        They belong to a position: trajectories that share a target give it the same.
        """
        shape = (*self.target_id.shape, ids[0].shape[1])
        all_ids, all_logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for number, place, own in self._spans():
            at = place.row, self.term_target[place.row, place.terms]
            all_ids[at], all_logprobs[at] = ids[number][own], logprobs[number][own]
        return replace(self, candidates=(all_ids, all_logprobs))

    def gather_terms(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of terms [R, K, ...] into one float64 array [S, ...] per trajectory."""
        return [
            np.concatenate([values[place.row, place.terms] for place in places]).astype(np.float64)
            for places in self.places
        ]

    def gather_targets(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of targets [R, M, ...] into one array [S, ...] per trajectory, for each of its terms."""
        return [
            np.concatenate([values[place.row, self.term_target[place.row, place.terms]] for place in places])
            for places in self.places
        ]

    def gather_states(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of nodes [R, T] into float64 [L + 1] per trajectory: before every id, after the last."""
        per_place = [[values[p.row, p.path] for p in places] for places in self.places]
        return [
            np.concatenate([*(states[:-1] for states in parts), parts[-1][-1:]]).astype(np.float64)
            for parts in per_place
        ]

    def micro_batches(self, rows: int, *, lengths: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Yield slices of exactly ``rows`` rows as arrays by name (terms: ``term_<name>``); the last is padded.

        Args:
            rows: of a slice.
            lengths: number of row lengths, evenly spaced: each slice has the shortest that holds its rows. Those of a
                vision model have their whole length.
        """
        arrays = {name: getattr(self, name) for name in empty_rows(0, 0)} | {
            f"term_{k}": v for k, v in self.terms.items()
        }
        if self.routed_experts is not None:
            arrays["routed_experts"] = self.routed_experts
        if self.candidates is not None:
            arrays |= {"target_candidates": self.candidates[0], "target_candidate_logprobs": self.candidates[1]}
        length = self.token_ids.shape[1]
        used = self._used() if lengths > 1 and self.images is None else None
        for begin in range(0, self.num_rows, rows):
            part = {name: value[begin : begin + rows] for name, value in arrays.items()}
            missing = rows - len(part["token_ids"])
            if missing:
                empty = empty_rows(missing, length)
                nothing = {name: np.zeros((missing, *value.shape[1:]), value.dtype) for name, value in part.items()}
                part = {name: np.concatenate([value, (nothing | empty)[name]]) for name, value in part.items()}
            if used is not None:
                need = max(1, -(-int(used[begin : begin + rows].max()) * lengths // length))
                part = {name: value[:, : value.shape[1] // lengths * need] for name, value in part.items()}
            if self.supports is not None:
                part["target_support"] = self._support_masks(begin, part["target_id"].shape)
            yield part | (self.images.micro_batch(begin, rows) if self.images else {})

    def _used(self) -> np.ndarray:
        """Return the length that each row's nodes, targets and terms need, int64 [R]."""
        nodes, targets = np.count_nonzero(self.copies, axis=1), np.count_nonzero(self.target_valid, axis=1)
        used = np.maximum(nodes, targets)
        for place in itertools.chain.from_iterable(self.places):
            used[place.row] = max(used[place.row], -(-place.terms.stop // TERMS_PER_TOKEN))
        return used

    def _support_masks(self, begin: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the supports' bits from a row on, uint32 [*shape, ceil(V / 32)]; all are set where there is none."""
        assert self.supports is not None
        masks = np.full((*shape, mask_words(self.vocab_size)), 0xFFFFFFFF, np.uint32)
        for mask, supports in zip(masks, self.supports[begin : begin + shape[0]], strict=False):
            mask[: len(supports)] = decode_supports(supports, self.vocab_size)
        return masks

    def _scatter(self, per_trajectory: Sequence[np.ndarray]) -> np.ndarray:
        values = np.zeros((*self.term_target.shape, *np.shape(per_trajectory[0])[1:]), np.float32)
        for number, place, own in self._spans():
            values[place.row, place.terms] = per_trajectory[number][own]
        return values

    def _spans(self) -> Iterator[tuple[int, Place, slice]]:
        """Yield, for each sequence, its trajectory's number, its place, and its part of the trajectory's terms."""
        for number, places in enumerate(self.places):
            ends = itertools.accumulate(place.terms.stop - place.terms.start for place in places)
            for place, end in zip(places, ends, strict=True):
                yield number, place, slice(end - (place.terms.stop - place.terms.start), end)


def empty_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Return the layout, by name, of rows that hold nothing but padding."""
    nodes = ("token_ids", "positions", "copies", "target_parent", "target_id")
    terms = ("term_target", "term_sequence")
    return {
        **{name: np.zeros((rows, length), np.int32) for name in nodes},
        **{name: np.zeros((rows, length * TERMS_PER_TOKEN), np.int32) for name in terms},
        "subtree_end": np.tile(np.arange(1, length + 1, dtype=np.int32), (rows, 1)),
        "target_valid": np.zeros((rows, length), bool),
    }


def mini_batches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Split groups into optimizer updates: whole prompts, in shares that differ by at most one; none is empty."""
    parts = np.array_split(np.arange(len(groups)), min(num_minibatches, len(groups)))
    return [[groups[i] for i in part] for part in parts]


def trained_lengths(
    groups: Sequence[Group], num_minibatches: int, *, masked: Collection[str], segment_weight: str
) -> list[list[int]]:
    """Count, for each optimizer update, the trained tokens of each of its sequences.

    Args:
        groups: of the step.
        num_minibatches: optimizer updates of an epoch.
        masked: ids of trajectories that have none.
        segment_weight: ``algorithm.segment_weight``, what a sequence is.
    """
    updates = []
    for part in mini_batches(groups, num_minibatches):
        trained = [segment_lengths(t) for g in part for t in g.trajectories if t.trajectory_id not in masked]
        updates.append(list(map(sum, trained)) if segment_weight == "session" else list(itertools.chain(*trained)))
    return updates


def segment_lengths(trajectory: Trajectory) -> list[int]:
    """Count the trained tokens of each sequence of a trajectory."""
    return [sum(sequence.loss_mask) for sequence in trajectory.sequences]


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
