"""The learner's programs and arrays, from its own functions and described parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jax_agent_rl.config import Config, LearnerConfig
from jax_agent_rl.deploy.plan.inventory import Inventory, Program
from jax_agent_rl.learner.batch import pack
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.experience import Scores, build_experience, mini_batch_terms
from jax_agent_rl.learner.image_packing import ImagePacking, blanks, image_packing
from jax_agent_rl.learner.losses.covariance import SELECTORS
from jax_agent_rl.learner.optimized_params import UpdatePrograms
from jax_agent_rl.learner.optimizer import TrainState, learning_rate
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import parameter_shardings, place, replicated, row_sharding, row_shards
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class LearnerInventory:
    """What the learner adds to a run.

    Attributes:
        inventory: its programs and arrays.
        published: the parameters as an engine of its process is given them.
        holds: names of those residents that these are; empty if they are made for the occasion.
    """

    inventory: Inventory
    published: Params
    holds: frozenset[str]


def learner_inventory(config: Config, model: DecoderConfig, mesh: Mesh) -> LearnerInventory:
    """Trace the learner of a configuration on a mesh.

    Raises:
        ConfigError: the mesh does not divide the model, or the configuration does not go with it.
    """
    learner, algorithm = config.learner, config.algorithm
    params = described(model.parameter_shapes(), parameter_shardings(mesh, model.parameter_shapes()))
    policy = Parameterization.policy(model, params, learner, mesh=mesh)
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
    made = _InventoryBuilder(Inventory(), mesh, learner, rows * learner.pack_length)
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
        own = Parameterization.critic(model, initial, learner, mesh=mesh)
        update = programs.critic(own, config.critic, rate=rate)
        critic, holds_critic = made.update("critic", update, own.params, own.frozen, batches.critic)
        made.read("values", programs.values, (critic.params, own.frozen), batches.layout, holds_critic)
    published, lasting = made.published(policy, state, merged=learner.lora is not None)
    return LearnerInventory(inventory=made.inventory, published=published, holds=holds if lasting else frozenset())


def described(shapes: Any, shardings: Any, *, dtype: str = "float32") -> Any:
    """Return a described array for every shape of a tree, with its sharding."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def processes(mesh: Mesh) -> int:
    """Return the number of processes that hold the devices of a mesh."""
    return len({device.process_index for device in mesh.devices.flat})


@dataclass(frozen=True)
class _InventoryBuilder:
    """Fills an inventory. ``tokens`` are those of a micro-batch."""

    inventory: Inventory
    mesh: Mesh
    config: LearnerConfig
    tokens: int

    def update(
        self, name: str, programs: UpdatePrograms, params: Params, frozen: Params, batch: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, frozenset[str]]:
        """Add a model's gradient and update; return its state, and the names of what passes over it hold."""
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
        """Add a pass that changes nothing."""
        traced = program.trace(*weights, batch=self._laid_out(batch))
        self._add(name, traced, holds, tokens=self.tokens, of="trained", calls=calls)

    def published(self, policy: Parameterization, state: TrainState, *, merged: bool) -> tuple[Params, bool]:
        """Return the parameters an engine of this process takes, and whether they are the learner's own arrays.

        They are ``Learner.params``, or ``LeadingLearner.params`` with several processes.
        """
        if merged:
            merge = policy.merge.trace(state.params, policy.frozen)
            whole = jax.tree.map(place, merge.out_info, merge.lower().compile().output_shardings)
            self.inventory.programs.append(
                Program(name="merge adapters", phase="weights", traced=merge, mesh=self.mesh)
            )
        else:
            whole = policy.merge(state.params, policy.frozen)
        if processes(self.mesh) == 1:
            return whole, not merged
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        return jax.tree.map(lambda x: place(x, first), whole), False

    def _add(self, name: str, traced: jax.stages.Traced, holds: frozenset[str], **more: Any) -> None:
        program = Program(name=name, phase="learner", traced=traced, mesh=self.mesh, holds=holds, **more)
        self.inventory.programs.append(program)

    def _laid_out(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe micro-batches as ``Learner`` places them: rows sharded, scalars of the update replicated."""
        rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim > 1 else everywhere)
            for name, x in batch.items()
        }


Arrays = Mapping[str, np.ndarray]
_SAMPLED = (5, 6)


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The largest micro-batch of each kind; with images for a vision model.

    Attributes:
        policy: for the policy's gradient.
        critic: for the critic's; None without one.
        layout: for passes that score.
    """

    policy: Arrays
    critic: Arrays | None
    layout: Arrays


def micro_batches(config: Config, model: DecoderConfig, *, rows: int, scored: bool) -> MicroBatches:
    """Build the micro-batches of a run.

    Args:
        config: of the run.
        model: its architecture.
        rows: of a micro-batch, over all shards.
        scored: the run computes old log-probs before it trains.
    """
    images = image_packing(VisionProcessor.of(model, config.model.path, pixels=config.model.pixels), config.learner)
    trajectories = [_trajectory(number) for number in range(2)]
    learner, algorithm = config.learner, config.algorithm
    batch, _ = pack(
        trajectories, pack_length=learner.pack_length, share_prefixes=learner.share_prefixes, image_packing=images
    )
    with_critic = algorithm.adv_estimator == "gae"
    if not with_critic:  # others may ask for tool calls, branches or reward parts, and all give the same terms
        algorithm = algorithm.model_copy(update={"adv_estimator": "grpo"})
    per_term, per_state = ([np.zeros(len(_SAMPLED) + n) for _ in trajectories] for n in (0, 1))
    scores = Scores(
        old=per_term if scored else None,
        ref=per_term if algorithm.kl.where != "none" else None,
        values=per_state if with_critic else None,
    )
    made = build_experience(
        [Group(group_id="g", trajectories=tuple(trajectories))], algorithm, scores, kl_coef=0.0, masked=()
    )
    policy, critic = mini_batch_terms(made, slice(None), algorithm, kl_coef=0.0)
    if algorithm.policy_loss.loss_mode in SELECTORS:
        policy["chosen"] = per_term
    first = {
        name: _largest(next(replace(batch, terms={}).with_terms(**terms).micro_batches(rows)), images)
        for name, terms in (("policy", policy), ("critic", critic), ("layout", {}))
    }
    return MicroBatches(
        policy=first["policy"] | _balance(model, learner.router_aux_loss_coef),
        critic=first["critic"] if with_critic else None,
        layout=first["layout"],
    )


def _largest(arrays: Arrays, images: ImagePacking | None) -> dict[str, np.ndarray]:
    return dict(arrays) if images is None else list(blanks(arrays, images))[-1]


def _balance(model: DecoderConfig, coefficient: float) -> dict[str, np.ndarray]:
    if not coefficient or model.experts is None:
        return {}
    return {"router_share": np.zeros(model.experts.count, np.float32), "router_tokens": np.zeros((), np.float32)}


def _trajectory(number: int) -> Trajectory:
    count = len(_SAMPLED)
    output = TokenOutput(
        token_ids=_SAMPLED,
        log_probs=(-1.0,) * count,
        policy_versions=(0,) * count,
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Trajectory.from_turns(
        prompt_ids=(3, 4),
        turns=[Turn(output=output)],
        trajectory_id=f"g-{number}",
        group_id="g",
        agent_name="plan",
        finish_reason=FinishReason.ANSWER,
        reward=float(number),
    )
