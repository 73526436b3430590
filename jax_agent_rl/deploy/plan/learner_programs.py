"""The learner's programs, traced with the largest micro-batches of a run, made of trajectories that nobody sampled.

The learner's functions are the run's own, given described arrays. The teachers of ``distill`` are
among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jax_agent_rl.config import Config, LearnerConfig
from jax_agent_rl.deploy.plan.compiled import Inventory, Program, Published
from jax_agent_rl.deploy.plan.engine_programs import pass_flops
from jax_agent_rl.generation import mask_words
from jax_agent_rl.learner.experience import Scores, build_experience, mini_batch_terms
from jax_agent_rl.learner.image_packing import blanks, image_packing
from jax_agent_rl.learner.losses.policy import SELECTORS
from jax_agent_rl.learner.optimized_params import UpdatePrograms
from jax_agent_rl.learner.optimizer import TrainState, learning_rate
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.learner.parameterization import Parameterization, critic_params
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import teacher_programs
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
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn

Arrays = Mapping[str, np.ndarray]

_SAMPLED = (5, 6)


def add_learner(made: Inventory, config: Config, model: DecoderConfig, mesh: Mesh) -> Published:
    """Trace the learner; return the parameters that an engine of its process is given."""
    learner, algorithm, steps = config.learner, config.algorithm, config.trainer.steps
    params = describe(model.parameter_shapes(), parameter_shardings(mesh, model.parameter_shapes()))
    policy = Parameterization.policy(model, params, learner, mesh=mesh)
    programs = LearnerPrograms(
        model,
        policy,
        algorithm=algorithm,
        config=learner,
        temperature=config.rollout.temperature,
        mesh=mesh,
        rate=learning_rate(learner, steps),
    )
    scores_old = not (programs.objective.on_policy or programs.objective.bypass)
    builder = LearnerBuilder(
        made, mesh, learner, model, learner.micro_batch_size * row_shards(mesh)
    )
    batches = micro_batches(config, model, rows=builder.rows, scored=scores_old)
    state, holds = builder.update(
        "policy", programs.policy, policy.params, policy.frozen, batches["policy"]
    )
    weights, layout = (state.params, policy.frozen), batches["layout"]
    with_reference, top_k = (
        algorithm.kl.where != "none" and config.distill is None,
        algorithm.kl.top_k > 0,
    )
    if with_reference:
        made.keep("reference", policy.reference()[0])
    if scorings := scores_old + (with_reference and not top_k):
        builder.read("score", programs.score, weights, layout, holds, calls=scorings)
    if with_reference and top_k:
        builder.read("likeliest", programs.likeliest, weights, layout, holds)
    _add_teachers(builder, config, layout)
    if learner.router_aux_loss_coef:
        builder.read("route", programs.route, weights, layout, holds, calls=learner.ppo_epochs)
    if "critic" in batches:
        initial, rate = jax.eval_shape(critic_params, params), learning_rate(config.critic, steps)
        own = Parameterization.critic(model, initial, learner, mesh=mesh)
        update = programs.critic(own, config.critic, rate=rate)
        critic, holds_critic = builder.update(
            "critic", update, own.params, own.frozen, batches["critic"]
        )
        builder.read("values", programs.values, (critic.params, own.frozen), layout, holds_critic)
    return builder.publish(policy, state, holds)


class LearnerBuilder(NamedTuple):
    """Adds the learner's programs to an inventory; ``rows`` counts those of a micro-batch."""

    inventory: Inventory
    mesh: Mesh
    config: LearnerConfig
    model: DecoderConfig
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.config.pack_length

    def flops(self, passes: int) -> float | None:
        """Operations of so many passes over the model; a backward pass is two. Unknown with a vision tower."""
        if self.model.vision is not None:
            return None
        count = self.config.pack_length
        return passes * self.rows * pass_flops(self.model, count, visible=(count + 1) / 2)

    def update(
        self, name: str, programs: UpdatePrograms, params: Params, frozen: Params, batch: Arrays
    ) -> tuple[TrainState, frozenset[str]]:
        """Add a model's gradient and update; return its state, and the names of what passes over it hold."""
        state = jax.tree.map(place, jax.eval_shape(programs.init, params), programs.state_shardings)
        holds = self.inventory.keep(f"{name} parameters", state.params)
        both = holds | self.inventory.keep(f"{name} optimizer", state.opt_state)
        reads = holds | self.inventory.keep(f"{name} frozen", frozen)
        gradients, epochs = state.params, self.config.ppo_epochs
        accumulate = programs.accumulate.trace(
            state.params, frozen, gradients, self._describe_batch(batch)
        )
        tokens = {"tokens": self.tokens, "of": "trained"}
        passes = 3 if self.config.lora is None else 2  # frozen weights have no gradients
        flops = self.flops(passes)
        self._add(
            f"{name} gradient",
            accumulate,
            reads,
            donates=holds,
            calls=epochs,
            model_flops=flops,
            **tokens,
        )
        apply = programs.apply.trace(state, gradients, state.updates)
        self._add(
            f"{name} update", apply, both, donates=both, calls=epochs * self.config.num_minibatches
        )
        return state, reads

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
        flops = self.flops(1)
        self._add(
            name, traced, holds, tokens=self.tokens, of="trained", calls=calls, model_flops=flops
        )

    def publish(
        self, policy: Parameterization, state: TrainState, holds: frozenset[str]
    ) -> Published:
        """Describe ``Learner.params``, or ``LeadingLearner.params`` with several processes."""
        merged = self.config.lora is not None
        if merged:
            merge = policy.merge.trace(state.params, policy.frozen)
            whole = jax.tree.map(place, merge.out_info, merge.lower().compile().output_shardings)
            program = Program(name="merge adapters", phase="weights", traced=merge, mesh=self.mesh)
            self.inventory.programs.append(program)
        else:
            whole = policy.merge(state.params, policy.frozen)
        if len({device.process_index for device in self.mesh.devices.flat}) == 1:
            return Published(whole, frozenset() if merged else holds)
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        return Published(jax.tree.map(lambda x: place(x, first), whole), frozenset())

    def _add(
        self, name: str, traced: jax.stages.Traced, holds: frozenset[str], **more: Any
    ) -> None:
        program = Program(
            name=name, phase="learner", traced=traced, mesh=self.mesh, holds=holds, **more
        )
        self.inventory.programs.append(program)

    def _describe_batch(self, batch: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe micro-batches as ``Learner`` places them: rows sharded, scalars of the update replicated."""
        rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=rows if x.ndim > 1 else everywhere
            )
            for name, x in batch.items()
        }


def _add_teachers(learner: LearnerBuilder, config: Config, layout: Arrays) -> None:
    """Add each teacher without a URL, of which only ``config.json`` is read.

    Args:
        learner: adds programs to the inventory.
        config: configuration of the run.
        layout: a micro-batch that is scored.

    Raises:
        ModelError: a teacher's ``config.json`` is missing or of another family.
        ConfigError: the mesh does not divide a teacher.
    """
    for teacher in config.distill.teachers if config.distill else ():
        if teacher.url is not None:
            continue
        model = load_config(teacher.path)
        shapes = model.parameter_shapes()
        params = describe(
            shapes, parameter_shardings(learner.mesh, shapes), dtype=config.learner.compute_dtype
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
        learner._replace(model=model).read(
            f"teacher {teacher.path}", program, weights, batch, holds
        )


def describe(shapes: Any, shardings: Any, *, dtype: str = "float32") -> Any:
    """Return a described array for every shape of a tree, with its sharding."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, tuple),
    )


# --- micro-batches --------------------------------------------------------------------------------


def micro_batches(
    config: Config, model: DecoderConfig, *, rows: int, scored: bool
) -> dict[str, Arrays]:
    """Build the largest micro-batches; with images for a vision model.

    Args:
        config: configuration of the run.
        model: its architecture.
        rows: rows of a micro-batch, over all shards.
        scored: the run computes old log-probs before it trains.

    Returns:
        The micro-batches of ``policy`` and, if there is one, ``critic``, and the ``layout`` of
        passes that score.
    """
    learner, algorithm = config.learner, config.algorithm
    images = image_packing(
        VisionProcessor.of(model, config.model.path, pixels=config.model.pixels), learner
    )
    group = make_group("g", (3, 4), [as_sampled(_SAMPLED)] * 2)
    trajectories = group.trajectories
    batch = pack(
        trajectories,
        pack_length=learner.pack_length,
        share_prefixes=learner.share_prefixes,
        image_packing=images,
    )
    with_critic = algorithm.adv_estimator == "gae"
    if (
        not with_critic
    ):  # others may ask for tool calls, branches or reward parts, and all give the same terms
        algorithm = algorithm.model_copy(update={"adv_estimator": "grpo"})
    per_term, per_state = ([np.zeros(len(_SAMPLED) + n) for _ in trajectories] for n in (0, 1))
    shape = (len(_SAMPLED), algorithm.kl.top_k)
    candidates = [(np.zeros(shape, np.int32), np.zeros(shape, np.float32)) for _ in trajectories]
    ref = candidates if algorithm.kl.top_k else per_term
    scores = Scores(
        old=per_term if scored else None,
        ref=ref if algorithm.kl.where != "none" else None,
        values=per_state if with_critic else None,
    )
    experience = build_experience([group], algorithm, scores, kl_coef=0.0, masked=())
    policy, critic = mini_batch_terms(experience, slice(None), algorithm, kl_coef=0.0)
    if algorithm.policy_loss.loss_mode in SELECTORS:
        policy["chosen"] = per_term
    made: dict[str, dict[str, np.ndarray]] = {}
    for name, terms in (
        ("policy", policy),
        ("layout", {}),
        *([("critic", critic)] if with_critic else []),
    ):
        own = batch.with_terms(**terms)
        if name == "policy" and experience.candidates is not None:
            own = own.with_candidates(*zip(*experience.candidates, strict=True))
        first = next(own.micro_batches(rows))
        made[name] = dict(first) if images is None else list(blanks(first, images))[-1]
        made[name] |= _replayed(config, model, first)
    if learner.router_aux_loss_coef and model.experts is not None:
        made["policy"]["router_share"] = np.zeros(model.experts.count, np.float32)
        made["policy"]["router_tokens"] = np.zeros((), np.float32)
    return dict(made)


def _replayed(config: Config, model: DecoderConfig, batch: Arrays) -> dict[str, np.ndarray]:
    """Return what engines report of draws, supports and experts, as arrays that take no memory here."""
    made: dict[str, np.ndarray] = {}
    if config.replays_supports:
        shape = (*batch["target_id"].shape, mask_words(model.vocab_size))
        made["target_support"] = np.broadcast_to(np.uint32(0), shape)
    if model.experts is not None:
        shape = (*batch["token_ids"].shape, model.num_layers, model.experts.per_token)
        made["routed_experts"] = np.broadcast_to(np.int16(0), shape)
    return made


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
    """Return a group of one turn each, every second of which is rewarded."""
    members = [
        Trajectory.from_turns(
            prompt_ids=prompt,
            turns=[Turn(output=output)],
            trajectory_id=f"{name}-{number}",
            group_id=name,
            agent_name="plan",
            finish_reason=FinishReason.ANSWER,
            reward=float(number % 2),
        )
        for number, output in enumerate(outputs)
    ]
    return Group(group_id=name, trajectories=tuple(members))
