"""Decoder-only transformers in Flax NNX.

There is one implementation, configured per family (``models.families``).

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, h head size, F feed-forward, V
vocabulary, L layers, M of them with a mixture of experts of which a token takes k. Linear weights
are stored as Hugging Face stores them, [out, in], stacked over the layers that have them, so that
reading and writing safetensors is a copy, and one compiled layer body serves all layers of a run
(``models.layer_kinds``).

A transfer of parameters is verified by log-probs of a few sequences (:func:`score_probe`,
:func:`verify_probe`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder_layer import decoder_layer
from jax_agent_rl.models.layer_kinds import LayerKind, MixerName
from jax_agent_rl.models.layer_scan import scan_layers
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import (
    REMAT_POLICIES,
    Module,
    deepstack_features,
    embed,
    place_features,
    rms_norm,
    softcapped,
)
from jax_agent_rl.models.lora import LoRA
from jax_agent_rl.models.mixers.mixer import TokenTrees
from jax_agent_rl.models.mixers.table import MIXERS
from jax_agent_rl.models.parameters import rounded_params
from jax_agent_rl.models.per_layer_inputs import PER_LAYER_PARAMETERS, per_layer_inputs
from jax_agent_rl.models.sharding import ROWS, constrain
from jax_agent_rl.models.vision_context import ImageInputs
from jax_agent_rl.models.vision_tower import VisionTower
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, LogprobProbe


class LayerStacks(Module):
    """The parameters of all layers, each stacked over the layers that have it."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        shapes = config.parameter_shapes()["layers"]
        super().__init__(config, shapes, rngs=rngs)
        self._names = tuple(shapes)

    def arrays(self) -> Params:
        """Return the stacks by name; matrices may be quantized."""
        return {name: getattr(self, name).get_value() for name in self._names}


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
        self.layers = LayerStacks(config, rngs=rngs)
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
            routed_experts: [B, T, M, k], experts to take in each of ``config.expert_layers``; a
                token of -1 chooses its own, as all do with None.
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
        _, x, (loads, _) = self._run_layers(
            token_ids,
            positions,
            subtree_end,
            copies=copies,
            routed_experts=routed_experts,
            images=images,
            remat=remat,
            mesh=mesh,
        )
        hidden = rms_norm(self.config, x, self.final_norm[...])
        if loads is None:
            return hidden, None
        return hidden, jnp.sum(loads, axis=0)

    def layer_outputs(
        self, token_ids: jax.Array, routed_experts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Compute what is between the layers, for plain rows of text.

        Args:
            token_ids: int32 [B, T].
            routed_experts: as in a call.

        Returns:
            The input [B, T, D] of the first layer, and the output of each layer, [L, B, T, D].
        """
        embedded, _, (_, outputs) = self._run_layers(
            token_ids, routed_experts=routed_experts, keep_outputs=True
        )
        assert outputs is not None
        return embedded, outputs

    def _run_layers(
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
        keep_outputs: bool = False,
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array | None, jax.Array | None]]:
        """Compute embeddings and layers; arguments as in a call.

        Returns:
            The input [B, T, D] of the first layer and the output of the last one, and of all layers
            the loads of their experts, float32 [L, 2, E], and with ``keep_outputs`` their outputs
            [L, B, T, D].
        """
        config = self.config
        count = token_ids.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(count), token_ids.shape)
        if subtree_end is None:
            subtree_end = jnp.full(token_ids.shape, count, jnp.int32)

        tokens = TokenTrees(positions=positions, subtree_end=subtree_end, images=images)
        shared = _shared_by_layers(config, tokens)
        deepstack_count = 0
        if config.vision is not None:
            deepstack_count = len(config.vision.deepstack_layers)

        def compute(
            x: jax.Array,
            kind: LayerKind,
            stacked: dict[str, Any],
            values: tuple[Any, ...],
            source_keys: Mapping[MixerName, Any],
        ) -> tuple[jax.Array, tuple[jax.Array | None, ...], dict[MixerName, Any]]:
            number, window_choice, routed, per_layer_input = values
            layer = self._layer(kind, stacked, mesh)
            mixer = MIXERS[kind.mixer]
            choices = shared[kind.mixer]
            if len(choices) == 1:
                context = choices[0]
            else:
                context = jax.tree.map(lambda *x: jnp.stack(x)[window_choice], *choices)

            new_source_keys: dict[MixerName, Any] = {}

            def mix(inputs: jax.Array) -> jax.Array:
                if kind.keys == "private":
                    return mixer.mix(layer, inputs, context)
                assert mixer.keys_and_values is not None and mixer.mix_with is not None
                if kind.keys == "shared":
                    return mixer.mix_with(layer, inputs, context, source_keys[kind.mixer])
                keys_and_values = mixer.keys_and_values(layer, inputs, context)
                new_source_keys[kind.mixer] = keys_and_values
                return mixer.mix_with(layer, inputs, context, keys_and_values)

            x, load = decoder_layer(
                layer,
                x,
                mix,
                copies=copies,
                routed=routed,
                per_layer_input=per_layer_input,
            )
            if deepstack_count and images is not None:
                layer_features = functools.partial(
                    deepstack_features, images, size=config.hidden_size
                )

                def add_features() -> jax.Array:
                    return x + layer_features(number).astype(x.dtype)

                x = jax.lax.cond(number < deepstack_count, add_features, lambda: x)
            return x, (load, x if keep_outputs else None), new_source_keys

        if remat != "none":
            compute = jax.checkpoint(compute, policy=REMAT_POLICIES[remat], static_argnums=1)

        embedded = embed(config, self.embed[...], token_ids)
        if images is not None:
            embedded = place_features(embedded, images)
        embedded = constrain(embedded, mesh, ROWS, "context", None)

        numbers = jnp.arange(config.num_layers)
        values = (
            numbers,
            _window_choices(config),
            _routed_by_layer(config, routed_experts),
            self._per_layer_inputs(token_ids, embedded),
        )
        x, outputs = scan_layers(config, compute, embedded, self._stacks(), values)
        return embedded, x, outputs

    def _per_layer_inputs(self, token_ids: jax.Array, embedded: jax.Array) -> jax.Array | None:
        """Return each layer's inputs [L, B, T, p] of ids [B, T] and their embeddings, if any."""
        if self.config.per_layer_inputs is None:
            return None
        params = {name: getattr(self, name)[...] for name in PER_LAYER_PARAMETERS}
        inputs = per_layer_inputs(self.config, params, token_ids, embedded)
        return jnp.moveaxis(inputs, 2, 0)

    def _stacks(self) -> dict[str, tuple[Any, tuple[jax.Array, jax.Array] | None]]:
        """Return each parameter of the layers with the two matrices of its adapter, if any."""
        stacks = {}
        for name, weight in self.layers.arrays().items():
            matrices = None
            if name in self.adapters:
                adapter = self.adapters[name]
                matrices = (adapter.a[...], adapter.b[...])
            stacks[name] = (weight, matrices)
        return stacks

    def _layer(
        self, kind: LayerKind, stacked: Mapping[str, Any], mesh: Mesh | None
    ) -> LayerWeights:
        """Return one layer, given its part of :meth:`_stacks`."""
        params = {}
        adapters = {}
        for name, (weight, matrices) in stacked.items():
            params[name] = weight
            if matrices is not None:
                a, b = matrices
                adapters[name] = LoRA(a, b, scale=self.adapters[name].scale)
        return LayerWeights(
            config=self.config, kind=kind, params=params, adapters=adapters, mesh=mesh
        )

    @property
    def head(self) -> jax.Array:
        """The output head [V, D], which may be the embedding."""
        return getattr(self, "lm_head", self.embed)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits float32 [..., V] of hidden states [..., D]."""
        logits = jnp.einsum("...d,vd->...v", hidden, self.head, preferred_element_type=jnp.float32)
        return softcapped(logits, self.config.logit_softcap)


def _shared_by_layers(config: DecoderConfig, tokens: TokenTrees) -> dict[MixerName, list[Any]]:
    """Return what layers share, by mixer and then for each of ``config.window_choices``.

    Layers look at images without windows.
    """
    shared: dict[MixerName, list[Any]] = {}
    for name in config.mixers:
        choices = config.window_choices(name)
        if tokens.images is not None:
            choices = (False,)
        shared[name] = [MIXERS[name].prepare(config, windowed, tokens) for windowed in choices]
    return shared


def _window_choices(config: DecoderConfig) -> jax.Array:
    """Return int32 [L]: which of the ``config.window_choices`` of its mixer a layer is."""
    indices = []
    for layer, kind in enumerate(config.layer_kinds):
        indices.append(config.window_choices(kind.mixer).index(config.is_windowed(layer)))
    return jnp.array(indices, jnp.int32)


def _routed_by_layer(config: DecoderConfig, routed_experts: jax.Array | None) -> jax.Array | None:
    """Return the experts to take [L, B, T, k], given the ones of the M layers that have any."""
    if routed_experts is None:
        return None
    by_mixture = jnp.moveaxis(routed_experts, 2, 0)
    mixtures = config.expert_layers
    if len(mixtures) == config.num_layers:
        return by_mixture

    indices = np.zeros(config.num_layers, np.int32)  # layers without experts look at none
    indices[list(mixtures)] = np.arange(len(mixtures))
    return by_mixture[indices]


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
    params = rounded_params(params, dtype)
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
    # Not `largest > …`: a comparison with NaN must also fail.
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
