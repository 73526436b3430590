"""The vision towers of Qwen-VL and Qwen3.5: from image patches to features for the decoder.

In Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923, section 2.1.1) most layers attend within windows,
whose patches lie side by side (``models.vision_context.layout``), and some within a whole image or
group of frames. In Qwen3-VL (Bai et al. 2025, arXiv 2511.21631, section 2) all layers do the
latter, patches have learned positions, and features of inner layers go to the decoder's first
layers. Qwen3.5 has the same tower without these features.

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
from jax_agent_rl.models.vision_context import PatchLayout

_NO_WINDOW = -2  # number of a window that no patch, and no padding, is in
_ROPE = Rope()  # frequencies, and how numbers of a head are paired: one of each half


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
        layout: PatchLayout,
        full: jax.Array,
        mesh: Mesh | None,
    ) -> jax.Array:
        """Apply the layer to [B, P, D].

        Args:
            x: patches in order of their windows.
            cos: float32 [B, P, h/2] of the rotary angles; ``sin`` as well.
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
        layout: PatchLayout,
        full: jax.Array,
        mesh: Mesh | None,
    ) -> jax.Array:
        config = self.config
        qkv = self.linear("qkv", x, mesh)
        qkv = qkv.reshape(*x.shape[:2], 3, config.num_heads, config.head_dim)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # [B, H, P, h] each
        q = rotate(_ROPE, q, cos[:, None], sin[:, None])
        k = rotate(_ROPE, k, cos[:, None], sin[:, None])
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
        self,
        patches: jax.Array,
        layout: PatchLayout,
        *,
        remat: str = "none",
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """Encode patches as features that replace the embeddings of placeholders.

        Args:
            patches: float [.., P, patch_dim], as transformers' image processor gives them, padded
                at the end.
            layout: of the same images; its arrays have the same leading axes.
            remat: what the backward pass recomputes, see :meth:`Decoder.__call__`.
            mesh: what the leading axis is split over, see ``models.sharding``; None on one device.

        Returns:
            [.., N, feature_size] in order of the patches; undefined for padding.
        """
        config = self.config
        leading_axes = patches.shape[:-2]
        patches = patches.reshape(-1, *patches.shape[-2:])
        rows = len(patches)
        layout = jax.tree.map(
            lambda x: jnp.asarray(x).reshape(rows, *x.shape[len(leading_axes) :]), layout
        )

        # Half of the angles for rows, half for columns, float32 [B, P, h/2].
        cos, sin = rope_tables(_ROPE, config.head_dim // 2, layout.coordinates)
        cos = cos.reshape(*cos.shape[:-2], -1)
        sin = sin.reshape(*sin.shape[:-2], -1)
        graphdef, state = nnx.split(self.layers)

        def body(x: jax.Array, scanned: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, None]:
            state, full = scanned
            return nnx.merge(graphdef, state)(x, cos, sin, layout, full, mesh), None

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[remat])
        full = jnp.array([i in config.full_attention_layers for i in range(config.num_layers)])
        x = constrain(self._embed(patches, layout, mesh), mesh, ROWS, None, None)

        # Layers in groups, each up to the next layer after which features are taken.
        deepstack = []
        begin = 0
        for number, layer in enumerate(config.deepstack_layers):
            group = slice(begin, layer + 1)
            layers = jax.tree.map(operator.itemgetter(group), (state, full))
            x, _ = jax.lax.scan(body, x, layers)
            deepstack.append(self._deepstack(x, number, mesh))
            begin = layer + 1
        layers = (state, full)
        if begin > 0:
            layers = jax.tree.map(operator.itemgetter(slice(begin, None)), layers)
        x, _ = jax.lax.scan(body, x, layers)

        features = jnp.concatenate([self._merge(x, mesh), *deepstack], axis=-1)
        features = rows_at(features, layout.restore)
        return features.reshape(*leading_axes, -1, config.feature_size)

    def _embed(self, patches: jax.Array, layout: PatchLayout, mesh: Mesh | None) -> jax.Array:
        """Embed patches [B, P, patch_dim] as [B, P, D], ordered by window."""
        weight = self.patch_embed[...]  # [D, channels, frames, rows, columns]
        # A convolution in the published code; its kernel covers a whole patch.
        x = linear(patches.astype(weight.dtype), weight.reshape(weight.shape[0], -1), mesh)
        x = rows_at(self._join_squares(x), layout.order).reshape(x.shape)
        if self.config.patch_bias:
            x = x + self.patch_embed_bias[...]
        if self.config.position_grid is not None:
            x = x + self._interpolate_positions(layout).astype(x.dtype)
        return x

    def _interpolate_positions(self, layout: PatchLayout) -> jax.Array:
        """Interpolate the learned positions, [B, P, D].

        The corners of their square grid are the corners of each image.
        """
        side = self.config.position_grid
        assert side is not None
        scale = (side - 1) / jnp.maximum(layout.sizes - 1, 1)
        grid_coordinates = layout.coordinates * scale  # float32 [B, P, 2]
        low = jnp.floor(grid_coordinates).astype(jnp.int32)
        high = jnp.minimum(low + 1, side - 1)
        share = grid_coordinates - low

        # Bilinear: the four positions around a patch, weighted by how near they are.
        table = self.positions[...]
        mixed = 0.0
        for row, row_share in ((low, 1 - share), (high, share)):
            for column, column_share in ((low, 1 - share), (high, share)):
                position = table[row[..., 0] * side + column[..., 1]]
                weight = row_share[..., 0] * column_share[..., 1]
                mixed = mixed + position * weight[..., None]
        return jnp.asarray(mixed)

    def _join_squares(self, x: jax.Array) -> jax.Array:
        """Join the patches of a square, [B, P, D] -> [B, N, U D]."""
        return x.reshape(x.shape[0], -1, self.config.merge_size**2 * self.config.hidden_size)

    def _merge(self, x: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Merge the patches of a square into one feature, [B, P, D] -> [B, N, out_size]."""
        x = self._join_squares(_norm(self, "merger_norm", x))
        hidden = jax.nn.gelu(self.linear("merger_in", x, mesh), approximate=False)
        return self.linear("merger_out", hidden, mesh)

    def _deepstack(self, x: jax.Array, number: int, mesh: Mesh | None) -> jax.Array:
        """Merge the patches of a square after an inner layer, [B, P, D] -> [B, N, out_size].

        Args:
            number: of the merger, from 0; each of ``config.deepstack_layers`` has one.
        """
        merger = {name: getattr(self, f"deepstack_{name}")[number] for name in _MERGER_PARTS}
        x = self._join_squares(x)
        x = layer_norm(x, merger["norm"], merger["norm_bias"], eps=self.config.rms_norm_eps)
        x = jax.nn.gelu(linear(x, merger["in"], mesh) + merger["in_bias"], approximate=False)
        return linear(x, merger["out"], mesh) + merger["out_bias"]


_MERGER_PARTS = ("norm", "norm_bias", "in", "in_bias", "out", "out_bias")


def _norm(module: VisionLayer | VisionTower, name: str, x: jax.Array) -> jax.Array:
    """Apply a norm over the last axis."""
    weight = getattr(module, name)[...]
    if not module.config.layer_norm:
        return rms_norm(module.config, x, weight)
    bias = getattr(module, f"{name}_bias")[...]
    return layer_norm(x, weight, bias, eps=module.config.rms_norm_eps)


def _attend_to_frames(q: jax.Array, k: jax.Array, v: jax.Array, frames: jax.Array) -> jax.Array:
    """Attend within frames, a block of queries at a time; the backward pass recomputes scores."""
    block = math.gcd(BLOCK, q.shape[2])

    def attend(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(q, start, block, axis=2)
        query_frames = jax.lax.dynamic_slice_in_dim(frames, start, block, axis=1)
        visible = query_frames[:, :, None] == frames[:, None]
        return _softmax_attention(queries, k, v, visible[:, None])

    starts = jnp.arange(0, q.shape[2], block)
    blocks = jax.lax.map(jax.checkpoint(attend), starts)  # [P / block, B, H, block, h]
    return blocks.transpose(1, 2, 0, 3, 4).reshape(q.shape)


def _attend_to_windows(
    q: jax.Array, k: jax.Array, v: jax.Array, windows: jax.Array, size: int
) -> jax.Array:
    """Attend within windows.

    The window of a patch lies in its block of ``size`` patches and the two neighbouring blocks.
    """
    rows, heads, count, head_dim = q.shape
    block_count = count // size

    def with_neighbours(x: jax.Array, axis: int, edge: int = 0) -> jax.Array:
        """Join each block of ``axis`` with its neighbours, [.., P / S, 3 S, ..].

        ``edge`` stands in for the neighbours that the first and the last block lack.
        """
        widths = [(0, 0)] * x.ndim
        widths[axis] = (size, size)
        padded = jnp.pad(x, widths, constant_values=edge)
        shifted = []
        for shift in (0, size, 2 * size):
            shifted.append(jax.lax.slice_in_dim(padded, shift, shift + count, axis=axis))
        shape = (*x.shape[:axis], block_count, size, *x.shape[axis + 1 :])
        return jnp.concatenate([part.reshape(shape) for part in shifted], axis=axis + 1)

    query_windows = windows.reshape(rows, block_count, size)[..., None]
    key_windows = with_neighbours(windows, 1, _NO_WINDOW)[:, :, None]
    visible = query_windows == key_windows  # [B, P / S, S, 3 S]
    queries = q.reshape(rows, heads, block_count, size, head_dim)
    keys = with_neighbours(k, 2)
    values = with_neighbours(v, 2)
    return _softmax_attention(queries, keys, values, visible[:, None]).reshape(q.shape)


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attend over the second last axis of keys and values, scores and softmax in float32."""
    scores = jnp.einsum("...qh,...kh->...qk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("...qk,...kh->...qh", weights.astype(v.dtype), v)
