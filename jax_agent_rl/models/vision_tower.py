"""The vision tower of Qwen2.5-VL and Qwen3-VL: image patches to features among a decoder's embeddings.

Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923, section 2.1.1): most layers attend within windows,
whose patches lie side by side (``models.vision_context.layout``), some within a whole image or
group of frames. Qwen3-VL (Bai et al. 2025, arXiv 2511.21631, section 2): all layers do the latter,
patches have learned positions, and features of inner layers go to the decoder's first layers.

Shapes: B sets of images, P patches, N features, U = P / N patches of a feature, D hidden, H heads,
h head size, S patches of the largest window.
"""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.models.attention import BLOCK
from jax_agent_rl.models.config import Rope, VisionConfig
from jax_agent_rl.models.layers import (
    REMAT_POLICIES,
    Module,
    layer_norm,
    linear,
    rms_norm,
    rope_tables,
    rotate,
    rows_at,
    stack,
)
from jax_agent_rl.models.sharding import ROWS, constrain
from jax_agent_rl.models.tree_kernel import MASK_VALUE
from jax_agent_rl.models.vision_context import Layout

_NOWHERE = -2  # a window without patches or padding
_HALVES = Rope()  # frequencies, and how numbers of a head are paired


class VisionLayer(Module):
    """Attention and a feed-forward network; its parameters are ``config.layer_shapes()``."""

    config: VisionConfig

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.layer_shapes(), rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        layout: Layout,
        full: jax.Array,
        mesh: Mesh | None,
    ) -> jax.Array:
        """Apply the layer to [B, P, D].

        Args:
            x: patches in order of their windows.
            cos: float32 [B, P, h/2], as ``sin``.
            sin: of the rotary angles.
            layout: of the patches.
            full: bool [], attends within frames instead of windows.
            mesh: what the leading axis is split over.
        """
        x = x + self._attention(_norm(self, "input_norm", x), cos, sin, layout, full, mesh)
        inputs = _norm(self, "post_attention_norm", x)
        hidden = self.linear("up", inputs, mesh)
        if self.config.gated:
            hidden = jax.nn.silu(self.linear("gate", inputs, mesh)) * hidden
        else:
            hidden = jax.nn.gelu(hidden, approximate=True)
        return x + self.linear("down", hidden, mesh)

    def _attention(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        layout: Layout,
        full: jax.Array,
        mesh: Mesh | None,
    ) -> jax.Array:
        config = self.config
        qkv = self.linear("qkv", x, mesh).reshape(
            *x.shape[:2], 3, config.num_heads, config.head_dim
        )
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # [B, H, P, h] each
        q, k = (rotate(_HALVES, x, cos[:, None], sin[:, None]) for x in (q, k))
        q = q * config.head_dim**-0.5
        if config.window_size is None:
            mixed = _attend_to_frames(q, k, v, layout.frames)
        else:
            mixed = jax.lax.cond(
                full,
                lambda: _attend_to_frames(q, k, v, layout.frames),
                lambda: _attend_to_windows(q, k, v, layout.windows, config.window_patches),
            )
        return self.linear("o", mixed.transpose(0, 2, 1, 3).reshape(x.shape), mesh)


class VisionTower(Module):
    """The tower; its parameters are ``config.parameter_shapes()``."""

    config: VisionConfig
    patch_embed: nnx.Param
    patch_embed_bias: nnx.Param
    positions: nnx.Param

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.parameter_shapes(), rngs=rngs)
        self.layers: VisionLayer = stack(VisionLayer, config, rngs=rngs)

    def __call__(
        self, patches: jax.Array, layout: Layout, *, remat: str = "none", mesh: Mesh | None = None
    ) -> jax.Array:
        """Encode patches as features that replace the embeddings of placeholders.

        Args:
            patches: float [.., P, patch_dim], as transformers' image processor gives them, padded
                at the end.
            layout: of the same images; its arrays have the same leading axes.
            remat: what the backward pass recomputes, see ``models.decoder``.
            mesh: what the leading axis is split over, see ``models.sharding``; None on one device.

        Returns:
            [.., N, feature_size] in order of the patches; those of padding are undefined.
        """
        config, leading = self.config, patches.shape[:-2]
        patches = patches.reshape(-1, *patches.shape[-2:])
        layout = Layout(
            *(jnp.asarray(x).reshape(len(patches), *x.shape[len(leading) :]) for x in layout)
        )
        # Half of the angles for rows, half for columns, float32 [B, P, h/2].
        tables = rope_tables(_HALVES, config.head_dim // 2, layout.places)
        cos, sin = (x.reshape(*x.shape[:-2], -1) for x in tables)
        graphdef, state = nnx.split(self.layers)

        def body(x: jax.Array, scanned: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, None]:
            state, full = scanned
            return nnx.merge(graphdef, state)(x, cos, sin, layout, full, mesh), None

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[remat])
        full = jnp.array([i in config.full_attention_layers for i in range(config.num_layers)])
        x = constrain(self._embed(patches, layout, mesh), mesh, ROWS, None, None)
        features, begin = [], 0
        for number, layer in enumerate(config.deepstack_layers):
            layers = slice(begin, layer + 1)
            x, _ = jax.lax.scan(body, x, jax.tree.map(operator.itemgetter(layers), (state, full)))
            features.append(self._deepstack(x, number, mesh))
            begin = layer + 1
        x, _ = jax.lax.scan(
            body, x, jax.tree.map(lambda x: x[begin:], (state, full)) if begin else (state, full)
        )
        features = jnp.concatenate([self._merge(x, mesh), *features], axis=-1)
        return rows_at(features, layout.restore).reshape(*leading, -1, config.feature_size)

    def _embed(self, patches: jax.Array, layout: Layout, mesh: Mesh | None) -> jax.Array:
        """Embed patches [B, P, patch_dim] as [B, P, D], ordered by window."""
        weight = self.patch_embed[
            ...
        ]  # [D, channels, frames, rows, columns], a product with whole patches
        x = linear(patches.astype(weight.dtype), weight.reshape(weight.shape[0], -1), mesh)
        x = rows_at(self._squares(x), layout.order).reshape(x.shape)
        if self.config.patch_bias:
            x = x + self.patch_embed_bias[...]
        return (
            x if self.config.position_grid is None else x + self._positions(layout).astype(x.dtype)
        )

    def _positions(self, layout: Layout) -> jax.Array:
        """Interpolate the learned positions, whose corners are those of each image, [B, P, D]."""
        side = self.config.position_grid
        assert side is not None
        at = layout.places * ((side - 1) / jnp.maximum(layout.sizes - 1, 1))  # float32 [B, P, 2]
        low = jnp.floor(at).astype(jnp.int32)
        high = jnp.minimum(low + 1, side - 1)
        share = at - low
        table, mixed = self.positions[...], 0.0
        for row, row_share in ((low, 1 - share), (high, share)):
            for column, column_share in ((low, 1 - share), (high, share)):
                found = table[row[..., 0] * side + column[..., 1]]
                mixed = mixed + found * (row_share[..., 0] * column_share[..., 1])[..., None]
        return jnp.asarray(mixed)

    def _squares(self, x: jax.Array) -> jax.Array:
        """Join the patches of a square, [B, P, D] -> [B, N, U D]."""
        return x.reshape(x.shape[0], -1, self.config.merge_size**2 * self.config.hidden_size)

    def _merge(self, x: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Merge the patches of a square into one feature, [B, P, D] -> [B, N, out_size]."""
        x = self._squares(_norm(self, "merger_norm", x))
        return self.linear(
            "merger_out", jax.nn.gelu(self.linear("merger_in", x, mesh), approximate=False), mesh
        )

    def _deepstack(self, x: jax.Array, number: int, mesh: Mesh | None) -> jax.Array:
        """Merge the patches of a square as they are after an inner layer, [B, P, D] -> [B, N, out_size]."""
        own = {name: getattr(self, f"deepstack_{name}")[number] for name in _DEEPSTACK}
        x = layer_norm(
            self._squares(x), own["norm"], own["norm_bias"], eps=self.config.rms_norm_eps
        )
        x = jax.nn.gelu(linear(x, own["in"], mesh) + own["in_bias"], approximate=False)
        return linear(x, own["out"], mesh) + own["out_bias"]


_DEEPSTACK = ("norm", "norm_bias", "in", "in_bias", "out", "out_bias")


def _norm(module: VisionLayer | VisionTower, name: str, x: jax.Array) -> jax.Array:
    """Apply a norm over the last axis."""
    weight = getattr(module, name)[...]
    if not module.config.layer_norm:
        return rms_norm(module.config, x, weight)
    return layer_norm(
        x, weight, getattr(module, f"{name}_bias")[...], eps=module.config.rms_norm_eps
    )


def _attend_to_frames(q: jax.Array, k: jax.Array, v: jax.Array, frames: jax.Array) -> jax.Array:
    """Attend within frames, a block of queries at a time; the backward pass recomputes scores."""
    block = math.gcd(BLOCK, q.shape[2])

    def attend(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(q, start, block, axis=2)
        mine = jax.lax.dynamic_slice_in_dim(frames, start, block, axis=1)
        return _softmax_attention(queries, k, v, (mine[:, :, None] == frames[:, None])[:, None])

    blocks = jax.lax.map(
        jax.checkpoint(attend), jnp.arange(0, q.shape[2], block)
    )  # [P / block, B, H, block, h]
    return blocks.transpose(1, 2, 0, 3, 4).reshape(q.shape)


def _attend_to_windows(
    q: jax.Array, k: jax.Array, v: jax.Array, windows: jax.Array, size: int
) -> jax.Array:
    """Attend within windows, which lie in a patch's block of ``size`` patches and the two neighbours."""
    rows, heads, count, head_dim = q.shape

    def blocks(x: jax.Array) -> jax.Array:
        """Reshape [B, H, P, h] -> [B, H, P / S, S, h]."""
        return x.reshape(rows, heads, count // size, size, head_dim)

    def beside(x: jax.Array, axis: int, edge: int = 0) -> jax.Array:
        """Join each block of ``axis`` with its neighbours, [.., P / S, 3 S, ..]; ``edge`` pads the ends."""
        widths = [(size, size) if i == axis else (0, 0) for i in range(x.ndim)]
        padded = jnp.pad(x, widths, constant_values=edge)
        parts = [
            jax.lax.slice_in_dim(padded, i * size, i * size + count, axis=axis) for i in range(3)
        ]
        shape = (*x.shape[:axis], count // size, size, *x.shape[axis + 1 :])
        return jnp.concatenate([part.reshape(shape) for part in parts], axis=axis + 1)

    mine = windows.reshape(rows, count // size, size)
    visible = mine[..., None] == beside(windows, 1, _NOWHERE)[:, :, None]  # [B, P / S, S, 3 S]
    return _softmax_attention(blocks(q), beside(k, 2), beside(v, 2), visible[:, None]).reshape(
        q.shape
    )


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attend over the second last axis of keys and values, scores and softmax in float32."""
    scores = jnp.einsum("...qh,...kh->...qk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible, scores, MASK_VALUE), axis=-1)
    return jnp.einsum("...qk,...kh->...qh", weights.astype(v.dtype), v)
