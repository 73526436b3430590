"""Decoder-only transformers in Flax NNX: one implementation, configured per family (``models.families``).

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, h head size, F feed-forward, V vocabulary,
L layers. Linear weights are stored as Hugging Face stores them, [out, in], stacked over layers, so that reading and
writing safetensors is a copy, and one compiled layer body serves all layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.models.attention import SAVED
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import (
    attention,
    feed_forward,
    mrope_tables,
    place_features,
    rms_norm,
    rope_tables,
)
from jax_agent_rl.models.mesh import ROWS, constrain
from jax_agent_rl.models.moe import router_load
from jax_agent_rl.models.tree_mask import TreeMask
from jax_agent_rl.models.vision.layout import ImageInputs

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_and_attention": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Decoder(nnx.Module):
    """The model as an NNX module, whose parameters are the tree the functions below take.

    >>> model = Decoder(config, rngs=nnx.Rngs(0))                    # doctest: +SKIP
    >>> logits = model(token_ids)                                    # doctest: +SKIP
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        self.config = config

        def draw(name: str, shape: tuple[int, ...]) -> nnx.Param:
            if name.endswith("norm"):
                return nnx.Param(jnp.full(shape, 1 - config.norm_offset, dtype))
            if name.endswith("bias"):
                return nnx.Param(jnp.zeros(shape, dtype))
            return nnx.Param((jax.random.normal(rngs.params(), shape) * 0.02).astype(dtype))

        def draw_all(shapes: Params) -> nnx.Dict:
            return nnx.Dict({n: draw_all(s) if isinstance(s, dict) else draw(n, s) for n, s in shapes.items()})

        shapes = config.parameter_shapes()
        self.embed = draw("embed", shapes["embed"])
        self.layers = draw_all(shapes["layers"])
        self.final_norm = draw("final_norm", shapes["final_norm"])
        if "lm_head" in shapes:
            self.lm_head = draw("lm_head", shapes["lm_head"])
        if "vision" in shapes:
            self.vision = draw_all(shapes["vision"])

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return causal logits float32 [B, T, V] of int32 [B, T]."""
        params = model_params(self)
        rows, count = token_ids.shape
        positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
        ends = jnp.full((rows, count), count, jnp.int32)
        return logits(params, hidden_states(self.config, params, token_ids, positions, ends))


def model_params(model: Decoder) -> Params:
    """Return the module's parameters as a plain nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_params(config: DecoderConfig, params: Params) -> Decoder:
    """Invert :func:`model_params`: return a module that holds these very arrays."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(model, state)
    return model


def hidden_states(
    config: DecoderConfig,
    params: Params,
    token_ids: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
    *,
    images: ImageInputs | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return :func:`routed_hidden_states` without the load of experts."""
    return routed_hidden_states(
        config, params, token_ids, positions, subtree_end, None, images=images, remat=remat, mesh=mesh
    )[0]


def routed_hidden_states(
    config: DecoderConfig,
    params: Params,
    token_ids: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
    copies: jax.Array | None,
    *,
    images: ImageInputs | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute final hidden states (after the last norm) of packed rows of token trees.

    Args:
        config: the model.
        params: its parameters; linear weights may be :class:`~jax_agent_rl.models.lora.Adapted`.
        token_ids: int32 [B, T], each row a forest of tokens in depth-first order.
        positions: int32 [B, T], depth of each token in its tree.
        subtree_end: int32 [B, T], index one past the last descendant. Token i attends to j iff
            ``j <= i < subtree_end[j]``: its ancestors and itself. A plain causal row has T everywhere.
        copies: int32 [B, T], how often each token counts in the load of the experts; None computes none.
        images: features and rotary positions; None for text alone, whose rotary positions are ``positions``.
        remat: what the backward pass recomputes: ``none``; ``dots``, all but matrix products; ``dots_and_attention``,
            all but them and attention; ``full``, each layer.
        mesh: splits rows, tokens and experts, see ``models.mesh``; None on one device.

    Returns:
        Hidden states [B, T, D], and the sum over layers of ``moe.router_load``, float32 [2, E].
    """
    views = _views(config, positions, subtree_end, images)  # computed once, for all layers

    def forward(layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the feed-forward output [B, T, D] and the load of its experts."""
        load = None
        if copies is not None and config.experts is not None:
            load = router_load(config.experts, layer["router"], x, copies)
        return feed_forward(config, layer, x, mesh), load

    def body(x: jax.Array, scanned: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        layer, view = scanned
        cos, sin, tree_mask = views[0] if len(views) == 1 else jax.tree.map(lambda *x: jnp.stack(x)[view], *views)
        mixed = attention(config, layer, rms_norm(config, x, layer["input_norm"]), cos, sin, tree_mask, mesh)
        if not config.sandwich_norms:
            x = x + mixed
            out, load = forward(layer, rms_norm(config, x, layer["post_attention_norm"]))
            return x + out, load
        x = x + rms_norm(config, mixed, layer["post_attention_norm"])
        out, load = forward(layer, rms_norm(config, x, layer["pre_feedforward_norm"]))
        return x + rms_norm(config, out, layer["post_feedforward_norm"]), load

    if remat != "none":
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat])
    which = jnp.array([config.is_windowed(i) for i in range(config.num_layers)], jnp.int32)
    x = embed(config, params, token_ids)
    x = constrain(x if images is None else place_features(x, images), mesh, ROWS, "context", None)
    x, loads = jax.lax.scan(body, x, (params["layers"], which))
    return rms_norm(config, x, params["final_norm"]), None if loads is None else jnp.sum(loads, axis=0)


def embed(config: DecoderConfig, params: Params, token_ids: jax.Array) -> jax.Array:
    """Return embeddings [.., D] of int32 ids [..]."""
    x = params["embed"][token_ids]
    return x * jnp.asarray(config.embed_scale, x.dtype) if config.embed_scale != 1.0 else x


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Return logits float32 [..., V] of hidden states [..., D]."""
    head = params.get("lm_head", params["embed"])
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def _views(
    config: DecoderConfig, positions: jax.Array, subtree_end: jax.Array, images: ImageInputs | None
) -> list[tuple[jax.Array, jax.Array, TreeMask]]:
    """Return rotary tables [B, T, h/2] and mask of full layers and, if there are any, of windowed ones."""
    if images is None:
        full = rope_tables(config.rope, config.head_dim, positions)
    else:
        full = mrope_tables(config.rope, config.head_dim, images.rope_positions)
    if config.sliding_window is None or config.local_rope is None:
        return [(*full, TreeMask(subtree_end))]
    local = rope_tables(config.local_rope, config.head_dim, positions)
    everything = jnp.int32(positions.shape[1])  # no two positions of a row are that far apart
    return [
        (*full, TreeMask(subtree_end, positions, everything)),
        (*local, TreeMask(subtree_end, positions, jnp.int32(config.sliding_window))),
    ]
