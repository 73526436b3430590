"""Teachers of on-policy distillation: frozen models on the learner's mesh.

They score what the policy sampled. Trajectories whose teacher is served elsewhere arrive with its
scores (``Trajectory.teacher_scores``). A teacher scores the very token ids of the trajectories, so
it must have the policy's tokenizer. It may be of another family and size. It packs the rows itself:
its images are cut as its own tower reads them, and only the rows it teaches are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.learner.experience import RefScores
from jax_agent_rl.learner.image_packing import image_packing
from jax_agent_rl.learner.packing import BatchPacker
from jax_agent_rl.learner.parameterization import Parameterization, compute_params
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import Scorer
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.types import TokenScores, Trajectory


class Teacher:
    """A frozen model that scores trajectories.

    Args:
        params: its parameters; no copy is made.
        algorithm: its ``kl`` says what the teacher computes.
        config: batching, compute dtype and mesh of the learner.
        temperature: the rollout's sampling temperature, for teacher and policy alike.
        vocab_size: vocabulary size of the policy.
        data_sources: patterns; it teaches the rows whose ``data_source`` fits one.
        vision_processor: None if trajectories hold no images.
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
        parameters, programs = teacher_programs(
            model,
            compute_params(params, config.compute_dtype),
            algorithm=algorithm,
            config=config,
            temperature=temperature,
            vocab_size=vocab_size,
            mesh=make_mesh(config.mesh),
        )
        placed = jax.tree.map(jax.device_put, parameters.params, parameters.shardings)
        self._weights = (placed, parameters.frozen)
        images = image_packing(vision_processor, config)
        self._packer = BatchPacker(config, images, vocab_size=vocab_size)
        self._scorer = Scorer(programs, images)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        return self._scorer.programs_compiled

    def score(self, trajectories: Sequence[Trajectory]) -> RefScores:
        """Return what the KL reads of the reference, see :meth:`Scorer.reference`."""
        batch = self._packer.pack(trajectories)
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
        model: hyperparameters of the teacher.
        params: arrays, or only their shapes.
        algorithm: its ``kl`` says what the teacher computes.
        temperature: the rollout's sampling temperature.
        vocab_size: vocabulary size of the policy.
        mesh: of the learner; its devices need not be present.
    """
    frozen_config = config.model_copy(
        update={"lora": None, "freeze_vision": False, "router_aux_loss_coef": 0.0}
    )
    parameters = Parameterization.policy(model, params, frozen_config, mesh=mesh)
    programs = LearnerPrograms(
        model,
        parameters,
        algorithm=algorithm,
        config=frozen_config,
        temperature=temperature,
        mesh=mesh,
        rate=optax.constant_schedule(0.0),
        vocab_size=vocab_size,
    )
    return parameters, programs


def score_by_teachers(teachers: Sequence[Teacher], trajectories: Sequence[Trajectory]) -> RefScores:
    """Score every trajectory by a teacher.

    A trajectory that brings a teacher's scores keeps them. The others are scored by the first
    teacher of their row's data source.

    Raises:
        ValueError: a trajectory has no teacher.
    """
    scores: list[Any] = [None] * len(trajectories)
    numbers_of: list[list[int]] = [[] for _ in teachers]  # of the trajectories a teacher scores
    for number, trajectory in enumerate(trajectories):
        if trajectory.teacher_scores is not None:
            scores[number] = _as_arrays(trajectory.teacher_scores)
            continue

        data_sources = (teacher.data_sources for teacher in teachers)
        teacher_number = first_teacher(data_sources, trajectory.row)
        if teacher_number is None:
            source = str(trajectory.row.get("data_source"))
            raise ValueError(
                f"trajectory {trajectory.trajectory_id} of data_source {source!r} has no teacher"
            )
        numbers_of[teacher_number].append(number)

    for teacher, numbers in zip(teachers, numbers_of, strict=True):
        if not numbers:
            continue
        teacher_scores = teacher.score([trajectories[number] for number in numbers])
        for number, score in zip(numbers, teacher_scores, strict=True):
            scores[number] = score
    return scores


def as_teacher_reads(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory after the prompt under which the policy is its own teacher.

    The ids of its response are the same. Which experts the engine chose for them says nothing about
    another context.
    """
    if not trajectory.teacher_prompt_ids:
        return trajectory
    turns = []
    for turn in trajectory.turns:
        turns.append(replace(turn, output=replace(turn.output, routed_experts=None)))
    return replace(trajectory, prompt_ids=trajectory.teacher_prompt_ids, turns=tuple(turns))


def _as_arrays(scores: TokenScores) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Return what the KL reads of a served teacher's scores, see :data:`RefScores`."""
    if scores.top_ids:
        top_ids = np.asarray(scores.top_ids, np.int32)
        return top_ids, np.asarray(scores.top_log_probs, np.float32)
    return np.asarray(scores.log_probs, np.float64)
