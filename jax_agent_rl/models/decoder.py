"""Decoder-only transformers in Flax NNX.

There is one implementation, configured per family (``models.families``).

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, h head size, F feed-forward, V
vocabulary, L layers. Linear weights are stored as Hugging Face stores them, [out, in], stacked over
layers, so that reading and writing safetensors is a copy, and one compiled layer body serves all
layers.

A transfer of parameters is verified by log-probs of a few sequences (:func:`score_probe`,
:func:`verify_probe`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models import moe
from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import (
    ACTIVATIONS,
    REMAT_POLICIES,
    Module,
    deepstack_features,
    embed,
    mrope_tables,
    place_features,
    rms_norm,
    rope_tables,
    rotate,
    softcapped,
    stack,
)
from jax_agent_rl.models.lora import LoRA
from jax_agent_rl.models.sharding import ROWS, constrain
from jax_agent_rl.models.tree_kernel import TreeMask
from jax_agent_rl.models.vision_context import ImageInputs
from jax_agent_rl.models.vision_tower import VisionTower
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, LogprobProbe, rounded

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""From queries [B, H, T, h], keys and values [B, K, T, h] and sinks [H] to their mixture [B, H, T,
h]."""


class DecoderLayer(Module):
    """Attention, then a gated network or a mixture of experts, each with its norms and residual.

    Its parameters are ``config.layer_shapes()``.
    """

    config: DecoderConfig
    q_norm: nnx.Param
    k_norm: nnx.Param
    sinks: nnx.Param
    input_norm: nnx.Param
    post_attention_norm: nnx.Param
    pre_feedforward_norm: nnx.Param
    post_feedforward_norm: nnx.Param

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.layer_shapes(), rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        *,
        adapters: Mapping[str, LoRA] | None = None,
        copies: jax.Array | None = None,
        routed: jax.Array | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layer.

        Args:
            x: [B, T, D].
            cos: [B, T, r/2] if r of a head's numbers rotate, as ``sin``.
            sin: of the rotary angles.
            attend: mixes values; queries are scaled.
            adapters: of this layer, by name of the matrix.
            copies: int32 [B, T], how often each token counts in the load of the experts; None
                computes none.
            routed: [B, T, k], experts to take (``moe.route``); None chooses all.
            mesh: splits rows, tokens and experts; None on one device.

        Returns:
            [B, T, D], and ``moe.router_load`` float32 [2, E], or None.
        """
        config = self.config
        layer_adapters = adapters or {}

        def linear(name: str, x: jax.Array) -> jax.Array:
            return self.linear(name, x, mesh, layer_adapters.get(name))

        inputs = rms_norm(config, x, self.input_norm[...])
        mixed = self._attention(inputs, cos, sin, attend, linear)
        if config.sandwich_norms:
            x = x + rms_norm(config, mixed, self.post_attention_norm[...])
            inputs = rms_norm(config, x, self.pre_feedforward_norm[...])
        else:
            x = x + mixed
            inputs = rms_norm(config, x, self.post_attention_norm[...])

        load = None
        if copies is not None and config.experts is not None:
            load = moe.router_load(config.experts, self._experts(), inputs, copies, routed)

        out = self._feed_forward(inputs, linear, mesh, routed)
        if config.sandwich_norms:
            out = rms_norm(config, out, self.post_feedforward_norm[...])
        return x + out, load

    def _attention(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        linear: Callable[..., jax.Array],
    ) -> jax.Array:
        config = self.config
        rows, count, _ = x.shape
        cos = cos[:, None]
        sin = sin[:, None]

        def project_heads(name: str) -> jax.Array:
            """Project [B, T, D] -> [B, heads, T, h]."""
            heads = linear(name, x).reshape(rows, count, -1, config.head_dim)
            return heads.transpose(0, 2, 1, 3)

        q = project_heads("q")
        k = project_heads("k")
        if config.qk_norm:
            q = rms_norm(config, q, self.q_norm[...])
            k = rms_norm(config, k, self.k_norm[...])
        q = rotate(config.rope, q, cos, sin) * config.score_scale
        sinks = self.sinks[...] if config.attention_sinks else None
        k = rotate(config.rope, k, cos, sin)
        v = project_heads("v")

        mixed = attend(q, k, v, sinks)
        return linear("o", mixed.transpose(0, 2, 1, 3).reshape(rows, count, -1))

    def _feed_forward(
        self,
        x: jax.Array,
        linear: Callable[..., jax.Array],
        mesh: Mesh | None,
        routed: jax.Array | None,
    ) -> jax.Array:
        experts = self.config.experts
        activation = ACTIVATIONS[self.config.activation]
        if experts is None:
            return linear("down", activation(linear("gate", x), linear("up", x)))
        if mesh is not None:
            return moe.sharded_mixture_of_experts(
                experts, self._experts(), x, activation, mesh, routed
            )

        tokens = x.reshape(-1, x.shape[-1])
        if routed is not None:
            routed = routed.reshape(-1, experts.per_token)
        out, _ = moe.mixture_of_experts(experts, self._experts(), tokens, activation, routed)
        return out.reshape(x.shape)

    def _experts(self) -> Params:
        """Return the parameters of router and experts."""
        shapes = self.config.layer_shapes()
        return {name: getattr(self, name)[...] for name in moe.WEIGHTS if name in shapes}


class Decoder(Module):
    """A decoder-only transformer.

    The pure tree of its parameters is ``config.parameter_shapes()``, as files and engines know it.

    >>> model = Decoder(config, rngs=nnx.Rngs(0))                    # doctest: +SKIP
    >>> logits = model.logits(model(token_ids)[0])                   # doctest: +SKIP

    Attributes:
        adapters: LoRA adapters by name of the matrix of ``layers``, stacked as the layers are; none
            at first.
    """

    config: DecoderConfig
    embed: nnx.Param
    final_norm: nnx.Param

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.parameter_shapes(), rngs=rngs)
        self.layers: DecoderLayer = stack(DecoderLayer, config, rngs=rngs)
        if config.vision is not None:
            self.vision = VisionTower(config.vision, rngs=rngs)
        self.adapters = nnx.Dict({})

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array | None = None,
        subtree_end: jax.Array | None = None,
        *,
        copies: jax.Array | None = None,
        routed_experts: jax.Array | None = None,
        images: ImageInputs | None = None,
        remat: str = "none",
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Compute final hidden states (after the last norm) of packed rows of token trees.

        Args:
            token_ids: int32 [B, T], each row a forest of tokens in depth-first order.
            positions: int32 [B, T], depth of each token in its tree; None: 0 to T - 1.
            subtree_end: int32 [B, T], index one past the last descendant. Token i attends to j iff
                ``j <= i < subtree_end[j]``: its ancestors and itself. None: T everywhere, plain
                causal rows.
            copies: int32 [B, T], how often each token counts in the load of the experts; None
                computes none.
            routed_experts: [B, T, L, k], experts to take; a token of -1 chooses its own, as all do
                with None.
            images: features and rotary positions; None for text alone, whose rotary positions are
                ``positions``.
            remat: what the backward pass recomputes: ``none``; ``dots``, all but matrix products
                and attention; ``dots_and_attention``, all but them and what attention is given;
                ``full``, each layer.
            mesh: splits rows, tokens and experts, see ``models.sharding``; None on one device.

        Returns:
            Hidden states [B, T, D], and the sum over layers of ``moe.router_load``, float32 [2, E],
            or None.
        """
        config = self.config
        count = token_ids.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(count), token_ids.shape)
        if subtree_end is None:
            subtree_end = jnp.full(token_ids.shape, count, jnp.int32)

        # Computed once, for all layers.
        contexts = _attention_contexts(config, positions, subtree_end, images)
        deepstack_count = 0
        if config.vision is not None:
            deepstack_count = len(config.vision.deepstack_layers)
        graphdef, state = nnx.split((self.layers, self.adapters))

        def body(x: jax.Array, scanned: tuple[Any, ...]) -> tuple[jax.Array, jax.Array | None]:
            state, kind, number, routed = scanned
            layer, adapters = nnx.merge(graphdef, state)
            if len(contexts) == 1:
                context = contexts[0]
            else:
                context = jax.tree.map(lambda *x: jnp.stack(x)[kind], *contexts)
            cos, sin, tree_mask = context

            def attend(
                q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None
            ) -> jax.Array:
                return sharded_tree_attention(q, k, v, tree_mask, mesh, sinks)

            x, load = layer(
                x, cos, sin, attend, adapters=adapters, copies=copies, routed=routed, mesh=mesh
            )
            if deepstack_count and images is not None:
                layer_features = functools.partial(
                    deepstack_features, images, size=config.hidden_size
                )

                def add_features() -> jax.Array:
                    return x + layer_features(number).astype(x.dtype)

                x = jax.lax.cond(number < deepstack_count, add_features, lambda: x)
            return x, load

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[remat])

        kinds = []  # of attention, by layer
        for layer in range(config.num_layers):
            kinds.append(config.attention_kinds.index(config.is_windowed(layer)))
        x = embed(config, self.embed[...], token_ids)
        if images is not None:
            x = place_features(x, images)
        x = constrain(x, mesh, ROWS, "context", None)
        routed = None
        if routed_experts is not None:
            routed = jnp.moveaxis(routed_experts, 2, 0)

        scanned = (state, jnp.array(kinds, jnp.int32), jnp.arange(config.num_layers), routed)
        x, loads = jax.lax.scan(body, x, scanned)
        hidden = rms_norm(config, x, self.final_norm[...])
        if loads is None:
            return hidden, None
        return hidden, jnp.sum(loads, axis=0)

    @property
    def head(self) -> jax.Array:
        """The output head [V, D], which may be the embedding."""
        return getattr(self, "lm_head", self.embed)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits float32 [..., V] of hidden states [..., D]."""
        logits = jnp.einsum("...d,vd->...v", hidden, self.head, preferred_element_type=jnp.float32)
        return softcapped(logits, self.config.logit_softcap)


def _attention_contexts(
    config: DecoderConfig, positions: jax.Array, subtree_end: jax.Array, images: ImageInputs | None
) -> list[tuple[jax.Array, jax.Array, TreeMask]]:
    """Return rotary tables [B, T, r/2] and the mask of each of ``config.attention_kinds``."""
    if images is not None:
        cos, sin = mrope_tables(config.rope, config.head_dim, images.rope_positions)
        return [(cos, sin, TreeMask(subtree_end))]

    contexts = []
    for windowed in config.attention_kinds:
        rope = config.rope
        if windowed and config.local_rope is not None:
            rope = config.local_rope

        if config.attention_kinds == (False,):
            mask = TreeMask(subtree_end)
        else:
            # The masks of both kinds are stacked, so a layer without a window gets one of the
            # row's length: no two positions are that far apart.
            window = config.sliding_window if windowed else positions.shape[1]
            mask = TreeMask(subtree_end, positions, jnp.int32(window))

        cos, sin = rope_tables(rope, config.head_dim, positions)
        contexts.append((cos, sin, mask))
    return contexts


# Allowed differences of log-probs: both sides compute in float32, perhaps on different devices and
# in a different order.
_MAX_DIFFERENCE = 1e-2
_MAX_MEAN_DIFFERENCE = 1e-3


def score_probe(
    config: DecoderConfig,
    params: Params,
    sequences: Sequence[Sequence[int]],
    *,
    dtype: str = AS_THEY_ARE,
) -> LogprobProbe:
    """Return sequences of token ids with their log-probs.

    Args:
        sequences: at least two ids each.
        dtype: what the parameters are rounded to first, as in the transfer. The model computes in
            float32.
    """
    params = jax.tree.map(lambda x: rounded(x, dtype), params)
    log_probs = []
    for ids in sequences:
        logprobs_T = _logprobs(config, params, jnp.asarray(ids, jnp.int32))
        log_probs.append(tuple(np.asarray(logprobs_T).tolist()))
    return LogprobProbe(ids=tuple(map(tuple, sequences)), log_probs=tuple(log_probs))


def verify_probe(config: DecoderConfig, params: Params, probe: LogprobProbe) -> None:
    """Check that parameters give the log-probs that their sender computed.

    Args:
        params: as they arrived.
        probe: log-probs of the sender.

    Raises:
        WeightUpdateError: they differ by more than the order of sums.
    """
    received = score_probe(config, params, probe.ids)
    largest, mean = probe.differences(received.log_probs)
    # Not `largest > …`: a comparison with NaN must fail, too.
    is_equal = largest <= _MAX_DIFFERENCE and mean <= _MAX_MEAN_DIFFERENCE
    if not is_equal:
        raise WeightUpdateError(
            "the weights that arrived do not give the learner's log-probs: they differ by up to"
            f" {largest:.2g} (mean {mean:.2g}), allowed are {_MAX_DIFFERENCE:.2g}"
            f" ({_MAX_MEAN_DIFFERENCE:.2g}). Names may be interchanged, or numbers never written;"
            " the weights before them are still served"
        )


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config: DecoderConfig, params: Params, ids_T: jax.Array) -> jax.Array:
    """Return float32 [T - 1]: the log-prob of every id but the first, given the ids before it."""
    # The layers compute in the dtype of their input: no other weights are copied.
    float32_params = {}
    for name in ("embed", "lm_head"):
        if name in params:
            float32_params[name] = params[name].astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        model = Decoder.from_params(config, params | float32_params)
        hidden, _ = model(ids_T[None])
        logprobs_TV = jax.nn.log_softmax(model.logits(hidden[0, :-1]))
    return jnp.take_along_axis(logprobs_TV, ids_T[1:, None], axis=1)[:, 0]
