"""Gated delta nets in an engine, over one state for each context.

Shapes as in ``jetstream.forward``, and: N slots or rows, G key heads, each of which serves r
adjacent value heads, k and v the sizes of a head's keys and values, F = G (2k + r v) channels of
the convolution, n its kernel. Everything is grouped by key head, which is how a mesh splits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.jetstream.attention import DEVICES
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.mixers.mixer import (
    ChunkInputs,
    DecodeInputs,
    EngineMixer,
    LayerSettings,
)
from jax_agent_rl.jetstream.recurrent_states import where_rows
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.delta_net import (
    CHUNK,
    DeltaTokens,
    causal_conv,
    causal_conv_step,
    chunked_delta_rule,
    delta_step,
    delta_tokens,
    gated_rms_norm,
)
from jax_agent_rl.models.sharding import constrain
from jax_agent_rl.models.vision_context import ImageInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """States of one layer.

    Attributes:
        conv: [N, n - 1, F], the convolution's inputs before the next token.
        memory: float32 [N, H, k, v].
    """

    conv: jax.Array
    memory: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaChunk:
    """What a chunk of T tokens of each row brings to a layer's states.

    Attributes:
        state: the states after the chunks, padding left out.
        inputs: [R, n - 1 + T, F], the convolution's inputs from those before the chunk on.
        tokens: what the tokens bring to the delta rule, [R, T, H, …].
    """

    state: DeltaState
    inputs: jax.Array
    tokens: DeltaTokens

    def after(self, before: DeltaState, counts: jax.Array) -> DeltaState:
        """Return the states after the first ``counts``, int32 [R], tokens of each row."""
        return _apply(before, self.inputs, self.tokens, counts)[1]


def group_by_key_head(config: DecoderConfig, layer: Params) -> Params:
    """Return a learner's layer as engines keep it: the inputs of each key head side by side.

    Returns:
        The other arrays as they are, and ``delta_qkvz`` [G, 2k + 2r v, D], ``delta_ba`` [G, 2r, D]
        and ``delta_conv`` [G, 2k + r v, n].
    """
    sizes = config.delta_net
    assert sizes is not None
    heads = sizes.key_heads
    layer = dict(layer)

    def by_head(name: str) -> jax.Array:
        x = layer.pop(name)
        return x.reshape(heads, -1, *x.shape[1:])

    def channels_by_head(name: str) -> jax.Array:
        """Group queries, keys and values, which follow each other, by head."""
        x = layer.pop(name)
        parts = jnp.split(x, [sizes.keys_size, 2 * sizes.keys_size])
        return jnp.concatenate([part.reshape(heads, -1, *x.shape[1:]) for part in parts], axis=1)

    if sizes.fused:
        layer["delta_qkvz"] = by_head("delta_qkvz")
        layer["delta_ba"] = by_head("delta_ba")
    else:
        qkvz = [channels_by_head("delta_qkv"), by_head("delta_z")]
        layer["delta_qkvz"] = jnp.concatenate(qkvz, axis=1)
        layer["delta_ba"] = jnp.concatenate([by_head("delta_b"), by_head("delta_a")], axis=1)
    layer["delta_conv"] = channels_by_head("delta_conv")[:, :, 0]
    return layer


def ungroup(config: DecoderConfig, layer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Invert :func:`group_by_key_head`."""
    sizes = config.delta_net
    assert sizes is not None
    values = sizes.values_size // sizes.key_heads
    layer = dict(layer)

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, *x.shape[2:])

    def flat_channels(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, [sizes.key_dim, 2 * sizes.key_dim], axis=1)
        return np.concatenate([flat(part) for part in parts])

    layer["delta_conv"] = flat_channels(layer["delta_conv"])[:, None]
    qkvz = layer.pop("delta_qkvz")
    ba = layer.pop("delta_ba")
    if sizes.fused:
        return layer | {"delta_qkvz": flat(qkvz), "delta_ba": flat(ba)}
    beta, decay = np.split(ba, 2, axis=1)
    return layer | {
        "delta_qkv": flat_channels(qkvz[:, :-values]),
        "delta_z": flat(qkvz[:, -values:]),
        "delta_b": flat(beta),
        "delta_a": flat(decay),
    }


def _prepare(config: DecoderConfig, positions: jax.Array, images: ImageInputs | None) -> None:
    """Return nothing: states know no positions."""


def _decode(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: DeltaState,
    inputs: DecodeInputs,
) -> tuple[jax.Array, DeltaState]:
    assert inputs.running is not None
    projected = _project(settings, layer, x, (x.shape[1],))
    channels, conv = causal_conv_step(projected.channels, _conv_weight(layer), cached.conv)
    tokens = _tokens(settings, layer, channels, projected)
    # A slot that has finished, or waits, keeps its state while others go on.
    conv = where_rows(inputs.running, conv, cached.conv)
    if layer.native:
        outputs, memory = cpu_kernels.delta_step(tokens, cached.memory, inputs.running)
    else:
        outputs, memory = delta_step(tokens, cached.memory)
        memory = where_rows(inputs.running, memory, cached.memory)
    return _project_back(settings, layer, outputs, projected), DeltaState(conv, memory)


def _chunk(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: DeltaState,
    inputs: ChunkInputs,
) -> tuple[jax.Array, DeltaChunk]:
    assert inputs.lengths is not None
    rows = len(inputs.starts)
    projected = _project(settings, layer, x, (rows, x.shape[1] // rows))
    channels, conv_inputs = causal_conv(projected.channels, _conv_weight(layer), cached.conv)
    tokens = _tokens(settings, layer, channels, projected)
    outputs, state = _apply(cached, conv_inputs, tokens, inputs.lengths)
    chunk = DeltaChunk(state=state, inputs=conv_inputs, tokens=tokens)
    return _project_back(settings, layer, outputs, projected), chunk


class _Projected(NamedTuple):
    """Projections of tokens; [..] is [B] or [R, T]."""

    channels: jax.Array  # [.., F]
    gate: jax.Array  # [.., H, v]
    beta: jax.Array  # [.., H]
    decay: jax.Array  # [.., H]


def _project(
    settings: LayerSettings, layer: AdaptedLayer, x: jax.Array, shape: tuple[int, ...]
) -> _Projected:
    """Project columns [D, B], which are the tokens of ``shape``."""
    config = settings.config
    sizes = config.delta_net
    assert sizes is not None
    qkvz = layer.multiply(config, "delta_qkvz", x, config.mixer_norm)  # [G, 2 k + 2 r v, B]
    ba = layer.multiply(config, "delta_ba", x, config.mixer_norm)  # [G, 2 r, B]
    num_channels = qkvz.shape[1] - ba.shape[1] // 2 * sizes.value_dim

    def by_token(part: jax.Array) -> jax.Array:
        """Turn [G, c, B] into [.., G c]."""
        return jnp.moveaxis(part, 2, 0).reshape(*shape, -1)

    beta, decay = jnp.split(ba, 2, axis=1)
    gate = by_token(qkvz[:, num_channels:])
    return _Projected(
        channels=by_token(qkvz[:, :num_channels]),
        gate=gate.reshape(*shape, -1, sizes.value_dim),
        beta=by_token(beta),
        decay=by_token(decay),
    )


def _conv_weight(layer: AdaptedLayer) -> jax.Array:
    """Return the convolution's weights [F, n] from [G, F / G, n]."""
    weight = layer.params["delta_conv"]
    return weight.reshape(-1, weight.shape[-1])


def _tokens(
    settings: LayerSettings, layer: AdaptedLayer, channels: jax.Array, projected: _Projected
) -> DeltaTokens:
    """Return what tokens bring to the delta rule from convolved channels [.., F]."""
    sizes = settings.config.delta_net
    assert sizes is not None
    shape = channels.shape[:-1]
    by_head = channels.reshape(*shape, sizes.key_heads, -1)
    q, k, v = jnp.split(by_head, [sizes.key_dim, 2 * sizes.key_dim], axis=-1)
    return delta_tokens(
        q,
        k,
        v.reshape(*shape, -1, sizes.value_dim),
        projected.decay,
        projected.beta,
        decay_log=layer.params["delta_decay_log"],
        decay_bias=layer.params["delta_decay_bias"],
    )


def _apply(
    before: DeltaState, inputs: jax.Array, tokens: DeltaTokens, counts: jax.Array
) -> tuple[jax.Array, DeltaState]:
    """Apply the first ``counts`` tokens of each row; the others change nothing.

    Returns:
        Outputs float32 [R, T, H, v], which mean nothing from ``counts`` on, and the states.
    """
    length = tokens.beta.shape[1]
    is_applied = (jnp.arange(length) < counts[:, None])[..., None]
    # A token that neither fades the state nor corrects it leaves it as it is.
    tokens = tokens._replace(
        log_decay=jnp.where(is_applied, tokens.log_decay, 0.0),
        beta=jnp.where(is_applied, tokens.beta, 0.0),
    )
    outputs, states = chunked_delta_rule(tokens, before.memory, chunk=min(CHUNK, length))

    # The convolution goes on from the inputs before each row's next token.
    def last_inputs(row: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, count, before.conv.shape[1], 0)

    conv = jax.vmap(last_inputs)(inputs, counts)
    return outputs, DeltaState(conv=conv, memory=states[-1])


def _project_back(
    settings: LayerSettings, layer: AdaptedLayer, outputs: jax.Array, projected: _Projected
) -> jax.Array:
    """Return the layer's output [D, B] of the heads' outputs [.., H, v]."""
    config = settings.config
    normed = gated_rms_norm(
        outputs, projected.gate, layer.params["delta_norm"], eps=config.rms_norm_eps
    )
    heads, size = normed.shape[-2:]
    mixed = normed.reshape(-1, heads * size).T
    return constrain(layer.multiply(config, "delta_out", mixed), settings.mesh)


def _empty(
    config: DecoderConfig, layer: int, count: int, length: int, dtype: jnp.dtype
) -> DeltaState:
    """Return ``count`` states before the first token; ``length`` has no meaning for them."""
    sizes = config.delta_net
    assert sizes is not None
    memory = (count, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return DeltaState(
        conv=jnp.zeros((count, sizes.conv_kernel - 1, sizes.conv_channels), dtype),
        memory=jnp.zeros(memory, jnp.float32),
    )


def _sharding(mesh: Mesh) -> DeltaState:
    """Return the shardings of a layer's states: split by head."""
    shardings: Any = DeltaState  # a tree of shardings in place of arrays
    return shardings(
        conv=NamedSharding(mesh, PartitionSpec(None, None, DEVICES)),
        memory=NamedSharding(mesh, PartitionSpec(None, DEVICES)),
    )


DELTA_NET = EngineMixer(
    prepare=_prepare,
    decode=_decode,
    chunk=_chunk,
    empty_cache=_empty,
    cache_sharding=_sharding,
    is_recurrent=True,
)
