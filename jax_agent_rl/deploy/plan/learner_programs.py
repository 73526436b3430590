"""The learner's programs, traced with the largest micro-batches of a run.

The micro-batches are made of trajectories that nobody sampled. The learner's functions are the
run's own, given described arrays. The teachers of ``distill`` are among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jax_agent_rl.config import AlgorithmConfig, Config, LearnerConfig
from jax_agent_rl.deploy.plan.compiled import Inventory, Program, Published
from jax_agent_rl.deploy.plan.model_flops import pass_flops
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.experience import Scores, build_experience
from jax_agent_rl.learner.image_packing import blanks, image_packing
from jax_agent_rl.learner.losses.policy import SELECTORS
from jax_agent_rl.learner.optimized_params import UpdatePrograms
from jax_agent_rl.learner.optimizer import TrainState, learning_rate
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.teachers import teacher_programs
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import (
    parameter_shardings,
    place,
    replicated,
    row_sharding,
    row_shards,
)
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.runtime.engine_devices import offered_dtype
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.types.supports import mask_words

Arrays = Mapping[str, np.ndarray]

_SAMPLED_IDS = (5, 6)


def add_learner(
    inventory: Inventory, config: Config, model: DecoderConfig, mesh: Mesh
) -> Published:
    """Trace the learner; return the parameters that an engine of its process is given."""
    learner = config.learner
    algorithm = config.algorithm
    steps = config.trainer.steps
    shapes = model.parameter_shapes()
    params = describe(shapes, parameter_shardings(mesh, shapes))
    policy = Parameterization.policy(model, params, learner, mesh=mesh)
    programs = LearnerPrograms(
        model,
        policy,
        algorithm=algorithm,
        config=learner,
        temperature=config.rollout.temperature,
        mesh=mesh,
        rate=learning_rate(learner, steps),
        scored=config.rollout.deterministic,
    )
    scores_old = not (programs.objective.on_policy or programs.objective.bypass)
    rows = learner.micro_batch_size * row_shards(mesh)
    builder = LearnerBuilder(inventory, mesh, learner, model, rows)
    batches = micro_batches(config, model, rows=rows, scored=scores_old)
    layout = batches["layout"]

    state, holds = builder.update(
        "policy", programs.policy, policy.params, policy.frozen, batches["policy"]
    )
    weights = (state.params, policy.frozen)

    compares = algorithm.kl.where != "none" and config.distill is None
    scorings = 0
    if scores_old and not config.rollout.deterministic:  # else the engine's program scores
        scorings += 1
    if compares:
        if algorithm.kl.keeps_reference:
            reference = policy.reference()[0]
            inventory.keep("reference", reference)
        if not algorithm.kl.top_k:
            scorings += 1
    if scorings:
        builder.read("score", programs.score, weights, layout, holds, calls=scorings)
    if compares and algorithm.kl.top_k:
        builder.read("likeliest", programs.likeliest, weights, layout, holds)
    _add_teachers(builder, config, layout)
    if learner.router_aux_loss_coef:
        builder.read("route", programs.route, weights, layout, holds, calls=learner.ppo_epochs)

    if "critic" in batches:
        initial = jax.eval_shape(critic_params, params)
        critic = Parameterization.critic(model, initial, learner, mesh=mesh)
        update = programs.critic(critic, config.critic, rate=learning_rate(config.critic, steps))
        critic_state, critic_holds = builder.update(
            "critic", update, critic.params, critic.frozen, batches["critic"]
        )
        critic_weights = (critic_state.params, critic.frozen)
        builder.read("values", programs.values, critic_weights, layout, critic_holds)

    dtype = offered_dtype(config)
    if dtype is not None:
        offered = describe(shapes, parameter_shardings(mesh, shapes), dtype=dtype)
        inventory.keep("offered weights", offered)
    return builder.publish(policy, state, holds)


class LearnerBuilder(NamedTuple):
    """Adds the learner's programs to an inventory.

    Attributes:
        rows: rows of a micro-batch, over all shards.
    """

    inventory: Inventory
    mesh: Mesh
    config: LearnerConfig
    model: DecoderConfig
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.config.pack_length

    def flops(self, passes: int) -> float | None:
        """Return the operations of passes over the model; a backward pass counts as two.

        They are unknown with a vision tower.
        """
        if self.model.vision is not None:
            return None
        count = self.config.pack_length
        return passes * self.rows * pass_flops(self.model, count, visible=(count + 1) / 2)

    def update(
        self, name: str, programs: UpdatePrograms, params: Params, frozen: Params, batch: Arrays
    ) -> tuple[TrainState, frozenset[str]]:
        """Add a model's gradient and update.

        Returns:
            Its state, and the names of the residents that passes over it hold.
        """
        state = jax.tree.map(place, jax.eval_shape(programs.init, params), programs.state_shardings)
        parameters = self.inventory.keep(f"{name} parameters", state.params)
        optimizer = self.inventory.keep(f"{name} optimizer", state.opt_state)
        frozen_parameters = self.inventory.keep(f"{name} frozen", frozen)
        pass_holds = parameters | frozen_parameters
        update_holds = parameters | optimizer

        epochs = self.config.ppo_epochs
        gradients = state.params  # they have the parameters' shapes
        accumulate = programs.accumulate.trace(
            state.params, frozen, gradients, self._describe_batch(batch)
        )
        passes = 3
        if self.config.lora is not None:
            passes = 2  # frozen weights have no gradients
        self._add(
            f"{name} gradient",
            accumulate,
            pass_holds,
            donates=parameters,
            calls=epochs,
            model_flops=self.flops(passes),
            tokens=self.tokens,
            token_kind="trained",
        )

        apply = programs.apply.trace(state, gradients, state.updates)
        updates = epochs * self.config.num_minibatches
        self._add(f"{name} update", apply, update_holds, donates=update_holds, calls=updates)
        return state, pass_holds

    def read(
        self,
        name: str,
        program: Any,
        weights: tuple[Params, Params],
        batch: Arrays,
        holds: frozenset[str],
        calls: int = 1,
    ) -> None:
        """Add a pass that changes nothing."""
        traced = program.trace(*weights, batch=self._describe_batch(batch))
        self._add(
            name,
            traced,
            holds,
            tokens=self.tokens,
            token_kind="trained",
            calls=calls,
            model_flops=self.flops(1),
        )

    def publish(
        self, policy: Parameterization, state: TrainState, holds: frozenset[str]
    ) -> Published:
        """Describe ``Learner.params``, or ``LeadingLearner.params`` with several processes."""
        if self.config.lora is None:
            merged = policy.merge(state.params, policy.frozen)
        else:
            merge = policy.merge.trace(state.params, policy.frozen)
            shardings = merge.lower().compile().output_shardings
            merged = jax.tree.map(place, merge.out_info, shardings)
            holds = frozenset()  # the merged parameters are copies
            program = Program(name="merge adapters", phase="weights", traced=merge, mesh=self.mesh)
            self.inventory.programs.append(program)

        processes = {device.process_index for device in self.mesh.devices.flat}
        if len(processes) == 1:
            return Published(merged, holds)
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        gathered = jax.tree.map(lambda array: place(array, first), merged)
        return Published(gathered, frozenset())

    def _add(
        self, name: str, traced: jax.stages.Traced, holds: frozenset[str], **fields: Any
    ) -> None:
        """Add a program of the learner's phase, with further fields of :class:`Program`."""
        program = Program(
            name=name, phase="learner", traced=traced, mesh=self.mesh, holds=holds, **fields
        )
        self.inventory.programs.append(program)

    def _describe_batch(self, batch: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe micro-batches as ``Learner`` places them.

        Rows are sharded, and scalars of the update replicated.
        """
        rows = row_sharding(self.mesh)
        everywhere = replicated(self.mesh)
        described = {}
        for name, array in batch.items():
            sharding = rows if array.ndim > 1 else everywhere
            described[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return described


def _add_teachers(learner: LearnerBuilder, config: Config, layout: Arrays) -> None:
    """Add each teacher without a URL, of which only ``config.json`` is read.

    Args:
        layout: a micro-batch that is scored.

    Raises:
        ModelError: a teacher's ``config.json`` is missing or of another family.
        ConfigError: the mesh does not divide a teacher.
    """
    if config.distill is None:
        return
    for teacher in config.distill.teachers:
        if teacher.url is not None:
            continue
        model = load_config(teacher.path)
        shapes = model.parameter_shapes()
        shardings = parameter_shardings(learner.mesh, shapes)
        params = describe(shapes, shardings, dtype=config.learner.compute_dtype)
        parameterization, programs = teacher_programs(
            model,
            params,
            algorithm=config.algorithm,
            config=config.learner,
            temperature=config.rollout.temperature,
            vocab_size=learner.model.vocab_size,
            mesh=learner.mesh,
        )

        name = f"teacher {teacher.path}"
        weights = (parameterization.params, parameterization.frozen)
        holds = learner.inventory.keep(name, parameterization.params)
        program = programs.likeliest if config.algorithm.kl.top_k else programs.score
        batch = dict(layout)
        batch.pop("routed_experts", None)  # they are the policy's, not the teacher's
        learner._replace(model=model).read(name, program, weights, batch, holds)


def describe(shapes: Any, shardings: Any, *, dtype: str = "float32") -> Any:
    """Return a described array for every shape of a tree, with its sharding."""

    def describe_one(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    return jax.tree.map(
        describe_one, shapes, shardings, is_leaf=lambda node: isinstance(node, tuple)
    )


# --- micro-batches --------------------------------------------------------------------------------


def micro_batches(
    config: Config, model: DecoderConfig, *, rows: int, scored: bool
) -> dict[str, Arrays]:
    """Build the largest micro-batches; with images for a vision model.

    Args:
        rows: rows of a micro-batch, over all shards.
        scored: the run computes old log-probs before it trains.

    Returns:
        The micro-batches of ``policy`` and, if there is one, ``critic``, and the ``layout`` of
        passes that score.
    """
    learner = config.learner
    algorithm = config.algorithm
    processor = VisionProcessor.of(model, config.model.path, pixels=config.model.pixels)
    images = image_packing(processor, learner)
    group = make_group("g", (3, 4), [as_sampled(_SAMPLED_IDS)] * 2)
    batch = pack(
        group.trajectories,
        pack_length=learner.pack_length,
        share_prefixes=learner.share_prefixes,
        image_packing=images,
    )

    has_critic = algorithm.adv_estimator == "gae"
    if not has_critic:
        # Others may ask for tool calls, branches or reward parts, and all give the same terms.
        algorithm = algorithm.model_copy(update={"adv_estimator": "grpo"})
    experience = build_experience(
        [group],
        algorithm,
        _zero_scores(group, algorithm, scored=scored, has_critic=has_critic),
        kl_coef=0.0,
        masked=(),
        observed=batch.num_observed,
    )
    (terms,) = experience.updates
    policy_terms = dict(terms.policy)
    if algorithm.policy_loss.loss_mode in SELECTORS:
        policy_terms["chosen"] = [np.zeros(len(_SAMPLED_IDS)) for _ in group.trajectories]

    policy_batch = batch.with_terms(**policy_terms)
    if terms.candidates is not None:
        policy_batch = policy_batch.with_candidates(*zip(*terms.candidates, strict=True))
    if terms.observation_weights is not None:
        policy_batch = policy_batch.with_observations(terms.observation_weights)
    packed = {"policy": policy_batch, "layout": batch.with_terms()}
    if has_critic:
        packed["critic"] = batch.with_terms(**terms.critic)

    largest: dict[str, dict[str, np.ndarray]] = {}
    for name, packed_batch in packed.items():
        first = next(packed_batch.micro_batches(rows))
        if images is None:
            arrays = dict(first)
        else:
            *_, arrays = blanks(first, images)  # the last has the largest image arrays
        largest[name] = arrays | _replayed(config, model, first)
    if learner.router_aux_loss_coef and model.experts is not None:
        largest["policy"]["router_share"] = np.zeros(model.experts.count, np.float32)
        largest["policy"]["router_tokens"] = np.zeros((), np.float32)
    return dict(largest)


def _zero_scores(
    group: Group, algorithm: AlgorithmConfig, *, scored: bool, has_critic: bool
) -> Scores:
    """Return the scores that a group's experience is built from, all of them 0."""
    terms = len(_SAMPLED_IDS)
    per_term = [np.zeros(terms) for _ in group.trajectories]
    per_state = [np.zeros(terms + 1) for _ in group.trajectories]

    ref: Any = None
    if algorithm.kl.where != "none":
        ref = per_term
        if algorithm.kl.top_k:
            shape = (terms, algorithm.kl.top_k)
            ref = []
            for _ in group.trajectories:
                ref.append((np.zeros(shape, np.int32), np.zeros(shape, np.float32)))
    return Scores(
        old=per_term if scored else None,
        ref=ref,
        values=per_state if has_critic else None,
    )


def _replayed(config: Config, model: DecoderConfig, batch: Arrays) -> dict[str, np.ndarray]:
    """Return what engines report of a draw's support and experts.

    The arrays take no memory here.
    """
    arrays: dict[str, np.ndarray] = {}
    if config.replays_supports:
        shape = (*batch["target_id"].shape, mask_words(model.vocab_size))
        arrays["target_support"] = np.broadcast_to(np.uint32(0), shape)
    if model.experts is not None:
        choices = (len(model.expert_layers), model.experts.per_token)
        shape = (*batch["token_ids"].shape, *choices)
        arrays["routed_experts"] = np.broadcast_to(np.int16(0), shape)
    return arrays


def as_sampled(ids: Sequence[int]) -> TokenOutput:
    """Return what an engine would have sampled with the first weights."""
    return TokenOutput(
        token_ids=tuple(ids),
        log_probs=(-1.0,) * len(ids),
        policy_versions=(0,) * len(ids),
        stop_reason=StopReason.EOS,
        context_digest="",
    )


def make_group(name: str, prompt: Sequence[int], outputs: Sequence[TokenOutput]) -> Group:
    """Return a group with a trajectory of one turn for each output; every second is rewarded."""
    members = []
    for number, output in enumerate(outputs):
        trajectory = Trajectory.from_turns(
            prompt_ids=prompt,
            turns=[Turn(output=output)],
            trajectory_id=f"{name}-{number}",
            group_id=name,
            agent_name="plan",
            finish_reason=FinishReason.ANSWER,
            reward=float(number % 2),
        )
        members.append(trajectory)
    return Group(group_id=name, trajectories=tuple(members))
