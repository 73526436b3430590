"""Estimates of memory and time without compiling, to compare configurations by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.hlo import RING
from jax_agent_rl.deploy.plan.model_flops import pass_flops
from jax_agent_rl.deploy.plan.topology import Chip
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.runtime.engine_devices import (
    MASTER,
    ResidentBytes,
    engine_shapes,
    of_one_host,
    parameter_count,
)
from jax_agent_rl.types.supports import mask_words

MASK_WORD_BYTES = 4
"""Bytes of a word of a support's mask in the learner's micro-batches."""
EXPERT_NUMBER_BYTES = 2
"""Bytes of an expert's number in the learner's micro-batches."""
PASSES = {"none": 3, "dots": 3, "full": 4}
"""Forward passes whose operations a gradient has, by what the backward pass recomputes."""
EXPERT_EXCHANGES = 5
"""Times that a gradient sends hidden states over ``expert``: to a mixture and back, for its
recomputation, and their gradients."""
FLOAT32 = 2
"""Numbers of a compute dtype of two bytes that are as large as one in float32."""


class MixerNumbers(NamedTuple):
    """Numbers of one token in one layer's mixer, on all chips together.

    Attributes:
        products: results of matrix products, and what the backward pass keeps of the mixture.
        everything: all that is kept where nothing is recomputed.
        exchanged: what chips that have the other tokens of a row get of it, in a forward pass.
    """

    products: float
    everything: float
    exchanged: float


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimated memory and time of one configuration.

    Attributes:
        resident_bytes: lower bound of what stays on the fullest chip while the learner works.
        rollout_bytes: the same while engines sample and take weights.
        learner_bytes: the learner's part of it, on each of its chips.
        weight_bytes: the weights' part of an engine's.
        engine_bytes: an engine's part of it; 0 where engines run elsewhere.
        gradient_bytes: what a gradient adds: activations, and parameters gathered from other chips.
        seconds: time of a step, by products, weights read and what chips send for them.
    """

    resident_bytes: float
    gradient_bytes: float
    seconds: float
    rollout_bytes: float = 0.0
    learner_bytes: float = 0.0
    engine_bytes: float = 0.0
    weight_bytes: float = 0.0

    @property
    def least_bytes(self) -> float:
        """Lower bound of the fullest chip's bytes, in the fuller phase."""
        return max(self.resident_bytes, self.rollout_bytes)

    @property
    def total(self) -> float:
        """Bytes of the fullest chip, in the fuller phase."""
        return max(self.resident_bytes + self.gradient_bytes, self.rollout_bytes)


def estimate(
    config: Config, model: DecoderConfig, chip: Chip, *, engines: int, hosts: int = 1
) -> PlanEstimate:
    """Estimate memory and time, to compare configurations by.

    Resident bytes are a lower bound, and a gradient's bytes rough.

    Args:
        engines: number of engines that sample concurrently; where they run elsewhere, neither
            their memory nor their time counts.
        hosts: number of hosts whose engines share the run's trajectories.
    """
    config = of_one_host(config, hosts)
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
        rollout_seconds = _rollout_seconds(config, chip, resident)
    shares_chips = (
        rollout.placement != "separate"
        and rollout.jetstream.device_offset < config.learner.mesh.devices
    )
    resident_bytes = learner_bytes
    if shares_chips and not rollout.sleep_during_update:
        resident_bytes += engine_bytes

    rollout_bytes = engine_bytes
    if shares_chips:
        rollout_bytes += learner_bytes
        if config.learner.lora is None:  # there is no gradient between updates
            mesh = config.learner.mesh
            shards = mesh.fsdp * mesh.tensor * mesh.expert
            rollout_bytes -= MASTER * parameter_count(model) / shards

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
        rollout_bytes=rollout_bytes,
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
            if model.experts.beside_dense:
                intermediate += model.intermediate_size

        # Numbers per token, by what the backward pass does not recompute.
        mixer = _mixer_numbers(model, kind.mixer, mesh.context)
        dots = (mixer.products + 2 * intermediate) / mesh.tensor + 3 * hidden
        everything = (mixer.everything + 5 * intermediate) / mesh.tensor + 8 * hidden
        saved += {"none": everything, "dots": dots, "full": hidden}[learner.remat]
        largest = max(largest, everything)
    return tokens * _compute_width(config) * (saved + 2 * largest)


def _mixer_numbers(model: DecoderConfig, mixer: MixerName, context: int) -> MixerNumbers:
    """Return the numbers of a token in a mixer.

    Args:
        context: chips that the tokens of a row are split over.
    """
    if mixer != "delta_net":
        heads = model.heads(mixer)
        queries = model.num_heads * heads.head_dim
        keys = heads.num_kv_heads * heads.head_dim
        return MixerNumbers(
            products=queries + 2 * keys,
            everything=3 * queries + 4 * keys,
            exchanged=2 * keys * (context - 1),
        )

    sizes = model.delta_net
    assert sizes is not None
    projected = sizes.conv_channels + sizes.values_size + 2 * sizes.value_heads
    # Outputs, corrections and a state per chunk, which is as much for each of its tokens.
    mixed = FLOAT32 * 3 * sizes.values_size
    rule_inputs = FLOAT32 * (2 * sizes.value_heads * sizes.key_dim + sizes.values_size)
    # Tokens for heads before the rule, outputs in float32 for tokens after it.
    exchanged = sizes.conv_channels + 2 * sizes.value_heads + FLOAT32 * sizes.values_size
    return MixerNumbers(
        products=projected + mixed,
        everything=projected + sizes.conv_channels + rule_inputs + mixed + sizes.values_size,
        exchanged=exchanged * (context - 1) / context,
    )


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

    one_pass = rows * pass_flops(model, length, visible=(length + 1) / 2)
    operations = PASSES[config.learner.remat] * one_pass
    product_seconds = operations / mesh.devices / chip.flops

    # Bytes that a chip sends for one micro-batch, along each axis.
    layers = model.num_layers
    tokens = config.learner.micro_batch_size * length / mesh.context
    exchanged = 0.0  # of a token, in a forward pass
    for kind in model.layer_kinds:
        exchanged += _mixer_numbers(model, kind.mixer, mesh.context).exchanged
    expert_tokens = EXPERT_EXCHANGES * len(model.expert_layers) * tokens * model.hidden_size
    expert_tokens *= mesh.expert - 1
    copies = mesh.data * mesh.context  # of each gradient
    weights = parameters / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    activations = 4 * layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    mixing = 3 * tokens * exchanged * width
    gradients = 2 * MASTER * parameters / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    exchanges = weights + activations + mixing + expert_tokens * width + gradients
    link_seconds = exchanges / (RING * chip.link_bandwidth)
    return calls * max(product_seconds, link_seconds)


def _rollout_seconds(config: Config, chip: Chip, resident: ResidentBytes) -> float:
    """Estimate the seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each slot's longest context, and reads and writes
    its recurrent state.
    """
    rollout = config.rollout
    slots = engine_shapes(config).max_concurrent_decodes
    members = rollout.prompts_per_step * rollout.group_size
    steps = members * config.agent.max_response_length / slots
    context = rollout.max_model_len / 2 * resident.position + 2 * resident.state
    return steps * (resident.weights + slots * context) / chip.hbm_bandwidth
