"""Batches: packed rows that compute every common token once, and given sequences to train on.

``packing`` makes rows of trajectories. A row is a forest of tokens in depth-first order.
Trajectories that begin alike (one prompt, one few-shot prefix, one tree of branches) share nodes. A
node's position is its depth, and it attends to its ancestors::

    t1 = [10 11 20 21]      index          0  1  2  3  4
    t2 = [10 11 30]         token_ids     10 11 20 21 30
                            positions      0  1  2  3  2
                            subtree_end    5  5  4  4  5      i sees j  iff  j <= i < subtree_end[j]

Without sharing every trajectory is its own chain, and this mask is the one of a plain packed row.

A *target* is a node with loss; its log-prob is read at its parent. A *term* is one summand of the
loss: a target as one trajectory sampled it. Several trajectories may have sampled the same token in
the same context, each with its own advantage.

The layout is made once. Numbers about terms (advantages, weights, old log-probs) are plain arrays
per trajectory; :meth:`Batch.with_terms` writes them into the layout, and
:meth:`Batch.gather_terms` and :meth:`Batch.gather_states` read them back. A trajectory with
segments is packed as several sequences; its arrays are those of its sequences, one after another.

For models with vision, placeholders of different images count as different ids until rows are made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.learner.image_packing import RowImages
from jax_agent_rl.types import (
    FinishReason,
    Group,
    StopReason,
    Support,
    TokenOutput,
    Trajectory,
    Turn,
)
from jax_agent_rl.types.supports import decode_supports, mask_words

TERMS_PER_TOKEN = 2
"""Room for terms in a row, per token of its length."""

UNKNOWN_EXPERT = -1
"""In ``Batch.routed_experts``: the router chooses itself."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one sequence of a trajectory in the batch.

    Attributes:
        terms: its terms in the row, in the order in which they were sampled.
        path: int64 [L + 1], nodes of the last prompt id and of every response id: the states before
            and after each response id.
    """

    row: int
    terms: slice
    path: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Batch:
    """R packed rows. Padding has term weight 0 and attends to itself only.

    Attributes:
        token_ids, positions, subtree_end: int32 [R, T], see the module docstring.
        copies: int32 [R, T], number of sequences that share a node; 0 at padding.
        target_parent: int32 [R, M], index of the node whose logits score the target.
        target_id: int32 [R, M].
        target_valid: bool [R, M]; valid targets come first.
        term_target: int32 [R, K], index into the targets.
        term_sequence: int32 [R, K], number of the sequence within the row; the terms of a sequence
            are contiguous.
        terms: float32 [R, K] each, by name, 0 at padding. ``weight`` is the weight of a term in the
            loss; a term of weight 0 is not trained on.
        places: for each trajectory given to :func:`~jax_agent_rl.learner.packing.pack` the places
            of its sequences.
        images: None for a text model.
        routed_experts: int16 [R, T, L, k], the experts that the engine chose for each node, -1
            where unknown. None if no choice is known.
        supports: for each row the supports of its valid targets: the token ids that sampling was
            restricted to. None for a target that all ids were open to; None in place of all if no
            draw was restricted. They stay encoded until a micro-batch is made, as their masks take
            V / 8 bytes per target.
        vocab_size: V, for the supports.
        candidates: int32 [R, M, k], ids to score at each target beside its own, and float32
            [R, M, k], their log-probs under a reference. None without a KL over candidates.
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
        """Add named numbers of the terms.

        Args:
            values: for each trajectory one number per sampled token, [S], or several, [S, k].
        """
        terms = dict(self.terms)
        for name, per_trajectory in values.items():
            terms[name] = self._scatter(per_trajectory)
        return replace(self, terms=terms)

    def with_candidates(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> Batch:
        """Add ids to score beside the sampled ones, and their log-probs under a reference.

        Candidates belong to a position: trajectories that share a target have the same ones.

        Args:
            ids: int32 [S, k] for each trajectory.
            logprobs: float32 [S, k] for each trajectory.
        """
        shape = (*self.target_id.shape, ids[0].shape[1])
        target_ids = np.zeros(shape, np.int32)
        target_logprobs = np.zeros(shape, np.float32)
        for number, place, span in self._spans():
            targets = self.term_target[place.row, place.terms]
            target_ids[place.row, targets] = ids[number][span]
            target_logprobs[place.row, targets] = logprobs[number][span]
        return replace(self, candidates=(target_ids, target_logprobs))

    def gather_terms(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of terms [R, K, ...] into one float64 array [S, ...] per trajectory."""
        gathered = []
        for places in self.places:
            parts = [values[place.row, place.terms] for place in places]
            gathered.append(np.concatenate(parts).astype(np.float64))
        return gathered

    def gather_targets(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of targets [R, M, ...] into one array [S, ...] per trajectory."""
        gathered = []
        for places in self.places:
            parts = []
            for place in places:
                targets = self.term_target[place.row, place.terms]
                parts.append(values[place.row, targets])
            gathered.append(np.concatenate(parts))
        return gathered

    def gather_states(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of nodes [R, T] into one float64 array [L + 1] per trajectory.

        They are those of the states before every response id, and of the one after the last.
        """
        gathered = []
        for places in self.places:
            states = [values[place.row, place.path] for place in places]
            before_ids = [state[:-1] for state in states]
            after_last = states[-1][-1:]
            gathered.append(np.concatenate([*before_ids, after_last]).astype(np.float64))
        return gathered

    def micro_batches(self, rows: int, *, lengths: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Yield slices of exactly ``rows`` rows as arrays by name; the last slice is padded.

        The arrays of terms are called ``term_<name>``.

        Args:
            rows: rows of a slice.
            lengths: number of row lengths, evenly spaced: each slice has the shortest length that
                holds its rows. Rows of a vision model are never cut.
        """
        arrays = self._arrays()
        length = self.token_ids.shape[1]
        is_cut = lengths > 1 and self.images is None
        used_lengths = self._used_lengths() if is_cut else None
        for begin in range(0, self.num_rows, rows):
            part = {name: value[begin : begin + rows] for name, value in arrays.items()}
            missing = rows - len(part["token_ids"])
            if missing:
                part = _pad_rows(part, missing, length)

            if used_lengths is not None:
                used = int(used_lengths[begin : begin + rows].max())
                needed_parts = max(1, math.ceil(used * lengths / length))  # of `lengths` equal ones
                for name, value in part.items():
                    part[name] = value[:, : value.shape[1] // lengths * needed_parts]

            if self.supports is not None:
                part["target_support"] = self._support_masks(begin, part["target_id"].shape)
            if self.images is not None:
                part |= self.images.micro_batch(begin, rows)
            yield part

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays of rows by their names in a micro-batch."""
        arrays = {name: getattr(self, name) for name in empty_rows(0, 0)}
        for name, value in self.terms.items():
            arrays[f"term_{name}"] = value
        if self.routed_experts is not None:
            arrays["routed_experts"] = self.routed_experts
        if self.candidates is not None:
            ids, logprobs = self.candidates
            arrays["target_candidates"] = ids
            arrays["target_candidate_logprobs"] = logprobs
        return arrays

    def _used_lengths(self) -> np.ndarray:
        """Return the length that each row's nodes, targets and terms need, int64 [R]."""
        nodes = np.count_nonzero(self.copies, axis=1)
        targets = np.count_nonzero(self.target_valid, axis=1)
        used = np.maximum(nodes, targets)
        for place in itertools.chain.from_iterable(self.places):
            needed_for_terms = math.ceil(place.terms.stop / TERMS_PER_TOKEN)
            used[place.row] = max(used[place.row], needed_for_terms)
        return used

    def _support_masks(self, begin: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the bits of the supports, from row ``begin`` on, uint32 [*shape, ceil(V / 32)].

        All bits are set where there is no support.
        """
        assert self.supports is not None
        masks = np.full((*shape, mask_words(self.vocab_size)), 0xFFFFFFFF, np.uint32)
        row_supports = self.supports[begin : begin + shape[0]]
        for mask, supports in zip(masks, row_supports, strict=False):  # the rest is padding
            mask[: len(supports)] = decode_supports(supports, self.vocab_size)
        return masks

    def _scatter(self, per_trajectory: Sequence[np.ndarray]) -> np.ndarray:
        """Return numbers per trajectory, [S, ...] each, as float32 [R, K, ...]."""
        shape = (*self.term_target.shape, *np.shape(per_trajectory[0])[1:])
        values = np.zeros(shape, np.float32)
        for number, place, span in self._spans():
            values[place.row, place.terms] = per_trajectory[number][span]
        return values

    def _spans(self) -> Iterator[tuple[int, Place, slice]]:
        """Yield for each sequence its trajectory's number, its place, and its span.

        The span is the sequence's part of the arrays [S] of its trajectory.
        """
        for number, places in enumerate(self.places):
            begin = 0
            for place in places:
                end = begin + place.terms.stop - place.terms.start
                yield number, place, slice(begin, end)
                begin = end


def empty_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Return the layout, by name, of rows that hold nothing but padding."""
    terms = length * TERMS_PER_TOKEN
    own_ends = np.arange(1, length + 1, dtype=np.int32)  # a padding token sees only itself
    return {
        "token_ids": np.zeros((rows, length), np.int32),
        "positions": np.zeros((rows, length), np.int32),
        "copies": np.zeros((rows, length), np.int32),
        "target_parent": np.zeros((rows, length), np.int32),
        "target_id": np.zeros((rows, length), np.int32),
        "term_target": np.zeros((rows, terms), np.int32),
        "term_sequence": np.zeros((rows, terms), np.int32),
        "subtree_end": np.tile(own_ends, (rows, 1)),
        "target_valid": np.zeros((rows, length), bool),
    }


def _pad_rows(
    arrays: Mapping[str, np.ndarray],
    missing: int,
    length: int,
) -> dict[str, np.ndarray]:
    """Append empty rows to the arrays of a micro-batch."""
    layout = empty_rows(missing, length)
    padded = {}
    for name, value in arrays.items():
        if name in layout:
            padding = layout[name]
        else:
            padding = np.zeros((missing, *value.shape[1:]), value.dtype)
        padded[name] = np.concatenate([value, padding])
    return padded


def mini_batches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Split groups into optimizer updates.

    The numbers of groups, and so of prompts, differ by at most one; no update is empty.
    """
    num_updates = min(num_minibatches, len(groups))
    shares = np.array_split(np.arange(len(groups)), num_updates)
    return [[groups[number] for number in share] for share in shares]


def trained_lengths(
    groups: Sequence[Group],
    num_minibatches: int,
    *,
    masked: Collection[str],
    segment_weight: str,
) -> list[list[int]]:
    """Count, for each optimizer update, the trained tokens of each of its sequences.

    Args:
        num_minibatches: optimizer updates of an epoch.
        masked: ids of trajectories that are not trained on.
        segment_weight: ``algorithm.segment_weight``: a sequence is a whole ``session`` or one
            ``segment``.
    """
    updates = []
    for mini_groups in mini_batches(groups, num_minibatches):
        lengths = []
        for trajectory in (t for group in mini_groups for t in group.trajectories):
            if trajectory.trajectory_id in masked:
                continue
            if segment_weight == "session":
                lengths.append(sum(segment_lengths(trajectory)))
            else:
                lengths += segment_lengths(trajectory)
        updates.append(lengths)
    return updates


def segment_lengths(trajectory: Trajectory) -> list[int]:
    """Count the trained tokens of each sequence of a trajectory."""
    return [sum(sequence.loss_mask) for sequence in trajectory.sequences]


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
