"""Estimates of a configuration without a compiler, to choose which ones to compile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.roofline import RING
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engines import engine_shapes

MASTER = 4  # bytes of a parameter, of its gradient, and of each of its two moments
PRODUCTS = {"none": 6, "dots": 6, "full": 8}
"""Operations for each parameter and token, by what the backward pass recomputes."""


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimated memory and time of one configuration.

    Attributes:
        stays: bytes that stay on the fullest chip, at the least.
        passes: bytes that a gradient takes there besides: activations, and parameters gathered from other chips.
        seconds: of a step, by products, weights read and what chips send for them.
    """

    stays: float
    passes: float
    seconds: float

    @property
    def total(self) -> float:
        """Bytes of the fullest chip."""
        return self.stays + self.passes


def estimate(config: Config, model: DecoderConfig, chip: Chip, *, engines: int) -> PlanEstimate:
    """Estimate memory (resident: a lower bound; a gradient's: roughly) and a time to compare configurations by.

    Args:
        config: of the run.
        model: its architecture.
        chip: of the slice.
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
    shared = config.rollout.placement != "separate" and config.rollout.jetstream.device_offset < learner.devices
    in_turn = state + serving if shared and not config.rollout.sleep_during_update else max(state, serving)
    return PlanEstimate(
        stays=in_turn,
        passes=_activations(config, model) + _gathered(config, model),
        seconds=_learner(config, model, chip, count) + _rollout(config, chip, weights, position) / engines,
    )


def _activations(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of activations kept for the backward pass, and of a layer's work space.

    Counted per token: projections and the gate's products, of which a chip has its share of the axis ``tensor``, and
    hidden states, which it has whole. While a layer's derivatives are computed, all that it makes is there, and as much
    again of derivatives.
    """
    learner, mesh = config.learner, config.learner.mesh
    tokens = learner.micro_batch_size * learner.pack_length / mesh.context
    queries, keys, hidden = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.hidden_size
    experts = model.experts
    forward = model.intermediate_size if experts is None else experts.per_token * experts.intermediate_size
    dots = (queries + 2 * keys + 2 * forward) / mesh.tensor + 3 * hidden
    everything = (3 * queries + 4 * keys + 5 * forward) / mesh.tensor + 8 * hidden
    kept = {"none": everything, "dots": dots, "full": hidden}[learner.remat]
    return tokens * _width(config) * (model.num_layers * kept + 2 * everything)


def _gathered(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of gathered parameters: of two layers and the vocabulary."""
    mesh = config.learner.mesh
    if mesh.fsdp == 1:
        return 0.0
    shapes = model.parameter_shapes()
    layer = sum(math.prod(shape[1:]) for shape in shapes["layers"].values())
    return (2 * layer / mesh.expert + math.prod(shapes["embed"])) / mesh.tensor * _width(config)


def _width(config: Config) -> int:
    """Return the bytes of a number in the learner's compute dtype."""
    return 2 if config.learner.compute_dtype == "bfloat16" else 4


def _learner(config: Config, model: DecoderConfig, chip: Chip, count: int) -> float:
    """Estimate the seconds to train on a step's tokens."""
    mesh, rollout = config.learner.mesh, config.rollout
    rows = config.learner.micro_batch_size * mesh.data * mesh.fsdp * mesh.expert
    length = config.learner.pack_length
    members = rollout.group_size * config.agent.max_response_length + config.agent.max_prompt_length
    calls = math.ceil(rollout.prompts_per_step * members / (rows * length))
    width = _width(config)
    products = PRODUCTS[config.learner.remat] * count * rows * length / mesh.devices / chip.flops
    gathered = count / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    tokens = config.learner.micro_batch_size * length / mesh.context
    summed = 4 * model.num_layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    seen = 6 * model.num_layers * tokens * model.num_kv_heads * model.head_dim * width * (mesh.context - 1)
    copies = mesh.data * mesh.context  # of each gradient
    added = 2 * MASTER * count / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    links = (gathered + summed + seen + added) / (RING * chip.link_bandwidth)
    return calls * max(products, links)


def _rollout(config: Config, chip: Chip, weights: float, position: float) -> float:
    """Estimate the seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each slot's longest context.
    """
    rollout = config.rollout
    slots = engine_shapes(config).max_concurrent_decodes
    steps = rollout.prompts_per_step * rollout.group_size * config.agent.max_response_length / slots
    return steps * (weights + slots * rollout.max_model_len / 2 * position) / chip.hbm_bandwidth
