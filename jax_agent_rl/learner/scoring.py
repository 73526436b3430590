"""The stages before any gradient: groups to packed mini-batches, and mini-batches to the scores that losses read.

Teachers of on-policy distillation are frozen models on the learner's mesh that score what the policy sampled.
Trajectories whose teacher is served elsewhere arrive with its scores (``Trajectory.teacher_scores``). A teacher scores
the very ids of the trajectories, so it must have the policy's tokenizer. It may be of another family and size. It packs
the rows itself: its images are cut as its own tower reads them, and only the rows it teaches are computed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.learner.batch import Batch, mini_batches
from jax_agent_rl.learner.experience import PerTerm, RefScores
from jax_agent_rl.learner.image_packing import ImagePacking, blanks, image_packing
from jax_agent_rl.learner.optimized_params import Arrays
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.learner.parameterization import Parameterization, compute_params
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh, place, replicated, row_sharding, row_shards
from jax_agent_rl.models.vision_context import VisionProcessor
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
        self.pack_one = functools.partial(
            pack,
            pack_length=config.pack_length,
            share_prefixes=config.share_prefixes,
            image_packing=images,
            vocab_size=programs.vocab_size,
        )
        """Packs trajectories into one batch, see :func:`~jax_agent_rl.learner.packing.pack`."""

    def pack(self, groups: Sequence[Group]) -> list[MiniBatch]:
        """Pack the trajectories of each optimizer update: whole prompts, in equal shares."""
        minis, begin = [], 0
        for part in mini_batches(groups, self._programs.config.num_minibatches):
            trajectories = [t for group in part for t in group.trajectories]
            members = slice(begin, begin + len(trajectories))
            minis.append(MiniBatch(batch=self.pack_one(trajectories), members=members))
            begin = members.stop
        return minis

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


# --- teachers of on-policy distillation -------------------------------------------------------------------------------


class Teacher:
    """A frozen model that scores trajectories.

    Args:
        model: its hyperparameters.
        params: its parameters; no copy is made.
        algorithm: what is computed of it, ``algorithm.kl``.
        config: batching, compute dtype and mesh of the learner.
        temperature: the rollout's, of teacher and policy alike.
        vocab_size: the policy's.
        data_sources: patterns of the data sources of the rows it teaches.
        vision_processor: its image processor; None if trajectories hold no images.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        *,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        temperature: float,
        vocab_size: int,
        data_sources: Sequence[str] = ("*",),
        vision_processor: VisionProcessor | None = None,
    ) -> None:
        self.data_sources = data_sources
        own, programs = teacher_programs(
            model,
            compute_params(params, config.compute_dtype),
            algorithm=algorithm,
            config=config,
            temperature=temperature,
            vocab_size=vocab_size,
            mesh=make_mesh(config.mesh),
        )
        self._weights = (jax.tree.map(jax.device_put, own.params, own.shardings), own.frozen)
        self._scorer = Scorer(programs, image_packing(vision_processor, config))

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        return self._scorer.programs_compiled

    def score(self, trajectories: Sequence[Trajectory]) -> RefScores:
        """Return what the KL reads of the reference, see :meth:`Scorer.reference`."""
        batch = self._scorer.pack_one(trajectories)
        # The policy's experts are not the teacher's.
        return self._scorer.reference(self._weights, replace(batch, routed_experts=None))


def teacher_programs(
    model: DecoderConfig,
    params: Params,
    *,
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    temperature: float,
    vocab_size: int,
    mesh: Mesh,
) -> tuple[Parameterization, LearnerPrograms]:
    """Return a teacher's parameters, none of them adapted or quantized, and its programs.

    Args:
        model: its hyperparameters.
        params: its parameters; arrays or shapes.
        algorithm: what is computed of it.
        config: of the learner.
        temperature: the rollout's.
        vocab_size: the policy's.
        mesh: of the learner; its devices need not be present.
    """
    frozen = config.model_copy(update={"lora": None, "freeze_vision": False, "router_aux_loss_coef": 0.0})
    own = Parameterization.policy(model, params, frozen, mesh=mesh)
    programs = LearnerPrograms(
        model,
        own,
        algorithm=algorithm,
        config=frozen,
        temperature=temperature,
        mesh=mesh,
        rate=optax.constant_schedule(0.0),
        vocab_size=vocab_size,
    )
    return own, programs


def score_by_teachers(teachers: Sequence[Teacher], trajectories: Sequence[Trajectory]) -> RefScores:
    """Score every trajectory by the first teacher of its row's data source, unless it brings its scores.

    Raises:
        ValueError: a trajectory has no teacher.
    """
    scores: list[Any] = [None] * len(trajectories)
    own: list[list[int]] = [[] for _ in teachers]
    for number, trajectory in enumerate(trajectories):
        if (brought := trajectory.teacher_scores) is not None:
            top = (np.asarray(brought.top_ids, np.int32), np.asarray(brought.top_log_probs, np.float32))
            scores[number] = top if brought.top_ids else np.asarray(brought.log_probs, np.float64)
            continue
        which = first_teacher((teacher.data_sources for teacher in teachers), trajectory.row)
        if which is None:
            source = str(trajectory.row.get("data_source"))
            raise ValueError(f"trajectory {trajectory.trajectory_id} of data_source {source!r} has no teacher")
        own[which].append(number)
    for teacher, numbers in zip(teachers, own, strict=True):
        if numbers:
            scored = teacher.score([trajectories[number] for number in numbers])
            for number, of_one in zip(numbers, scored, strict=True):
                scores[number] = of_one
    return scores
