"""The learner's programs and arrays, from its own functions and described parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jax_agent_rl.config import Config, LearnerConfig
from jax_agent_rl.deploy.plan.batches import micro_batches
from jax_agent_rl.deploy.plan.inventory import Inventory, Program
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.optimized_params import UpdatePrograms
from jax_agent_rl.learner.optimizer import TrainState, learning_rate
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import parameter_shardings, place, replicated, row_sharding, row_shards


@dataclass(frozen=True, kw_only=True)
class LearnerHalf:
    """What the learner adds to a run.

    Attributes:
        inventory: its programs and arrays.
        published: the parameters as an engine of its process is given them.
        holds: names of those residents that these are; empty if they are made for the occasion.
    """

    inventory: Inventory
    published: Params
    holds: frozenset[str]


def learner_half(config: Config, model: DecoderConfig, mesh: Mesh) -> LearnerHalf:
    """The learner of a configuration on a mesh.

    Raises:
        ConfigError: the mesh does not divide the model, or the configuration does not go with it.
    """
    learner, algorithm = config.learner, config.algorithm
    params = described(model.parameter_shapes(), parameter_shardings(mesh, model.parameter_shapes()))
    policy = Parameterization.of(model, params, learner, mesh=mesh)
    temperature = config.rollout.temperature
    programs = LearnerPrograms.of(
        model,
        policy,
        algorithm=algorithm,
        config=learner,
        temperature=temperature,
        mesh=mesh,
        rate=learning_rate(learner, config.trainer.steps),
    )
    scores_old = not (programs.objective.on_policy or programs.objective.bypass)
    rows = learner.micro_batch_size * row_shards(mesh)
    batches = micro_batches(config, model, rows=rows, scored=scores_old)
    made = _Half(Inventory(), mesh, learner, rows * learner.pack_length)
    state, holds = made.update("policy", programs.policy, policy.params, policy.frozen, batches.policy)
    if algorithm.kl.where != "none":
        made.inventory.keep("reference", policy.reference()[0])
    if scorings := scores_old + (algorithm.kl.where != "none"):
        weights = (state.params, policy.frozen)
        made.read("score", programs.score, weights, batches.layout, holds, calls=scorings)
    if learner.router_aux_loss_coef:
        weights, epochs = (state.params, policy.frozen), learner.ppo_epochs
        made.read("route", programs.route, weights, batches.layout, holds, calls=epochs)
    if batches.critic is not None:
        initial, rate = jax.eval_shape(critic_params, params), learning_rate(config.critic, config.trainer.steps)
        own, first, frozen = programs.critic(initial, config.critic, rate=rate)
        critic, holds_critic = made.update("critic", own, first, frozen, batches.critic)
        made.read("values", programs.values, (critic.params, frozen), batches.layout, holds_critic)
    published, lasting = made.published(policy, state, merged=learner.lora is not None)
    return LearnerHalf(inventory=made.inventory, published=published, holds=holds if lasting else frozenset())


def described(shapes: Any, shardings: Any, *, dtype: str = "float32") -> Any:
    """An array for every shape of a tree, where its sharding says."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def processes(mesh: Mesh) -> int:
    """That hold the devices of a mesh."""
    return len({device.process_index for device in mesh.devices.flat})


@dataclass(frozen=True)
class _Half:
    """Fills an inventory. ``tokens`` are those of a micro-batch."""

    inventory: Inventory
    mesh: Mesh
    config: LearnerConfig
    tokens: int

    def update(
        self, name: str, programs: UpdatePrograms, params: Params, frozen: Params, batch: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, frozenset[str]]:
        """A model's gradient and update; its state, and the names of what passes over it hold."""
        state = jax.tree.map(place, jax.eval_shape(programs.init, params), programs.places)
        holds = self.inventory.keep(f"{name} parameters", state.params)
        optimizer = self.inventory.keep(f"{name} optimizer", state.opt_state)
        reads = holds | self.inventory.keep(f"{name} frozen", frozen)
        gradients = state.params
        accumulate = programs.accumulate.trace(state.params, frozen, gradients, self._laid_out(batch))
        apply = programs.apply.trace(state, gradients, state.updates)
        epochs, updates = self.config.ppo_epochs, self.config.ppo_epochs * self.config.num_minibatches
        tokens = {"tokens": self.tokens, "of": "trained"}
        self._add(f"{name} gradient", accumulate, reads, donates=holds, calls=epochs, **tokens)
        self._add(f"{name} update", apply, holds | optimizer, donates=holds | optimizer, calls=updates)
        return state, reads

    def read(
        self,
        name: str,
        program: Any,
        weights: tuple[Params, Params],
        batch: Mapping[str, np.ndarray],
        holds: frozenset[str],
        calls: int = 1,
    ) -> None:
        """A pass that changes nothing."""
        traced = program.trace(*weights, batch=self._laid_out(batch))
        self._add(name, traced, holds, tokens=self.tokens, of="trained", calls=calls)

    def published(self, policy: Parameterization, state: TrainState, *, merged: bool) -> tuple[Params, bool]:
        """Parameters as an engine of this process takes them (``Learner.params``, ``LeadingLearner.params``), and
        whether they are the learner's own arrays.
        """
        if merged:
            merge = policy.merge.trace(state.params, policy.frozen)
            whole = jax.tree.map(place, merge.out_info, merge.lower().compile().output_shardings)
            self.inventory.programs.append(Program(name="merge adapters", half="weights", traced=merge, mesh=self.mesh))
        else:
            whole = policy.merge(state.params, policy.frozen)
        if processes(self.mesh) == 1:
            return whole, not merged
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        return jax.tree.map(lambda x: place(x, first), whole), False

    def _add(self, name: str, traced: jax.stages.Traced, holds: frozenset[str], **more: Any) -> None:
        program = Program(name=name, half="learner", traced=traced, mesh=self.mesh, holds=holds, **more)
        self.inventory.programs.append(program)

    def _laid_out(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
        """As ``Learner`` places micro-batches: rows are split, numbers of the whole update are everywhere."""
        rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim > 1 else everywhere)
            for name, x in batch.items()
        }
