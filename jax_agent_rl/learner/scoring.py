"""Scores of packed trajectories, which the losses read: passes without a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.experience import PerTerm, RefScores
from jax_agent_rl.learner.image_packing import ImagePacking, blanks
from jax_agent_rl.learner.optimized_params import Arrays
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import place, replicated, row_sharding, row_shards
from jax_agent_rl.types import Group

Weights = tuple[Params, Params]
"""Trained and frozen parameters."""

ScoreContexts = Callable[[Params, Sequence[Sequence[int]]], list[np.ndarray]]
"""For each context of n token ids, float32 [n - 1]: the log-prob of every id but the first."""

MIN_CUT_LENGTH = 512
"""Rows of at least this length are cut on a CPU where they are not full. For shorter ones,
compiling another program takes longer than it saves."""


class Scorer:
    """Runs forward passes over packed trajectories, in micro-batches of fixed shape.

    Args:
        programs: compiled functions of the learner.
        images: how rows hold images; None for a text model.
        lengths: number of row lengths on a CPU, see :meth:`Batch.micro_batches`; each has programs
            of its own.

    Attributes:
        rows: rows of a micro-batch.
        lengths: number of row lengths in use.
    """

    def __init__(
        self,
        programs: LearnerPrograms,
        images: ImagePacking | None,
        *,
        lengths: int = 2,
    ) -> None:
        config = programs.config
        self._programs = programs
        self._mesh = programs.mesh
        self._images = images
        self._warm_programs: set[Any] = set()  # they have seen every number of patches
        self._widths: dict[Any, set[int]] = defaultdict(set)  # row lengths a program has run for

        self.rows = config.micro_batch_size * row_shards(self._mesh)
        is_cpu = self._mesh.size == 1 and self._mesh.devices.flat[0].platform == "cpu"
        is_cut = (
            is_cpu and config.pack_length >= MIN_CUT_LENGTH and config.pack_length % lengths == 0
        )
        self.lengths = lengths if is_cut else 1

    def micro_batches(self, batch: Batch) -> Iterator[Arrays]:
        """Yield the batch's micro-batches, placed on the mesh."""
        return map(self._placed, batch.micro_batches(self.rows, lengths=self.lengths))

    def blanks(self, batch: Batch, program: Any) -> Iterator[Arrays]:
        """Yield weightless micro-batches on the first call with a program that sees images.

        They compile it for every number of patches, so that none is compiled later.
        """
        if self._images is None or program in self._warm_programs:
            return
        self._warm_programs.add(program)
        first_micro_batch = next(batch.micro_batches(self.rows))
        for arrays in blanks(first_micro_batch, self._images):
            yield self._placed(arrays)

    def _run(self, program: Callable[..., Any], weights: Weights, batch: Batch) -> list[Any]:
        """Run a program over all rows of a batch; return its result for each micro-batch."""
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
        results = self._run(self._programs.score, weights, batch)
        return batch.gather_terms(stack(results, batch.term_target.shape))

    def top_logprobs(
        self, weights: Weights, batch: Batch, count: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the likeliest ids in the context of each token with loss, and their log-probs.

        Args:
            weights: trained and frozen.
            batch: packed trajectories.
            count: ids per token. One program is compiled for each power of two.

        Returns:
            int64 and float64 [S, count] for each trajectory.
        """
        power_of_two = 1 << (count - 1).bit_length()
        compiled_count = min(power_of_two, self._programs.vocab_size)
        results = []
        for arrays in self.micro_batches(replace(batch, terms={})):
            results.append(self._programs.top(*weights, batch=arrays, count=compiled_count))

        def gather(parts: Sequence[jax.Array]) -> list[np.ndarray]:
            stacked = stack([np.asarray(part) for part in parts], batch.target_id.shape)
            return batch.gather_targets(stacked[..., :count])

        ids_of = gather([ids for ids, _ in results])
        logprobs_of = gather([logprobs for _, logprobs in results])
        top = []
        for ids, logprobs in zip(ids_of, logprobs_of, strict=True):
            top.append((ids.astype(np.int64), logprobs.astype(np.float64)))
        return top

    def reference(self, weights: Weights, batch: Batch) -> RefScores:
        """Return what the KL to a reference with these weights reads, for each trajectory.

        Usually these are log-probs, as :meth:`logprobs` returns them. With ``algorithm.kl.top_k``
        they are the likeliest ids at its tokens with loss, int32 [S, k], and their log-probs,
        float32.
        """
        if not self._programs.objective.kl_top_k:
            return self.logprobs(weights, batch)

        results = self._run(self._programs.likeliest, weights, batch)
        shape = batch.target_id.shape
        ids = batch.gather_targets(stack([ids for ids, _ in results], shape))
        logprobs = batch.gather_targets(stack([logprobs for _, logprobs in results], shape))
        return list(zip(ids, logprobs, strict=True))

    def values(self, weights: Weights, batch: Batch) -> list[np.ndarray]:
        """Return the critic's values of each trajectory's states, float64 [L + 1]."""
        results = self._run(self._programs.values, weights, batch)
        return batch.gather_states(stack(results, batch.token_ids.shape))

    def router_balance(self, weights: Weights, batch: Batch) -> Arrays:
        """Return how the tokens of an update are routed, for its load-balancing loss.

        Without such a loss, the result is empty.
        """
        if not self._programs.objective.router_aux_loss_coef:
            return {}

        loads = self._each(self._programs.route, weights, replace(batch, terms={}))
        load = sum(part.astype(np.float64) for part in loads)
        tokens = len(self._programs.model.expert_layers) * batch.copies.sum()
        everywhere = replicated(self._mesh)
        return {
            "router_share": place(np.float32(load / tokens), everywhere),
            "router_tokens": place(np.float32(tokens), everywhere),
        }

    @property
    def programs_compiled(self) -> int:
        """Distinct forward programs compiled so far, not counting those for shorter rows."""
        programs = self._programs
        count = 0
        for program in (programs.score, programs.likeliest, programs.values, programs.route):
            for_shorter_rows = max(0, len(self._widths[program]) - 1)
            count += program._cache_size() - for_shorter_rows
        return count

    def _placed(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        return {name: place(value, row_sharding(self._mesh)) for name, value in arrays.items()}


def stack(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the results [rows, n, ...] of a batch's micro-batches as one array [R, N, ...].

    Args:
        parts: in order; n is less than N for shorter rows.
        shape: [R, N]; the last micro-batch may have more rows, which are padding.
    """
    rows, length = shape
    padded = []
    for part in parts:
        widths = [(0, 0)] * part.ndim
        widths[1] = (0, length - part.shape[1])
        padded.append(np.pad(part, widths))
    return np.concatenate(padded)[:rows]


def score_contexts(
    groups: Sequence[Group],
    score: Callable[[Sequence[Sequence[int]]], list[np.ndarray]],
) -> PerTerm:
    """Return the log-probs of every trajectory's trained tokens.

    Args:
        groups: their trajectories are scored in this order.
        score: takes contexts, and returns the log-prob of every id of a context but the first.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    scores = iter(score([s.prompt_ids + s.response_ids for s in sequences]))

    logprobs = []
    for trajectory in trajectories:
        parts = []
        for sequence in trajectory.sequences:
            response_logprobs = next(scores)[len(sequence.prompt_ids) - 1 :]
            parts.append(response_logprobs[np.asarray(sequence.loss_mask, bool)])
        logprobs.append(np.concatenate(parts).astype(np.float64))
    return logprobs
