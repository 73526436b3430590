"""The stages before any gradient: groups to packed mini-batches, and mini-batches to the scores that losses read."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.learner.batch import Batch, Sharing, pack
from jax_agent_rl.learner.experience import PerTerm, RefScores
from jax_agent_rl.learner.image_packing import ImagePacking, blanks
from jax_agent_rl.learner.optimized_params import Arrays
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scored_batch import mini_batches
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import place, replicated, row_sharding, row_shards
from jax_agent_rl.types import Group, Trajectory

Weights = tuple[Params, Params]
"""Trained and frozen parameters."""
ScoreContexts = Callable[[Params, Sequence[Sequence[int]]], list[np.ndarray]]
"""For each context of n ids float32 [n - 1]: the log-prob of every id but the first."""

SHORTEST_CUT = 512
"""Shortest rows that are cut on a CPU where they are not full: for others, compiling the program takes longer."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The packed trajectories of one optimizer update; ``members`` are their indices in the step."""

    batch: Batch
    sharing: Sharing
    members: slice


class Scorer:
    """Packs trajectories and runs forward passes over them, one micro-batch of fixed shape at a time.

    Args:
        programs: compiled functions of the learner.
        images: how rows hold images; None for a text model.
        lengths: number of row lengths on a CPU, see :meth:`Batch.micro_batches`; each has programs of its own.
    """

    def __init__(self, programs: LearnerPrograms, images: ImagePacking | None, *, lengths: int = 2) -> None:
        self._programs, self._mesh, self._images = programs, programs.mesh, images
        self._compiled: set[Any] = set()  # programs that have seen every number of patches
        config = programs.config
        self.rows = config.micro_batch_size * row_shards(self._mesh)
        """Rows of a micro-batch."""
        on_cpu = self._mesh.size == 1 and self._mesh.devices.flat[0].platform == "cpu"
        cuts = on_cpu and config.pack_length >= SHORTEST_CUT and not config.pack_length % lengths
        self._lengths = lengths if cuts else 1
        self._widths: dict[Any, set[int]] = defaultdict(set)  # by program: row lengths it has run for
        self._pack_rows = functools.partial(
            pack,
            pack_length=config.pack_length,
            share_prefixes=config.share_prefixes,
            image_packing=images,
            vocab_size=programs.vocab_size,
        )

    def pack(self, groups: Sequence[Group]) -> list[MiniBatch]:
        """Pack the trajectories of each optimizer update: whole prompts, in equal shares."""
        minis, begin = [], 0
        for part in mini_batches(groups, self._programs.config.num_minibatches):
            trajectories = [t for group in part for t in group.trajectories]
            batch, sharing = self._pack_rows(trajectories)
            members = slice(begin, begin + len(trajectories))
            minis.append(MiniBatch(batch=batch, sharing=sharing, members=members))
            begin = members.stop
        return minis

    def pack_one(self, trajectories: Sequence[Trajectory], targets: Sequence[np.ndarray] | None = None) -> Batch:
        """Pack trajectories into one batch; for ``targets`` see :func:`~jax_agent_rl.learner.batch.pack`."""
        return self._pack_rows(trajectories, targets=targets)[0]

    def micro_batches(self, batch: Batch) -> Iterator[Arrays]:
        """Yield the batch's micro-batches, placed on the mesh."""
        return map(self._placed, batch.micro_batches(self.rows, lengths=self._lengths))

    def blanks(self, batch: Batch, program: Any) -> Iterator[Arrays]:
        """Yield weightless micro-batches on the first call with a program that sees images.

        They compile it for every number of patches, so that none is compiled later.
        """
        if self._images is not None and program not in self._compiled:
            self._compiled.add(program)
            yield from map(self._placed, blanks(next(batch.micro_batches(self.rows)), self._images))

    def _run(self, program: Callable[..., Any], weights: Weights, batch: Batch) -> list[Any]:
        """Run a program over all rows of a batch's layout and return its result for each micro-batch."""
        layout = replace(batch, terms={})
        for arrays in self.blanks(layout, program):
            program(*weights, batch=arrays)
        return list(self._each(program, weights, layout))

    def _each(self, program: Callable[..., Any], weights: Weights, layout: Batch) -> Iterator[Any]:
        for arrays in self.micro_batches(layout):
            self._widths[program].add(arrays["token_ids"].shape[1])
            yield jax.tree.map(np.asarray, program(*weights, batch=arrays))

    def logprobs(self, weights: Weights, batch: Batch) -> PerTerm:
        """Return the log-probs of each trajectory's tokens with loss, float64 [S]."""
        return batch.gather_terms(stack(self._run(self._programs.score, weights, batch), batch.term_target.shape))

    def top_logprobs(self, weights: Weights, batch: Batch, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the likeliest ids in the context of each trajectory's tokens with loss, and their log-probs.

        Args:
            weights: trained and frozen.
            batch: packed trajectories.
            count: ids per token; one program is compiled for each power of two.

        Returns:
            int64 and float64 [S, count] for each trajectory.
        """
        width = min(1 << (count - 1).bit_length(), self._programs.vocab_size)
        layout = replace(batch, terms={})
        parts = [self._programs.top(*weights, batch=arrays, count=width) for arrays in self.micro_batches(layout)]

        def gathered(values: Sequence[jax.Array]) -> PerTerm:
            return batch.gather_targets(stack([np.asarray(x) for x in values], batch.target_id.shape)[..., :count])

        ids, logprobs = (gathered(x) for x in zip(*parts, strict=True))
        return [(i.astype(np.int64), x.astype(np.float64)) for i, x in zip(ids, logprobs, strict=True)]

    def reference(self, weights: Weights, batch: Batch) -> RefScores:
        """Return what the KL to a reference with these weights reads, for each trajectory.

        Log-probs as :meth:`logprobs`; with ``algorithm.kl.top_k`` the likeliest ids at its tokens with loss, int32
        [S, k], and their log-probs, float32.
        """
        if not self._programs.objective.kl_top_k:
            return self.logprobs(weights, batch)
        parts = zip(*self._run(self._programs.likeliest, weights, batch), strict=True)
        ids, logprobs = (batch.gather_targets(stack(part, batch.target_id.shape)) for part in parts)
        return list(zip(ids, logprobs, strict=True))

    def values(self, weights: Weights, batch: Batch) -> list[np.ndarray]:
        """Return the critic's values of each trajectory's states, float64 [L + 1]."""
        return batch.gather_states(stack(self._run(self._programs.values, weights, batch), batch.token_ids.shape))

    def router_balance(self, weights: Weights, batch: Batch) -> Arrays:
        """Return how a whole update's tokens are routed, for its load-balancing loss; empty without one."""
        if not self._programs.objective.router_aux_loss_coef:
            return {}
        parts = self._each(self._programs.route, weights, replace(batch, terms={}))
        chosen = sum(part.astype(np.float64) for part in parts)
        tokens = self._programs.model.num_layers * batch.copies.sum()
        numbers = {"router_share": np.float32(chosen / tokens), "router_tokens": np.float32(tokens)}
        return {name: place(value, replicated(self._mesh)) for name, value in numbers.items()}

    @property
    def programs_compiled(self) -> int:
        """Distinct forward programs compiled so far, those for shorter rows aside."""
        programs = (self._programs.score, self._programs.likeliest, self._programs.values, self._programs.route)
        return sum(f._cache_size() - max(0, len(self._widths[f]) - 1) for f in programs)

    def _placed(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        return {name: place(value, row_sharding(self._mesh)) for name, value in arrays.items()}


def stack(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the results [rows, n, ...] of a batch's micro-batches as one array [R, N, ...].

    Args:
        parts: in order; of shorter rows, n is less than N.
        shape: [R, N]; rows beyond are padding.
    """
    padded = (np.pad(x, [(0, 0), (0, shape[1] - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]) for x in parts)
    return np.concatenate(list(padded))[: shape[0]]
