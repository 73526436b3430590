"""Every program of a learner, made from shapes alone.

A run compiles them at first use; ``jax-agent-rl plan`` compiles them for machines that are not
present.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.critic import Critic, state_values, value_loss
from jax_agent_rl.learner.objective import (
    ObjectiveConfig,
    objective_config,
    policy_loss,
    router_loads,
    term_logprobs,
    top_logprobs,
)
from jax_agent_rl.learner.optimized_params import (
    Arrays,
    Loss,
    Statistics,
    UpdatePrograms,
    View,
    bind,
)
from jax_agent_rl.learner.parameterization import Parameterization, compute_model
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.sharding import replicated


class LearnerPrograms:
    """The jitted functions of a learner.

    Args:
        policy: its trained and frozen parameters; arrays or shapes.
        algorithm: losses and corrections.
        config: batching, precision and the policy's optimizer.
        temperature: the rollout's sampling temperature.
        mesh: its devices need not be present.
        rate: the policy's learning rate, see :mod:`~jax_agent_rl.learner.optimizer`.
        scored: old log-probs come from elsewhere.
        vocab_size: vocabulary size of the policy, if this model is a teacher. None: this is the
            policy.
        loss: of the policy.

    Attributes:
        objective: constants of the compiled losses.
        policy: the policy's update.
        vocab_size: vocabulary size of the policy, whose ids the batches hold.
        score: from ``(trained, frozen, batch=micro-batch)`` to the log-prob of every term's token,
            float32 [R, K].
        top: from the same and ``count`` to the likeliest ids in every target's context, and their
            log-probs, [R, M, count] each.
        likeliest: ``top`` with ``count=algorithm.kl.top_k``.
        route: from the arguments of ``score`` to the number of tokens that chose each expert,
            float32 [E].
        values: from the critic's weights and a micro-batch to the value of the state after every
            token, float32 [R, T].

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
                f"learner.router_aux_loss_coef={config.router_aux_loss_coef}, but a {model.family}"
                " model has no experts to balance; leave it out"
            )
        self.model = model
        self.config = config
        self.mesh = mesh
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        model_mesh = _model_mesh(mesh)
        self.objective = objective_config(
            algorithm,
            config,
            temperature,
            model_mesh,
            scored=scored,
            on_cpu=mesh.devices.flat[0].platform == "cpu",
        )
        self.policy = self._update(policy, config, rate=rate, loss=bind(loss, self.objective))

        def forward(program: Callable[..., Any], view: View, **options: Any) -> Any:
            """Jit a program of (trained, frozen) weights and a batch.

            Every process gets the whole result.
            """
            return jax.jit(bind(_forward, program, view), out_shardings=replicated(mesh), **options)

        top = bind(top_logprobs, self.objective, self.vocab_size)
        self.score = forward(bind(term_logprobs, self.objective), policy.view)
        self.top = forward(top, policy.view, static_argnames="count")
        self.likeliest = forward(bind(top, count=self.objective.kl_top_k), policy.view)
        self.route = forward(bind(router_loads, self.objective), policy.view)

        critic_view = bind(compute_model, Critic.graphdef(model), config.compute_dtype)
        values = bind(state_values, remat=self.objective.remat, mesh=model_mesh)
        self.values = forward(values, critic_view)

    def critic(
        self, critic: Parameterization, config: CriticConfig, *, rate: optax.Schedule
    ) -> UpdatePrograms:
        """Return the critic's update.

        Args:
            critic: its trained and frozen parameters; arrays or shapes.
            config: the critic's optimizer.
            rate: the critic's learning rate.
        """
        loss = bind(
            value_loss,
            cliprange=config.cliprange_value,
            remat=self.objective.remat,
            mesh=_model_mesh(self.mesh),
        )
        return self._update(critic, config, rate=rate, loss=loss)

    def _update(
        self,
        trained: Parameterization,
        optimizer: OptimizerSection,
        *,
        rate: optax.Schedule,
        loss: Loss,
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


def _forward(
    program: Callable[..., Any],
    view: View,
    *weights: Any,
    batch: Arrays,
    **static: int,
) -> Any:
    return program(view(*weights), batch, **static)


def _model_mesh(mesh: Mesh) -> Mesh | None:
    """Return the mesh as models take it: None on one device."""
    return mesh if mesh.size > 1 else None
