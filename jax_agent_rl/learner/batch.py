"""Batches: packed rows that compute every common token once.

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
the same context, each with its own advantage. Observed ids (``learner.observations``) are targets
without terms: whoever observed them, their loss differs in its weight alone.

The layout is made once. Numbers about terms (advantages, weights, old log-probs) are plain arrays
per trajectory; :meth:`Batch.with_terms` writes them into the layout, and
:meth:`Batch.gather_terms` and :meth:`Batch.gather_states` read them back. A trajectory with
segments is packed as several sequences; its arrays are its sequences' one after another.

For models with vision, placeholders of different images count as different ids until rows are made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.learner.image_packing import RowImages
from jax_agent_rl.types import (
    Support,
)
from jax_agent_rl.types.supports import decode_supports, mask_words

TERMS_PER_TOKEN = 2
"""Room for terms in a row, per token of its length."""

UNKNOWN_EXPERT = -1
"""In ``Batch.routed_experts``: the router chooses itself."""


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """Where one sequence of a trajectory is in the batch.

    Attributes:
        terms: its terms in the row, in the order in which they were sampled.
        path: int64 [L + 1], nodes of the last prompt id and of every response id: the states before
            and after each response id.
        observed: int64 [O], targets of its observed ids, see ``learner.observations``.
    """

    row: int
    terms: slice
    path: np.ndarray
    observed: np.ndarray


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
        packed: for each trajectory given to :func:`~jax_agent_rl.learner.packing.pack`, its
            sequences.
        images: None for a text model.
        routed_experts: int16 [R, T, N, k], the experts that the engine chose for each node in
            each of the N layers with experts, -1 where unknown. None if no choice is known.
        supports: for each row the supports of its valid targets: the token ids that sampling was
            restricted to. None for a target that all ids were open to; None in place of all if no
            draw was restricted. They stay encoded until a micro-batch is made, as their masks take
            V / 8 bytes per target.
        vocab_size: V, for the supports.
        candidates: int32 [R, M, k], ids to score at each target beside its own, and float32
            [R, M, k], their log-probs under a reference. None without a KL over candidates.
        observation_weights: float32 [R, M], weight of each target in the observation loss, summed
            over the sequences that observed it. None without such a loss.
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
    packed: tuple[tuple[PackedSequence, ...], ...]
    images: RowImages | None = None
    routed_experts: np.ndarray | None = None
    supports: tuple[tuple[Support | None, ...], ...] | None = None
    vocab_size: int = 0
    candidates: tuple[np.ndarray, np.ndarray] | None = None
    observation_weights: np.ndarray | None = None

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
        for number, sequence, span in self._spans():
            targets = self.term_target[sequence.row, sequence.terms]
            target_ids[sequence.row, targets] = ids[number][span]
            target_logprobs[sequence.row, targets] = logprobs[number][span]
        return replace(self, candidates=(target_ids, target_logprobs))

    @property
    def num_observed(self) -> list[int]:
        """Number of observed ids of each trajectory."""
        counts = []
        for sequences in self.packed:
            counts.append(sum(len(sequence.observed) for sequence in sequences))
        return counts

    def with_observations(self, weights: np.ndarray) -> Batch:
        """Add the weights of observed ids in the observation loss.

        Args:
            weights: float64 [N], of an observed id of each trajectory.
        """
        target_weights = np.zeros(self.target_id.shape)
        for sequences, weight in zip(self.packed, weights, strict=True):
            for sequence in sequences:
                # No two ids of a sequence share a target, so nothing is added twice at once.
                target_weights[sequence.row, sequence.observed] += weight
        return replace(self, observation_weights=target_weights.astype(np.float32))

    def gather_terms(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of terms [R, K, ...] into one float64 array [S, ...] per trajectory."""
        gathered = []
        for sequences in self.packed:
            parts = [values[sequence.row, sequence.terms] for sequence in sequences]
            gathered.append(np.concatenate(parts).astype(np.float64))
        return gathered

    def gather_targets(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of targets [R, M, ...] into one array [S, ...] per trajectory."""
        gathered = []
        for sequences in self.packed:
            parts = []
            for sequence in sequences:
                targets = self.term_target[sequence.row, sequence.terms]
                parts.append(values[sequence.row, targets])
            gathered.append(np.concatenate(parts))
        return gathered

    def gather_states(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of nodes [R, T] into one float64 array [L + 1] per trajectory.

        They belong to the states before every response id, and to the one after the last.
        """
        gathered = []
        for sequences in self.packed:
            states = [values[sequence.row, sequence.path] for sequence in sequences]
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
        # Features of images are laid out for whole rows.
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
                # Every axis 1 is cut by the same share: of tokens, targets and terms.
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
        if self.observation_weights is not None:
            arrays["target_observation_weight"] = self.observation_weights
        return arrays

    def _used_lengths(self) -> np.ndarray:
        """Return the length that each row's nodes, targets and terms need, int64 [R]."""
        nodes = np.count_nonzero(self.copies, axis=1)
        targets = np.count_nonzero(self.target_valid, axis=1)
        used = np.maximum(nodes, targets)
        for sequence in itertools.chain.from_iterable(self.packed):
            needed_for_terms = math.ceil(sequence.terms.stop / TERMS_PER_TOKEN)
            used[sequence.row] = max(used[sequence.row], needed_for_terms)
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
        for number, sequence, span in self._spans():
            values[sequence.row, sequence.terms] = per_trajectory[number][span]
        return values

    def _spans(self) -> Iterator[tuple[int, PackedSequence, slice]]:
        """Yield for each sequence its trajectory's number, itself, and its span.

        The span is the sequence's part of the arrays [S] of its trajectory.
        """
        for number, sequences in enumerate(self.packed):
            begin = 0
            for sequence in sequences:
                end = begin + sequence.terms.stop - sequence.terms.start
                yield number, sequence, slice(begin, end)
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
