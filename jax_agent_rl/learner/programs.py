"""Every program of a learner, from shapes alone: compiled by a run at first use, by a plan for absent machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.objective import (
    ObjectiveConfig,
    objective_config,
    policy_loss,
    router_loads,
    state_values,
    term_logprobs,
    top_logprobs,
    value_loss,
)
from jax_agent_rl.learner.optimized_params import Arrays, Loss, Statistics, UpdatePrograms, View, bind
from jax_agent_rl.learner.parameterization import Critic, Parameterization, compute_model
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.sharding import replicated


class LearnerPrograms:
    """The jitted functions of a learner.

    Args:
        model: the model's hyperparameters.
        policy: what is trained; arrays or shapes.
        algorithm: losses and corrections.
        config: batching, precision and the policy's optimizer.
        temperature: the rollout's.
        mesh: of the learner; its devices need not be present.
        rate: the policy's learning rate, see :mod:`~jax_agent_rl.learner.optimizer`.
        scored: old log-probs come from elsewhere.
        vocab_size: of the policy, if this model is another; None: the model's.
        loss: the policy's.

    Attributes:
        objective: what they compute.
        policy: the policy's update.
        vocab_size: of the policy, whose ids the batches hold.
        score: (trained, frozen, batch=micro-batch) to the log-prob of every term's token, float32 [R, K].
        top: the same, and ``count``, to the likeliest ids in every target's context and their log-probs [R, M, count].
        likeliest: the same with ``count=algorithm.kl.top_k``.
        route: the same as score to the tokens each expert was chosen by, float32 [E].
        values: of the critic's weights, to the value of the state after every token, float32 [R, T].

    Raises:
        ConfigError: a router is to be balanced in a model without experts.
    """

    def __init__(
        self,
        model: DecoderConfig,
        policy: Parameterization,
        *,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        temperature: float,
        mesh: Mesh,
        rate: optax.Schedule,
        scored: bool = False,
        vocab_size: int | None = None,
        loss: Callable[[ObjectiveConfig, Any, Arrays], tuple[jax.Array, Statistics]] = policy_loss,
    ) -> None:
        if config.router_aux_loss_coef and model.experts is None:
            raise ConfigError(
                f"learner.router_aux_loss_coef={config.router_aux_loss_coef}, but a {model.family} model has no "
                "experts to balance; leave it out"
            )
        self.model, self.config, self.mesh = model, config, mesh
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        split, on_cpu = _model_mesh(mesh), mesh.devices.flat[0].platform == "cpu"
        self.objective = objective_config(algorithm, config, temperature, split, scored=scored, on_cpu=on_cpu)

        def reading(program: Callable[..., Any], view: View, **options: Any) -> Any:
            """Jit a program of (trained, frozen) weights and a batch; every process gets the whole result."""
            return jax.jit(bind(_read, program, view), out_shardings=replicated(mesh), **options)

        self.policy = self._update(policy, config, rate=rate, loss=bind(loss, self.objective))
        top = bind(top_logprobs, self.objective, self.vocab_size)
        self.score = reading(bind(term_logprobs, self.objective), policy.view)
        self.top = reading(top, policy.view, static_argnames="count")
        self.likeliest = reading(bind(top, count=self.objective.kl_top_k), policy.view)
        self.route = reading(bind(router_loads, self.objective), policy.view)
        values = bind(state_values, remat=self.objective.remat, mesh=split)
        self.values = reading(values, bind(compute_model, Critic.graphdef(model), config.compute_dtype))

    def critic(self, critic: Parameterization, config: CriticConfig, *, rate: optax.Schedule) -> UpdatePrograms:
        """Return the critic's update.

        Args:
            critic: what is trained; arrays or shapes.
            config: the critic's optimizer.
            rate: the critic's learning rate.
        """
        split, remat = _model_mesh(self.mesh), self.objective.remat
        loss = bind(value_loss, cliprange=config.cliprange_value, remat=remat, mesh=split)
        return self._update(critic, config, rate=rate, loss=loss)

    def _update(
        self, trained: Parameterization, optimizer: OptimizerSection, *, rate: optax.Schedule, loss: Loss
    ) -> UpdatePrograms:
        return UpdatePrograms(
            trained.params,
            view=trained.view,
            shardings=trained.shardings,
            everywhere=replicated(self.mesh),
            optimizer=optimizer,
            rate=rate,
            loss=loss,
        )


def _read(program: Callable[..., Any], view: View, *weights: Any, batch: Arrays, **static: int) -> Any:
    return program(view(*weights), batch, **static)


def _model_mesh(mesh: Mesh) -> Mesh | None:
    """Return the mesh as models take it: None on one device."""
    return mesh if mesh.size > 1 else None
