"""What can be said of a configuration without a compiler: enough to know which ones are worth compiling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jax_agent_rl.config import Config
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.plan.chips import Chip
from jax_agent_rl.plan.roofline import RING
from jax_agent_rl.runtime.engines import engine_shapes

MASTER = 4  # bytes of a parameter, of its gradient, and of each of its two moments


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one configuration.

    Attributes:
        bytes: that stay on the fullest chip.
        seconds: of a step, by products, weights read and what chips send for them.
    """

    bytes: float
    seconds: float


def estimate(config: Config, model: DecoderConfig, chip: Chip, *, engines: int) -> Estimate:
    """A lower bound of the memory, and a time to compare configurations by.

    Args:
        engines: that sample side by side.
    """
    learner, engine = config.learner.mesh, config.rollout.jetstream.mesh
    sizes = jax.tree.leaves(jax.tree.map(math.prod, model.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)))
    count = sum(sizes)
    held = count / (learner.fsdp * learner.tensor * learner.expert)
    copies = 1 + (config.algorithm.adv_estimator == "gae")
    if config.learner.lora is None:
        state = held * MASTER * (4 * copies + (config.algorithm.kl.where != "none"))
    else:
        state = held * MASTER * (4 * (copies - 1) + 0.5)
    serves = config.rollout.jetstream
    own = 2 if serves.dtype == "bfloat16" else 4
    weights = count * (own if serves.quantize == "none" else 1) / engine.devices
    shapes = engine_shapes(config)
    heads = math.lcm(model.num_kv_heads, engine.devices) / engine.devices
    position = 2 * model.num_layers * heads * model.head_dim * (own if serves.kv_dtype == "auto" else 1)
    serving = weights + shapes.pages * shapes.page * position
    shared = config.rollout.placement != "separate" and config.rollout.jetstream.first_device < learner.devices
    in_turn = state + serving if shared and not config.rollout.sleep else max(state, serving)
    return Estimate(
        bytes=in_turn,
        seconds=_learner(config, model, chip, count) + _rollout(config, chip, weights, position) / engines,
    )


def _learner(config: Config, model: DecoderConfig, chip: Chip, count: int) -> float:
    """Seconds to train on a step's tokens."""
    mesh, rollout = config.learner.mesh, config.rollout
    rows = config.learner.rows_per_micro_batch * mesh.data * mesh.fsdp * mesh.expert
    length = config.learner.row_length
    members = rollout.group_size * config.agent.max_response_length + config.agent.max_prompt_length
    calls = math.ceil(rollout.prompts_per_step * members / (rows * length))
    width = 2 if config.learner.compute_dtype == "bfloat16" else 4
    products = 6 * count * rows * length / mesh.devices / chip.flops
    gathered = count / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    tokens = config.learner.rows_per_micro_batch * length / mesh.context
    summed = 4 * model.num_layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    seen = 6 * model.num_layers * tokens * model.num_kv_heads * model.head_dim * width * (mesh.context - 1)
    copies = mesh.data * mesh.context  # of each gradient
    added = 2 * MASTER * count / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    links = (gathered + summed + seen + added) / (RING * chip.link_bandwidth)
    return calls * max(products, links)


def _rollout(config: Config, chip: Chip, weights: float, position: float) -> float:
    """Seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each lane's longest context.
    """
    rollout = config.rollout
    lanes = engine_shapes(config).max_concurrent_decodes
    steps = rollout.prompts_per_step * rollout.group_size * config.agent.max_response_length / lanes
    return steps * (weights + lanes * rollout.max_model_len / 2 * position) / chip.hbm_bandwidth
