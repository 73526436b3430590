"""The engine's forward pass: a prompt chunk of several contexts, or a token for each of many slots.

Shapes: B slots, T chunk tokens, D hidden, H query heads, K key/value heads (as the engine keeps
them), G = H / K, h head size, F feed-forward, V vocabulary, S cache positions. Each weight update
converts the learner's parameters (``models.decoder``) into :class:`EngineParams`: arrays per layer
with q/k/v and gate/up fused, so a step reads each weight once.

Decoding keeps activations feature-major, [D, B], and multiplies as ``W[out, in] @ x[in, B]``: for
few slots this is two to three times faster on CPUs than ``x @ W`` and costs nothing elsewhere.

On a mesh (``jetstream.sharding``) heads, feed-forward units, experts and the vocabulary are
sharded, activations are replicated, and devices all-reduce twice per layer. No split or reshape
below cuts across devices.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.attention import DEVICES
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import DecodeBatch
from jax_agent_rl.jetstream.feed_forward import ENGINE_FEED_FORWARDS
from jax_agent_rl.jetstream.kv_cache import KVCache, write_routed
from jax_agent_rl.jetstream.mixers.delta_net import group_by_key_head
from jax_agent_rl.jetstream.mixers.mixer import ChunkInputs, DecodeInputs, LayerSettings
from jax_agent_rl.jetstream.mixers.table import ENGINE_MIXERS
from jax_agent_rl.models.config import AttentionHeads, DecoderConfig, Params
from jax_agent_rl.models.layer_kinds import LayerKind, MixerName
from jax_agent_rl.models.layers import (
    ACTIVATIONS,
    deepstack_features,
    embed,
    place_features,
    quantized,
    rms_norm,
    softcapped,
)
from jax_agent_rl.models.moe import transpose_matrices
from jax_agent_rl.models.parameters import PARAMETERS, dtype_of
from jax_agent_rl.models.per_layer_inputs import PER_LAYER_PARAMETERS, per_layer_inputs
from jax_agent_rl.models.row_blocks import RowBlocks
from jax_agent_rl.models.sharding import constrain
from jax_agent_rl.models.vision_context import ImageInputs

_MATRICES = {name: parameter for name, parameter in PARAMETERS.items() if parameter.is_matrix}
_FUSED = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "global_q": "global_qkv",
    "global_k": "global_qkv",
    "global_v": "global_qkv",
    "gate": "gate_up",
    "up": "gate_up",
    "wide_gate": "wide_gate_up",
    "wide_up": "wide_gate_up",
    "delta_qkv": "delta_qkvz",
    "delta_z": "delta_qkvz",
    "delta_b": "delta_ba",
    "delta_a": "delta_ba",
    "shared_gate": "shared_gate_up",
    "shared_up": "shared_gate_up",
}
EXPERTS = frozenset(name for name, matrix in _MATRICES.items() if matrix.is_of_experts)
"""Matrices that an engine keeps transposed, [E, in, out]."""
_OF_LATENTS = frozenset({"k_b", "v_b"})  # the parts of kv_b
QUANTIZED = (
    frozenset(_FUSED.get(name, name) for name in _MATRICES) - {"kv_b", "delta_ba"} | _OF_LATENTS
)
"""Matrices that tolerate 8 bits. A router is none of them: its choices are not smooth. Nor is what
projects to a state's decay, whose errors multiply along a context."""


class Kernels(enum.Enum):
    """What computes a decode step besides XLA."""

    NONE = enum.auto()
    """XLA alone, on gathered rows of pages."""
    PALLAS = enum.auto()
    """Attention kernels for TPUs, which read and write pages in place."""
    CPU = enum.auto()
    """``jetstream.cpu``: products and attention, pages in place."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineParams:
    """All weights in the engine's layout.

    Matrices in ``QUANTIZED`` may be ``models.layers.Quantized``.

    Attributes:
        embed: [V, D].
        layers: the learner's arrays of each layer, with ``qkv`` [K, (G+2)h, D] and ``qkv_bias`` [K,
            (G+2)h] in place of q, k, v (queries, keys and values of each key/value head, as far as
            the layer has them), ``k_b`` [H, r, n] and ``v_b`` [H, v, r] in place of kv_b
            (``mixers.latent_attention``), ``gate_up`` [2, F, D] in place of gate, up
            (``shared_gate_up`` and ``wide_gate_up`` in the same way), ``sinks`` [K, G], ``k_norm``
            [K h] if it is over all heads, experts' matrices [E, in, out], as
            ``models.moe.grouped_product`` reads them, and inputs of delta nets as
            ``mixers.delta_net.group_by_key_head`` groups them.
        final_norm: [D].
        head: [V, D]; None if embeddings are tied. Matrices and the head are ``RowBlocks`` while the
            one program of ``jetstream.deterministic`` runs.
        vision: the learner's subtree; None for text models.
        per_layer: ``per_layer_embed`` and the like; None without per-layer inputs.
    """

    embed: jax.Array
    layers: tuple[Params, ...]
    final_norm: jax.Array
    head: Any
    vision: Params | None = None
    per_layer: Params | None = None


def engine_params(
    config: DecoderConfig, params: Params, *, dtype: jnp.dtype, quantize: jnp.dtype | None = None
) -> EngineParams:
    """Convert the learner's parameter tree to the engine's layout; pure, to be jitted.

    Args:
        config: with the engine's ``num_kv_heads``, a multiple of the parameters', which are
            repeated.
        params: the learner's tree.
        dtype: type of all weights that are not quantized.
        quantize: int8 or float8 for the layers' matrices, with a scale per output; None keeps
            ``dtype``.
    """
    layers = []
    for number in range(config.num_layers):
        arrays = {}
        for name, index in stack_indices(config, params["layers"], number).items():
            arrays[name] = params["layers"][name][index]
        kind = config.layer_kind(number)
        layers.append(engine_layer(config, kind, arrays, dtype=dtype, quantize=quantize))

    others = {name: x for name, x in params.items() if name != "layers"}
    return replace(engine_params_without_layers(others, dtype=dtype), layers=tuple(layers))


def stack_indices(config: DecoderConfig, stacked: Params, number: int) -> dict[str, int]:
    """Return which of the learner's stacked arrays a layer has, and its index in each.

    Args:
        stacked: the subtree ``layers``.
        number: of the layer.
    """
    indices = {}
    for name in stacked:
        layers_with_it = config.layers_with(name)
        if number in layers_with_it:
            indices[name] = layers_with_it.index(number)
    return indices


def engine_layer(
    config: DecoderConfig,
    kind: LayerKind,
    arrays: Params,
    *,
    dtype: jnp.dtype,
    quantize: jnp.dtype | None,
) -> Params:
    """Convert one layer's arrays, see :func:`engine_params`."""
    arranged = {}
    for name, x in _fuse(config, kind, arrays).items():
        if quantize is None or name not in QUANTIZED:
            arranged[name] = x.astype(dtype_of(name, dtype))
        else:
            arranged[name] = quantized(x, quantize, axis=-1)
    # In one order in every process, so that they share a compilation cache.
    for name in sorted(EXPERTS & arranged.keys()):
        arranged[name] = transpose_matrices(arranged[name])
    return arranged


def engine_params_without_layers(others: Params, *, dtype: jnp.dtype) -> EngineParams:
    """Convert all but the layers, see :func:`engine_params`."""
    # + 0 makes a new buffer: the learner donates its own to the next optimizer step.
    copies = jax.tree.map(lambda x: x.astype(dtype) + 0, others)
    per_layer = {}
    for name in PER_LAYER_PARAMETERS:
        if name in copies:
            per_layer[name] = copies[name]
    return EngineParams(
        embed=copies["embed"],
        layers=(),
        final_norm=copies["final_norm"],
        head=copies.get("lm_head"),
        vision=copies.get("vision"),
        per_layer=per_layer or None,
    )


def _fuse(config: DecoderConfig, kind: LayerKind, layer: Params) -> Params:
    layer = dict(layer)
    for suffix in ("", "_bias"):
        for prefix in ("", "global_"):
            names = [f"{prefix}{part}{suffix}" for part in "qkv"]
            parts = [layer.pop(name) for name in names if name in layer]
            if parts:
                heads = config.heads(kind.mixer)
                by_head = [_by_kv_head(heads, part) for part in parts]
                layer[f"{prefix}qkv{suffix}"] = jnp.concatenate(by_head, axis=1)

    if "k_norm" in layer and config.qk_norm_over == "heads":
        k_norm = _by_kv_head(config.heads(kind.mixer), layer["k_norm"])
        layer["k_norm"] = k_norm.reshape(-1)

    if "delta_conv" in layer:
        layer = group_by_key_head(config, layer)

    if "sinks" in layer:
        layer["sinks"] = layer["sinks"].reshape(config.num_kv_heads, -1)

    for prefix in ("", "wide_", "shared_"):
        if f"{prefix}gate" in layer:
            matrices = [layer.pop(f"{prefix}gate"), layer.pop(f"{prefix}up")]
            layer[f"{prefix}gate_up"] = jnp.stack(matrices)

    # A head's key and value are two products with its latent, which decoding computes apart.
    if "kv_b" in layer:
        assert config.latent is not None
        kv_b = layer.pop("kv_b").reshape(config.num_heads, -1, config.latent.kv_rank)
        layer["k_b"] = kv_b[:, : config.latent.nope_dim].mT
        layer["v_b"] = kv_b[:, config.latent.nope_dim :]

    return layer


def _by_kv_head(heads: AttentionHeads, x: jax.Array) -> jax.Array:
    """Group [n h, ...] -> [K, m h, ...], with m = n / K heads each.

    Fewer than K key/value heads are repeated.
    """
    count = len(x) // heads.head_dim
    kv_heads = min(count, heads.num_kv_heads)
    grouped = x.reshape(kv_heads, -1, *x.shape[1:])
    return jnp.repeat(grouped, heads.num_kv_heads // kv_heads, axis=0)


def decode_step(
    config: DecoderConfig,
    mesh: Mesh | None,
    kernels: Kernels,
    params: EngineParams,
    cache: KVCache,
    slots: DecodeBatch,
    adapters: AdapterStacks | None = None,
) -> tuple[jax.Array, KVCache]:
    """Feed one token per slot and return the logits of the next.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        mesh: the engine's mesh, if it has more than one device.
        kernels: those that read and write pages in place; without them ``cache`` has a row for each
            slot.
        cache: rows or pages; positions below those of the tokens hold the contexts. States are
            rows, of which those of slots with ``remaining`` ids advance.
        slots: the tokens, their positions and pages, offsets of rotary positions and adapters.
        adapters: the engine's LoRA adapters, if any.

    Returns:
        Logits float32 [V, B], split by id, and the cache with the tokens' keys, values and experts.
    """
    positions = slots.positions
    native = kernels is Kernels.CPU
    pages = None if kernels is Kernels.NONE else slots.pages
    embedded = embed(config, params.embed, slots.tokens)
    per_layer = _per_layer_inputs(config, params, slots.tokens, embedded, mesh)
    x = constrain(embedded.T, mesh)  # [D, B]
    rope_positions = positions if slots.offsets is None else positions + slots.offsets
    prepared = prepare_mixers(config, rope_positions, None)
    layers = []
    routed = []
    adapted = _adapted_layers(params, adapters, slots.adapter, native)
    running = None
    if cache.states:
        running = slots.remaining > 0
    for i, (layer, cached) in enumerate(zip(adapted, cache.entries, strict=True)):
        kind = config.layer_kind(i)
        settings = LayerSettings(
            config=config, mesh=mesh, windowed=config.is_windowed(i), kind=kind
        )
        inputs = DecodeInputs(
            shared=prepared[kind.mixer], positions=positions, pages=pages, running=running
        )
        source = config.keys_source(i)
        if source == i:
            x, cached, chosen = _decode_layer(settings, layer, x, cached, inputs, per_layer[i])
        else:
            x, _, chosen = _decode_layer(settings, layer, x, layers[source], inputs, per_layer[i])
        layers.append(cached)
        if chosen is not None:
            routed.append(chosen)
    cache = cache.with_entries(layers, write_routed(cache, routed, positions, pages))
    return next_logits(config, params, x, mesh, native), cache


def head_of(params: EngineParams) -> Any:
    """Return the output head [V, D], which may be the embedding."""
    return params.embed if params.head is None else params.head


def next_logits(
    config: DecoderConfig,
    params: EngineParams,
    x: jax.Array,
    mesh: Mesh | None,
    native: bool = False,
) -> jax.Array:
    """Return the logits float32 [V, B] of the ids after residual streams [D, B].

    On a mesh they are split by id.
    """
    head = head_of(params)
    if native:
        logits = cpu_kernels.product(config, head, x, params.final_norm)
        return softcapped(logits, config.logit_softcap)
    x = rms_norm(config, x, params.final_norm, axis=0)
    if isinstance(head, RowBlocks):
        logits = head.product(x, dtype=jnp.float32)
    else:
        logits = jnp.einsum("vd,db->vb", head, x, preferred_element_type=jnp.float32)
    # Or XLA might rather gather the head than its product.
    logits = constrain(logits, mesh, DEVICES)
    return softcapped(logits, config.logit_softcap)


def prefill_chunks(
    config: DecoderConfig,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    images: ImageInputs | None = None,
    mesh: Mesh | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
    rope_offsets: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> list[tuple[jax.Array, Any, jax.Array | None]]:
    """Compute what layers remember of a chunk of each of R contexts, given what is before it.

    There are no logits: decoding begins with the last token, so contexts that share a prompt need
    no prefill.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        cache: R rows holding the positions below ``starts``.
        tokens: int32 [R, T], padded at the end; KV of padding is overwritten before it is visible.
        starts: int32 [R], position of ``tokens[:, 0]``.
        images: features and rotary positions [R, T, 3]; None for text models.
        mesh: the engine's mesh, if it has more than one device.
        adapters: the engine's LoRA adapters, if any.
        adapter: int32 [R], the adapter of each context.
        rope_offsets: int32 [R], as in :func:`decode_step`, for chunks after all images.
        lengths: int32 [R], tokens of each chunk without its padding, which only models with
            recurrent layers need.

    Returns:
        Per layer: the residual stream [D, R T] after it, a cache of R rows that hold the chunks
        alone, and the experts chosen, int32 [R T, k], or None.
    """
    rows, count = tokens.shape
    x = embed(config, params.embed, tokens.reshape(-1))
    per_layer = _per_layer_inputs(config, params, tokens.reshape(-1), x, mesh)
    if images is not None:
        x = place_features(x.reshape(rows, count, -1), images).reshape(rows * count, -1)
    x = constrain(x.T, mesh)  # [D, R T]
    first = starts if rope_offsets is None else starts + rope_offsets
    positions = (first[:, None] + jnp.arange(count)).reshape(-1)
    prepared = prepare_mixers(config, positions, images)

    num_deepstack = len(config.vision.deepstack_layers) if config.vision is not None else 0
    layers = []
    adapted = _adapted_layers(params, adapters, adapter)
    for i, (layer, cached) in enumerate(zip(adapted, cache.entries, strict=True)):
        kind = config.layer_kind(i)
        settings = LayerSettings(
            config=config, mesh=mesh, windowed=config.is_windowed(i), kind=kind
        )
        inputs = ChunkInputs(shared=prepared[kind.mixer], starts=starts, lengths=lengths)
        source = config.keys_source(i)
        if source == i:
            x, chunk, chosen = _chunk_layer(settings, layer, x, cached, inputs, per_layer[i])
        else:
            inputs = replace(inputs, source_chunk=layers[source][1])
            x, _, chosen = _chunk_layer(
                settings, layer, x, cache.entries[source], inputs, per_layer[i]
            )
            chunk = cached  # none
        if images is not None and i < num_deepstack:
            features = deepstack_features(images, i, config.hidden_size).astype(x.dtype)
            x = x + constrain(features.reshape(rows * count, -1).T, mesh)
        layers.append((x, chunk, chosen))
    return layers


def _adapted_layers(
    params: EngineParams,
    adapters: AdapterStacks | None,
    adapter: jax.Array | None,
    native: bool = False,
) -> list[AdaptedLayer]:
    """Return all layers; ``adapter`` is int32 [B]."""
    stacks = [{}] * len(params.layers) if adapters is None else adapters
    layers = []
    for arrays, layer_adapters in zip(params.layers, stacks, strict=True):
        layers.append(AdaptedLayer(arrays, layer_adapters, adapter, native))
    return layers


# Separate jitted functions are traced and lowered once for all layers of a kind; XLA inlines them.
_one_for_all_layers = functools.partial(jax.jit, static_argnums=0)


@_one_for_all_layers
def _decode_layer(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: Any,
    inputs: DecodeInputs,
    per_layer_input: jax.Array | None,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Compute a layer for one token of each slot.

    Returns:
        x [D, B] after the layer, its cache with the tokens, and the tokens' experts [B, k].
    """
    mixer = ENGINE_MIXERS[settings.kind.mixer]
    mixed, cached = mixer.decode(settings, layer, x, cached, inputs)
    x, chosen = _finish_layer(settings, layer, x, mixed, per_layer_input)
    return x, cached, chosen


@_one_for_all_layers
def _chunk_layer(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: Any,
    inputs: ChunkInputs,
    per_layer_input: jax.Array | None,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Compute a layer for one chunk of each context.

    Returns:
        x [D, R T] after the layer, the cache of the chunks alone, and their experts [R T, k].
    """
    mixer = ENGINE_MIXERS[settings.kind.mixer]
    mixed, chunk = mixer.chunk(settings, layer, x, cached, inputs)
    x, chosen = _finish_layer(settings, layer, x, mixed, per_layer_input)
    return x, chunk, chosen


def _finish_layer(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    mixed: jax.Array,
    per_layer_input: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Finish a layer from its input [D, B], its mixer's output [D, B] and its own input [p, B].

    Returns:
        [D, B] after the layer, and the chosen experts [B, k].
    """
    config = settings.config
    feed_forward = ENGINE_FEED_FORWARDS[settings.kind.feed_forward]
    if config.has_output_norms:
        mixed = rms_norm(config, mixed, layer.params["post_attention_norm"], axis=0)
    x = x + mixed
    out, chosen = feed_forward(config, settings.mesh, layer, x, config.feed_forward_norm)
    if config.has_output_norms:
        out = rms_norm(config, out, layer.params["post_feedforward_norm"], axis=0)
    x = x + out

    if per_layer_input is not None:
        activation = ACTIVATIONS[config.activation]
        gated = activation(layer.multiply(config, "per_layer_gate", x), per_layer_input)
        out = layer.multiply(config, "per_layer_projection", gated)
        x = x + rms_norm(config, out, layer.params["post_per_layer_norm"], axis=0)
    if config.layer_scale:
        x = x * layer.params["layer_scalar"]
    return x, chosen


def _per_layer_inputs(
    config: DecoderConfig,
    params: EngineParams,
    token_ids: jax.Array,
    embedded: jax.Array,
    mesh: Mesh | None,
) -> list[jax.Array | None]:
    """Return each layer's inputs [p, B] of ids [B] and their embeddings [B, D], or None."""
    if params.per_layer is None:
        return [None] * config.num_layers
    inputs = constrain(per_layer_inputs(config, params.per_layer, token_ids, embedded), mesh)
    return [inputs[:, layer].T for layer in range(config.num_layers)]


def prepare_mixers(
    config: DecoderConfig, positions: jax.Array, images: ImageInputs | None
) -> dict[MixerName, Any]:
    """Return what the layers of each mixer share, from rotary positions int32 [B]."""
    prepared: dict[MixerName, Any] = {}
    for name in config.mixers:
        prepared[name] = ENGINE_MIXERS[name].prepare(config, positions, images)
    return prepared
