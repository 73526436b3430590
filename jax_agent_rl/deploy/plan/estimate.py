"""Estimates of memory and time without compiling, to compare configurations by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.hlo import RING
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import (
    MASTER,
    ResidentBytes,
    active_parameter_count,
    engine_shapes,
    parameter_count,
)
from jax_agent_rl.types.supports import mask_words

MASK_WORD_BYTES = 4
"""Bytes of a word of a support's mask in the learner's micro-batches."""
EXPERT_NUMBER_BYTES = 2
"""Bytes of an expert's number in the learner's micro-batches."""
PRODUCTS = {"none": 6, "dots": 6, "full": 8}
"""Operations per parameter and token, by what the backward pass recomputes."""


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimated memory and time of one configuration.

    Attributes:
        resident_bytes: lower bound of what stays on the fullest chip between programs.
        learner_bytes: the learner's part of it, on each of its chips.
        weight_bytes: the weights' part of an engine's.
        engine_bytes: an engine's part of it; 0 where engines run elsewhere.
        gradient_bytes: what a gradient adds: activations, and parameters gathered from other chips.
        seconds: time of a step, by products, weights read and what chips send for them.
    """

    resident_bytes: float
    gradient_bytes: float
    seconds: float
    learner_bytes: float = 0.0
    engine_bytes: float = 0.0
    weight_bytes: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of the fullest chip."""
        return self.resident_bytes + self.gradient_bytes


def estimate(config: Config, model: DecoderConfig, chip: Chip, *, engines: int) -> PlanEstimate:
    """Estimate memory and time, to compare configurations by.

    Resident bytes are a lower bound, and a gradient's bytes rough.

    Args:
        engines: number of engines that sample concurrently; where they run elsewhere, neither
            their memory nor their time counts.
    """
    rollout = config.rollout
    engine_devices = rollout.jetstream.mesh.engine_devices
    resident = ResidentBytes.estimate(config, model, devices=engine_devices)
    learner_bytes = resident.learner
    engine_bytes = 0.0
    weight_bytes = 0.0
    rollout_seconds = 0.0
    if rollout.backend == "jetstream":
        weight_bytes = resident.weights
        engine_bytes = resident.serving(engine_shapes(config))
        rollout_seconds = _rollout_seconds(config, chip, resident.weights, resident.position)
    shares_chips = (
        rollout.placement != "separate"
        and rollout.jetstream.device_offset < config.learner.mesh.devices
    )
    if shares_chips and not rollout.sleep_during_update:
        resident_bytes = learner_bytes + engine_bytes
    else:  # on chips of their own, or in turn on the same
        resident_bytes = max(learner_bytes, engine_bytes)

    gradient_bytes = (
        _activation_bytes(config, model)
        + _gathered_bytes(config, model)
        + _replayed_bytes(config, model)
    )
    seconds = _train_seconds(config, model, chip) + rollout_seconds / engines
    return PlanEstimate(
        resident_bytes=resident_bytes,
        gradient_bytes=gradient_bytes,
        seconds=seconds,
        learner_bytes=learner_bytes,
        engine_bytes=engine_bytes,
        weight_bytes=weight_bytes,
    )


def _activation_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of activations for the backward pass, and of a layer's work space.

    Counted per token: projections and the gate's products, sharded over the axis ``tensor``, and
    whole hidden states. A layer's backward pass holds all its activations, and as many derivatives.
    """
    learner = config.learner
    mesh = learner.mesh
    tokens = learner.micro_batch_size * learner.pack_length / mesh.context
    # Of the larger heads, where layers have different ones.
    heads = [model.heads(kind.mixer) for kind in model.layer_kinds]
    queries = model.num_heads * max(layer.head_dim for layer in heads)
    keys = max(layer.num_kv_heads * layer.head_dim for layer in heads)
    hidden = model.hidden_size

    saved = 0.0
    largest = 0.0
    for kind in model.layer_kinds:
        if kind.feed_forward == "dense":
            intermediate = model.intermediate_size
        elif kind.feed_forward == "wide":
            intermediate = 2 * model.intermediate_size
        else:
            assert model.experts is not None
            intermediate = model.experts.per_token * model.experts.intermediate_size
            intermediate += model.experts.shared_size

        # Numbers per token, by what the backward pass does not recompute.
        dots = (queries + 2 * keys + 2 * intermediate) / mesh.tensor + 3 * hidden
        everything = (3 * queries + 4 * keys + 5 * intermediate) / mesh.tensor + 8 * hidden
        saved += {"none": everything, "dots": dots, "full": hidden}[learner.remat]
        largest = max(largest, everything)
    return tokens * _compute_width(config) * (saved + 2 * largest)


def _gathered_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of gathered parameters: of two layers and the vocabulary."""
    mesh = config.learner.mesh
    if mesh.fsdp == 1:
        return 0.0
    largest_layer = 0
    for kind in set(model.layer_kinds):
        size = sum(math.prod(shape) for shape in model.kind_shapes(kind).values())
        largest_layer = max(largest_layer, size)
    vocabulary = model.vocab_size * model.hidden_size
    if model.per_layer_inputs is not None:
        vocabulary += math.prod(model.parameter_shapes()["per_layer_embed"])
    return (2 * largest_layer / mesh.expert + vocabulary) / mesh.tensor * _compute_width(config)


def _replayed_bytes(config: Config, model: DecoderConfig) -> float:
    """Return a chip's bytes of supports and experts beside the tokens of a micro-batch."""
    bytes_per_token = 0
    if config.replays_supports:
        bytes_per_token += MASK_WORD_BYTES * mask_words(model.vocab_size)
    if model.experts is not None:
        bytes_per_token += EXPERT_NUMBER_BYTES * len(model.expert_layers) * model.experts.per_token
    return config.learner.micro_batch_size * config.learner.pack_length * bytes_per_token


def _compute_width(config: Config) -> int:
    """Return the bytes of a number in the learner's compute dtype."""
    return 2 if config.learner.compute_dtype == "bfloat16" else 4


def _train_seconds(config: Config, model: DecoderConfig, chip: Chip) -> float:
    """Estimate the seconds to train on a step's tokens."""
    mesh = config.learner.mesh
    rollout = config.rollout
    agent = config.agent
    parameters = parameter_count(model)
    width = _compute_width(config)

    rows = config.learner.micro_batch_size * mesh.data * mesh.fsdp * mesh.expert
    length = config.learner.pack_length
    group_tokens = rollout.group_size * agent.max_response_length + agent.max_prompt_length
    calls = math.ceil(rollout.prompts_per_step * group_tokens / (rows * length))

    # All parameters are gathered below, but a token meets few of a mixture's experts.
    active = active_parameter_count(model)
    operations = PRODUCTS[config.learner.remat] * active * rows * length
    product_seconds = operations / mesh.devices / chip.flops

    # Bytes that a chip sends for one micro-batch, along each axis.
    layers = model.num_layers
    tokens = config.learner.micro_batch_size * length / mesh.context
    kv_sizes = []  # of a token, by layer
    for kind in model.layer_kinds:
        heads = model.heads(kind.mixer)
        kv_sizes.append(heads.num_kv_heads * heads.head_dim)
    copies = mesh.data * mesh.context  # of each gradient
    weights = parameters / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    activations = 4 * layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    kv = 6 * tokens * sum(kv_sizes) * width * (mesh.context - 1)
    gradients = 2 * MASTER * parameters / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    link_seconds = (weights + activations + kv + gradients) / (RING * chip.link_bandwidth)
    return calls * max(product_seconds, link_seconds)


def _rollout_seconds(config: Config, chip: Chip, weights: float, position: float) -> float:
    """Estimate the seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each slot's longest context.
    """
    rollout = config.rollout
    slots = engine_shapes(config).max_concurrent_decodes
    members = rollout.prompts_per_step * rollout.group_size
    steps = members * config.agent.max_response_length / slots
    kv = slots * rollout.max_model_len / 2 * position
    return steps * (weights + kv) / chip.hbm_bandwidth
