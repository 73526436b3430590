"""Teachers of on-policy distillation: frozen models on the learner's mesh that score what the policy sampled.

Trajectories whose teacher is served elsewhere arrive with its scores (``Trajectory.teacher_scores``).

A teacher scores the very ids of the trajectories, so it must have the policy's tokenizer. It may be of another family
and size. It packs the rows itself: its images are cut as its own tower reads them, and only the rows it teaches are
computed.
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
from jax_agent_rl.learner.parameterization import Parameterization, compute_params
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import Scorer
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.types import Trajectory


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
    programs = LearnerPrograms.of(
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
