"""The learner's model without packing: one context per row, and suspect settings as arguments.

Positions, masks, the numbers of a config, keys and values of other weights and the tensors of
single layers are arrays here, so that one compiled program serves almost every hypothesis. The
layers are the learner's own (``models.decoder``). Attention is a plain one over a whole row,
because the learner's masks cannot leave out a single id.

Shapes: B contexts, T ids, D hidden, H query heads, K key/value heads, h head size, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.models.attention import add_sinks
from jax_agent_rl.models.config import DecoderConfig, Params, Rope, YarnScaling
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.decoder_layer import decoder_layer
from jax_agent_rl.models.layer_kinds import LayerKind, MixerName
from jax_agent_rl.models.layer_scan import SourceKeys, scan_layers
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import embed, rms_norm, rope_frequencies
from jax_agent_rl.models.mixers.attention import keys_and_values, mix_heads
from jax_agent_rl.models.per_layer_inputs import PER_LAYER_PARAMETERS, per_layer_inputs
from jax_agent_rl.models.tree_kernel import MASK_VALUE


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows of ids, as numpy arrays [B, T], padded at the end.

    Attributes:
        token_ids: int32.
        positions: int32.
        fresh: bool, ids whose keys and values are of these weights.
        visible_from: int32, index of the first id that attends to this one, if it comes later than
            this one.
        visible_until: int32, one past the index of the last id that attends to this one.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    fresh: np.ndarray
    visible_from: np.ndarray
    visible_until: np.ndarray

    @property
    def are_plain(self) -> bool:
        """Whether every id sees all ids before it, each at the position of its index."""
        count = self.token_ids.shape[1]
        return bool(
            np.all(self.positions == np.arange(count))
            and np.all(self.fresh)
            and np.all(self.visible_from == 0)
            and np.all(self.visible_until >= count)
        )


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Outputs of the layers.

    Attributes:
        embedded: [B, T, D], the input of the first layer.
        hidden: [L, B, T, D], the output of each layer.
        keys: [L, B, K, T, h]; of layers with fewer or smaller heads the first, see
            ``unpadded_heads``. Zeros of layers that read another layer's. None unless
            :func:`remembers_ids_apart`.
        values: [L, B, K, T, h], or None.
    """

    embedded: jax.Array
    hidden: jax.Array
    keys: jax.Array | None
    values: jax.Array | None

    def input_of(self, layer: int) -> jax.Array:
        """Return the input [B, T, D] of a layer."""
        if layer == 0:
            return self.embedded
        return self.hidden[layer - 1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ComputedPrefix:
    """What precedes the rows, computed already: P ids, the first of each row's context.

    Attributes:
        keys: [L, B, K, P, h].
        values: [L, B, K, P, h].
        positions: int32 [B, P].
        visible_until: int32 [B, P], as in :class:`Inputs`, whose indices count from the first of
            the P ids; 0 hides an id.
    """

    keys: jax.Array
    values: jax.Array
    positions: np.ndarray
    visible_until: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """Other tensors of one or two layers; the layers before them are computed already.

    Attributes:
        layer_input: [B, T, D], the input of layer ``first``.
        first: the first layer that is changed.
        tensors: a layer's whole tree, [2, ...], of layer ``first`` and of the one after it.
    """

    layer_input: jax.Array
    first: int
    tensors: Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The numbers of a config, as arguments of the program.

    Python's floats keep the dtype of what they are multiplied with.

    Attributes:
        frequencies: rotary frequencies float32 [2, r/2], of full layers and of windowed layers; the
            first r/2 of a layer whose heads are smaller.
        magnitudes: float32 [2], what cos and sin of the two are multiplied with.
        windowed: int32 [L], which of the two a layer has.
        windows: int32 [L], positions that a layer looks back.
    """

    rms_norm_eps: float
    attention_scale: float
    embed_scale: float
    frequencies: jax.Array
    magnitudes: jax.Array
    windowed: jax.Array
    windows: jax.Array


def program_of(config: DecoderConfig) -> DecoderConfig:
    """Return the config without the numbers that are arguments of the compiled program."""
    rope = Rope(partial_rotary=config.rope.partial_rotary, interleaved=config.rope.interleaved)
    windowed_layers: tuple[bool, ...] = ()
    if config.global_attention is not None:  # then they have other parameters
        windowed_layers = config.windowed_layers
    return replace(
        config,
        rope=rope,
        local_rope=None,
        rms_norm_eps=1.0,
        attention_scale=1.0,
        embed_scale=1.0,
        sliding_window=None,
        windowed_layers=windowed_layers,
        vision=None,
        tie_word_embeddings=True,
        max_position_embeddings=1,
        eos_token_ids=(),
        bos_token_id=None,
    )


def remembers_ids_apart(config: DecoderConfig) -> bool:
    """Return whether each layer remembers every id by its own keys and values.

    Only then can an id be hidden, be moved, or be one of other weights; and layers be computed from
    what is known of earlier ids.
    """
    return set(config.mixers) <= {"attention", "global_attention"}


@functools.partial(jax.jit, static_argnums=0)
def _decoder_states(config: DecoderConfig, params: Params, token_ids: jax.Array) -> jax.Array:
    """Return the final hidden states [B, T, D] of plain rows."""
    hidden, _ = Decoder.from_params(config, params)(token_ids)
    return hidden


@functools.partial(jax.jit, static_argnums=0)
def _decoder_outputs(
    config: DecoderConfig, params: Params, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``Decoder.layer_outputs`` of plain rows."""
    return Decoder.from_params(config, params).layer_outputs(token_ids)


def hidden_states(
    config: DecoderConfig,
    params: Params,
    inputs: Inputs,
    old: Activations | None = None,
    change: LayerChange | None = None,
    prefix: ComputedPrefix | None = None,
) -> jax.Array:
    """Return the final hidden states [B, T, D], after the last norm.

    Args:
        inputs: plain ones, unless :func:`remembers_ids_apart`; ``old``, ``change`` and ``prefix``
            are None then.
        old: activations whose keys and values are attended to where ``inputs.fresh`` is false.
        change: other tensors of one or two layers.
        prefix: what precedes the rows.
    """
    if not remembers_ids_apart(config):
        assert inputs.are_plain and old is None and change is None and prefix is None
        return _decoder_states(config, params, jnp.asarray(inputs.token_ids))
    states, _ = _run(
        config,
        params,
        inputs,
        old=old,
        change=change,
        prefix=prefix,
        return_activations=False,
    )
    return states


def activations(config: DecoderConfig, params: Params, inputs: Inputs) -> Activations:
    """Return the activations between the layers.

    Args:
        inputs: plain ones, unless :func:`remembers_ids_apart`.
    """
    if not remembers_ids_apart(config):
        assert inputs.are_plain
        token_ids = jnp.asarray(inputs.token_ids)
        embedded, hidden = _decoder_outputs(config, params, token_ids)
        return Activations(embedded=embedded, hidden=hidden, keys=None, values=None)

    _, outputs = _run(
        config,
        params,
        inputs,
        old=None,
        change=None,
        prefix=None,
        return_activations=True,
    )
    hidden, keys, values = outputs
    embedded = embed(config, params["embed"], jnp.asarray(inputs.token_ids))
    return Activations(embedded=embedded, hidden=hidden, keys=keys, values=values)


def _run(
    config: DecoderConfig,
    params: Params,
    inputs: Inputs,
    *,
    old: Activations | None,
    change: LayerChange | None,
    prefix: ComputedPrefix | None,
    return_activations: bool,
) -> tuple[jax.Array, Any]:
    rows = (
        jnp.asarray(inputs.token_ids),
        jnp.asarray(inputs.positions),
        jnp.asarray(inputs.fresh),
        jnp.asarray(inputs.visible_from),
        jnp.asarray(inputs.visible_until),
    )

    old_kv = None
    if old is not None:
        assert old.keys is not None and old.values is not None
        old_kv = (old.keys, old.values)
    layer_change = None
    if change is not None:
        layer_change = (change.layer_input, change.first, change.tensors)

    weights = {name: params[name] for name in ("embed", "layers", "final_norm")}
    if config.per_layer_inputs is not None:
        for name in PER_LAYER_PARAMETERS:
            weights[name] = params[name]

    return _layers(
        program_of(config),
        weights,
        _numbers(config, inputs, prefix),
        rows,
        old_kv,
        layer_change,
        prefix,
        return_activations=return_activations,
    )


def _numbers(config: DecoderConfig, inputs: Inputs, prefix: ComputedPrefix | None) -> _Numbers:
    ropes = (config.rope, config.local_rope or config.rope)
    magnitudes = []
    for rope in ropes:
        magnitude = 1.0
        if isinstance(rope.scaling, YarnScaling):
            magnitude = rope.scaling.magnitude
        magnitudes.append(magnitude)

    # A layer without a window looks back further than any two positions are apart.
    prefix_len = 0
    if prefix is not None:
        prefix_len = prefix.positions.shape[1]
    row_len = inputs.token_ids.shape[1]
    unlimited = 2 * (prefix_len + row_len) + int(inputs.positions.max(initial=0))
    windowed = []
    windows = []
    for layer in range(config.num_layers):
        is_windowed = config.is_windowed(layer)
        windowed.append(is_windowed)
        if is_windowed and config.sliding_window is not None:
            windows.append(config.sliding_window)
        else:
            windows.append(unlimited)

    return _Numbers(
        rms_norm_eps=float(config.rms_norm_eps),
        attention_scale=float(config.score_scale),
        embed_scale=float(config.embed_scale),
        frequencies=_frequencies(config),
        magnitudes=jnp.asarray(magnitudes, jnp.float32),
        windowed=jnp.asarray(windowed, jnp.int32),
        windows=jnp.asarray(windows, jnp.int32),
    )


def _frequencies(config: DecoderConfig) -> jax.Array:
    full_size = config.head_dim
    if config.global_attention is not None:
        full_size = config.global_attention.head_dim
    full = rope_frequencies(config.rope, full_size)
    windowed = rope_frequencies(config.local_rope or config.rope, config.head_dim)

    size = max(len(full), len(windowed))
    return jnp.stack([jnp.pad(x, (0, size - len(x))) for x in (full, windowed)])


def _head_shape(config: DecoderConfig) -> tuple[int, int]:
    """Return the largest number of key/value heads of a layer, and their largest size."""
    heads = [config.heads(mixer) for mixer in config.mixers]
    return max(x.num_kv_heads for x in heads), max(x.head_dim for x in heads)


def _padded_heads(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Pad keys or values [B, K, T, h] to the largest of all layers."""
    heads, size = _head_shape(config)
    padding = ((0, 0), (0, heads - x.shape[1]), (0, 0), (0, size - x.shape[3]))
    return jnp.pad(x, padding)


def unpadded_heads(config: DecoderConfig, kind: LayerKind, x: Any) -> Any:
    """Return a layer's own keys or values [..., K, T, h], see :class:`Activations`."""
    heads = config.heads(kind.mixer)
    return x[..., : heads.num_kv_heads, :, : heads.head_dim]


@functools.partial(jax.jit, static_argnums=0, static_argnames="return_activations")
def _layers(
    config: DecoderConfig,
    params: Params,
    numbers: _Numbers,
    rows: tuple[jax.Array, ...],
    old_kv: tuple[jax.Array, jax.Array] | None,
    layer_change: tuple[jax.Array, jax.Array, Params] | None,
    prefix: ComputedPrefix | None,
    *,
    return_activations: bool,
) -> tuple[jax.Array, Any]:
    ids, positions, fresh, visible_from, visible_until = rows
    key_positions = positions
    prefix_len = 0
    if prefix is not None:
        prefix_len = prefix.positions.shape[1]
        key_positions = jnp.concatenate([prefix.positions, positions], axis=1)
        visible_until = jnp.concatenate([prefix.visible_until, visible_until], axis=1)
        visible_from = jnp.concatenate([jnp.zeros_like(prefix.visible_until), visible_from], axis=1)

    query = prefix_len + jnp.arange(ids.shape[1])[:, None]
    key = jnp.arange(key_positions.shape[1])
    is_seen = (key <= query) & (visible_from[:, None] <= query) & (query < visible_until[:, None])
    distance = positions[:, :, None] - key_positions[:, None]
    layer_config = replace(
        config, rms_norm_eps=numbers.rms_norm_eps, attention_scale=numbers.attention_scale
    )

    def compute(
        x: jax.Array,
        kind: LayerKind,
        tensors: Params,
        values: tuple[Any, ...],
        source_keys: Mapping[MixerName, Any],
    ) -> tuple[jax.Array, Any, SourceKeys]:
        number, windowed, window, old_kv, prefix_kv, per_layer_input = values
        if layer_change is not None:
            _, first, changed_tensors = layer_change
            pairs = {name: changed_tensors[name] for name in tensors}
            tensors = jax.lax.cond(
                (number == first) | (number == first + 1),
                lambda: jax.tree.map(lambda pair: pair[jnp.clip(number - first, 0, 1)], pairs),
                lambda: tensors,
            )
        row_kv: list[jax.Array] = []
        new_source_keys: SourceKeys = {}

        def seen_kv(inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the keys and values that the layer attends to."""
            if kind.keys == "shared":
                return source_keys[kind.mixer]
            seen = []
            for index, x in enumerate(keys_and_values(layer, inputs, cos, sin)):
                row_kv.append(x)
                if old_kv is not None:
                    old = unpadded_heads(config, kind, old_kv[index])
                    x = jnp.where(fresh[:, None, :, None], x, old)
                if prefix_kv is not None:
                    x = jnp.concatenate([unpadded_heads(config, kind, prefix_kv[index]), x], axis=2)
                seen.append(x)
            if kind.keys == "source":
                new_source_keys[kind.mixer] = tuple(seen)
            return seen[0], seen[1]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            return _attention(q, k, v, sinks, is_seen & (distance < window))

        def mix(inputs: jax.Array) -> jax.Array:
            return mix_heads(layer, inputs, cos, sin, seen_kv(inputs), attend)

        # The numbers of its config are arguments of the program: other numbers compile nothing.
        layer = LayerWeights(config=layer_config, kind=kind, params=tensors)
        pairs = int(config.heads(kind.mixer).head_dim * config.rope.partial_rotary) // 2
        frequencies = numbers.frequencies[windowed, :pairs]
        angles = positions[..., None].astype(jnp.float32) * frequencies
        magnitude = numbers.magnitudes[windowed]
        cos = magnitude * jnp.cos(angles)
        sin = magnitude * jnp.sin(angles)
        x, _ = decoder_layer(layer, x, mix, per_layer_input=per_layer_input)
        if not return_activations:
            return x, None, new_source_keys
        if not row_kv:
            heads, size = _head_shape(config)
            row_kv = [jnp.zeros((len(ids), heads, ids.shape[1], size), x.dtype)] * 2
        return x, (x, *(_padded_heads(config, kv) for kv in row_kv)), new_source_keys

    def compute_from_first(
        x: jax.Array,
        kind: LayerKind,
        tensors: Params,
        values: tuple[Any, ...],
        source_keys: Mapping[MixerName, Any],
    ) -> tuple[jax.Array, None, SourceKeys]:
        assert layer_change is not None
        number = values[0]
        first = layer_change[1]
        x = jax.lax.cond(
            number >= first, lambda: compute(x, kind, tensors, values, source_keys)[0], lambda: x
        )
        return x, None, {}

    x = embed(config, params["embed"], ids)
    x = x * jnp.asarray(numbers.embed_scale, x.dtype)
    per_layer = None
    if config.per_layer_inputs is not None:
        per_layer = jnp.moveaxis(per_layer_inputs(layer_config, params, ids, x), 2, 0)

    prefix_kv = None
    if prefix is not None:
        prefix_kv = (prefix.keys, prefix.values)
    values = (
        jnp.arange(config.num_layers),
        numbers.windowed,
        numbers.windows,
        old_kv,
        prefix_kv,
        per_layer,
    )
    # Layers that share keys and values read those of a layer before the change.
    if layer_change is None or config.shared_kv_layers:
        x, outputs = scan_layers(config, compute, x, params["layers"], values)
    else:
        x, outputs = scan_layers(
            config, compute_from_first, layer_change[0], params["layers"], values
        )
    return rms_norm(layer_config, x, params["final_norm"]), outputs


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, visible: jax.Array
) -> jax.Array:
    """Attend, a row at a time.

    Args:
        q: [B, H, T, h], scaled.
        k: [B, K, S, h].
        v: [B, K, S, h].
        sinks: [H], or None.
        visible: bool [B, T, S], which of the S keys a query sees.
    """
    _, heads, count, size = q.shape
    kv_heads = k.shape[1]

    def attend_row(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, visible = row
        queries = q.reshape(kv_heads, heads // kv_heads, count, size)
        scores = jnp.einsum("kgth,ksh->kgts", queries, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores, MASK_VALUE)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("kgts,ksh->kgth", weights.astype(v.dtype), v) / total.astype(v.dtype)
        return mixed.reshape(heads, count, size), (peak + jnp.log(total)).reshape(heads, count)

    output, normalizer = jax.lax.map(attend_row, (q, k, v, visible))
    if sinks is None:
        return output
    with_sinks, _ = add_sinks(output, normalizer, sinks)
    return with_sinks
