"""The teachers of a run (``distill``) on the learner's devices: their weights, and the passes in which they score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.micro_batches import Arrays
from jax_agent_rl.learner.teachers import teacher_programs
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import parameter_shardings

if TYPE_CHECKING:
    from jax_agent_rl.deploy.plan.programs import LearnerBuilder


def add_teachers(learner: LearnerBuilder, config: Config, layout: Arrays) -> None:
    """Add each teacher without a URL, of which only ``config.json`` is read.

    Args:
        learner: adds programs to the inventory.
        config: configuration of the run.
        layout: a micro-batch that is scored.

    Raises:
        ModelError: a teacher's ``config.json`` is missing or of another family.
        ConfigError: the mesh does not divide a teacher.
    """
    dtype = jnp.dtype(config.learner.compute_dtype)
    for teacher in config.distill.teachers if config.distill else ():
        if teacher.url is not None:
            continue
        model = load_config(teacher.path)
        shapes = model.parameter_shapes()
        params = jax.tree.map(
            lambda shape, place: jax.ShapeDtypeStruct(shape, dtype, sharding=place),
            shapes,
            parameter_shardings(learner.mesh, shapes),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        own, programs = teacher_programs(
            model,
            params,
            algorithm=config.algorithm,
            config=config.learner,
            temperature=config.rollout.temperature,
            vocab_size=learner.model.vocab_size,
            mesh=learner.mesh,
        )
        weights = (own.params, own.frozen)
        holds = learner.inventory.keep(f"teacher {teacher.path}", own.params)
        program = programs.likeliest if config.algorithm.kl.top_k else programs.score
        batch = {name: array for name, array in layout.items() if name != "routed_experts"}
        learner._replace(model=model).read(f"teacher {teacher.path}", program, weights, batch, holds)
