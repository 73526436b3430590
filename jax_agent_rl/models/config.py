"""Model configurations.

Families (``models.families``) translate to and from Hugging Face's ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.layer_kinds import FeedForwardName, KeysName, LayerKind, MixerName

Params = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters by name."""


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones stay.

    There is a ramp between them.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071).

    Long wavelengths are stretched, short ones stay, and scores are sharpened.

    Attributes:
        factor: by which long wavelengths are stretched.
        original_max_position_embeddings: context length before it was extended.
        beta_fast: turns within these positions from which on a frequency is kept.
        beta_slow: turns up to which it is divided by ``factor``.
        attention_factor: multiplies rotated queries and keys; None for what ``magnitude`` derives.
        truncate: round the ends of the ramp between them to whole frequencies.
        mscale: sharpens what is rotated, if ``mscale_all_dim`` is there too, see ``magnitude``.
        mscale_all_dim: sharpens the scores of latent attention, see ``score_factor``; None or 0
            leaves them. In other attention it has no effect but on ``magnitude``.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def score_factor(self) -> float:
        """Factor of latent attention's scores: it rotates only parts of queries and keys."""
        return self._sharpening(self.mscale_all_dim or 0.0) ** 2

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin.

        The scores of latent attention have ``mscale_all_dim`` already, so cos and sin have the
        rest of ``mscale``. Without either the factor is the paper's.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    def _sharpening(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the length of the context.

    See Peng et al. 2023, arXiv 2309.00071, section 3.3. Here the base is the same at every length,
    the one of the longest context, as in vLLM: a key in a cache could not be rotated again when the
    context grows. transformers has the same frequencies for contexts of up to
    ``trained_positions``, if ``positions`` is equal, and of exactly ``positions``.

    Attributes:
        factor: by which the context grew.
        trained_positions: positions the model was trained for.
        positions: of the longest context.
    """

    factor: float
    trained_positions: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Only the highest frequencies of a head rotate; the others are 0.

    It differs from ``Rope.partial_rotary``, where a part of the head has frequencies as if it were
    the whole: here they are as far apart as the whole head's, and pairs are of its two halves.

    Attributes:
        fraction: of the frequencies.
        factor: what positions are divided by.
    """

    fraction: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | ProportionalScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base.
        scaling: for long contexts.
        sections: number of frequencies for time, row and column of a token (M-RoPE: Wang et al.
            2024, Qwen2-VL, arXiv 2409.12191, section 2.1); None if all use its position.
        partial_rotary: fraction of a head that rotates, its first numbers.
        interleaved: neighbouring numbers rotate as a pair, instead of one of each half.
        interleaved_sections: frequencies of the sections take turns, as long as row and column have
            any left, instead of following each other (Bai et al. 2025, Qwen3-VL, arXiv 2511.21631,
            section 2).
    """

    theta: float = 10000.0
    scaling: Scaling | None = None
    sections: tuple[int, int, int] | None = None
    partial_rotary: float = 1.0
    interleaved: bool = False
    interleaved_sections: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are products of one latent per token.

    See ``models.mixers.latent_attention``.

    Attributes:
        q_rank: numbers of the queries' latent; None projects queries from the hidden state.
        kv_rank: numbers of the latent of keys and values.
        nope_dim: numbers of a query or key that do not rotate.
        rope_dim: numbers that do; the heads' keys share them.
        value_dim: numbers of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    norm_eps: ClassVar[float] = 1e-6
    """Of the latents' norms, whatever ``rms_norm_eps`` is, as in DeepSeek's code."""

    @property
    def head_dim(self) -> int:
        """Numbers of a query or key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Numbers that an engine caches for each position."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward network.

    Attributes:
        count: E.
        per_token: experts per token.
        intermediate_size: F of one expert.
        normalize: scale the chosen experts' probabilities to sum to 1.
        bias: the router and the experts' matrices have one.
        first_dense_layers: how many of the first layers have a dense feed-forward network instead,
            of the decoder's ``intermediate_size``.
        scoring: from the router's scores to the experts' probabilities: of one choice among all
            experts, or of each expert by itself.
        correction: a bias is added to the probabilities for the choice, not for the weights. It
            balances the experts and is not trained by gradients (Wang et al. 2024, arXiv
            2408.15664).
        groups: the experts are that many groups of neighbours.
        groups_per_token: a token chooses among the experts of so many groups, those whose two best
            probabilities have the largest sums (DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437,
            section 2.1.2).
        scale: of the chosen experts' weights, after they are normalized.
        shared_size: F of the shared expert, a dense network that every token passes; 0 for none.
        shared_gated: the shared expert's output is multiplied by the sigmoid of a score of its own.
        beside_dense: these layers have a dense network as well, which reads the same residual
            stream. It and the experts have norms of their own, and their outputs are added.
        router_norm: the router reads the residual stream through a norm of its own, divided by the
            square root of its size, instead of what the experts read.
        weight_factors: the chosen experts' weights are multiplied by a parameter of each.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    bias: bool = False
    first_dense_layers: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    shared_size: int = 0
    shared_gated: bool = False
    beside_dense: bool = False
    router_norm: bool = False
    weight_factors: bool = False


@dataclass(frozen=True, kw_only=True)
class GlobalAttention:
    """Heads of the layers that are not windowed, where they differ from the windowed layers'.

    Attributes:
        num_kv_heads: K.
        head_dim: h.
        keys_as_values: values are the keys before their norm and rotation; there is no matrix of
            values.
    """

    num_kv_heads: int
    head_dim: int
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """Key/value heads of the layers with one mixer.

    Attributes:
        prefix: of the names of these layers' parameters of attention.
        num_kv_heads: K.
        head_dim: h.
        keys_as_values: see :class:`GlobalAttention`.
    """

    prefix: str = ""
    num_kv_heads: int
    head_dim: int
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """Further embeddings of a token, one for each layer (Gemma 3n and 4).

    Attributes:
        vocab_size: rows of their table.
        size: p of one.
    """

    vocab_size: int
    size: int


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Layers that have a gated delta net in place of attention, see ``models.delta_net``.

    Attributes:
        layers: which layers do.
        key_heads: G.
        value_heads: H; each key head serves H / G adjacent ones.
        key_dim: size of a key.
        value_dim: size of a value.
        conv_kernel: n, tokens that the convolution sees.
        fused: the inputs are projected by two matrices, grouped by key head, instead of four.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    fused: bool = False

    @property
    def keys_size(self) -> int:
        """Numbers of all key heads of a token."""
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Numbers of all value heads of a token."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.keys_size + self.values_size


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower of a Qwen-VL or Qwen3.5.

    It encodes image patches as features, which stand among the decoder's embeddings.

    Attributes:
        num_layers: Hugging Face's ``depth``.
        out_size: of a feature, the decoder's ``hidden_size``.
        patch_size: pixels of a patch's side.
        temporal_patch_size: frames of a video in one patch; an image is repeated for all.
        merge_size: patches of a square's side that become one feature.
        window_size: pixels of the side of a window; most layers attend within windows. None: all
            attend within frames.
        full_attention_layers: those that attend within a whole image, or group of frames.
        tokens_per_second: rotary time steps per second of video; None if only images are read.
        layer_norm: norms subtract the mean and have a bias, instead of RMS norms.
        gated: layers have a gated network, instead of one of two matrices.
        patch_bias: the embedding of patches has a bias.
        position_grid: side of the square of learned positions, interpolated to each image; None for
            none.
        deepstack_layers: layers after which further features are taken; they are added after the
            decoder's first layers (Meng et al. 2024, DeepStack, arXiv 2406.04334).
        image_token_id: placeholder, one for each feature of an image.
        video_token_id: the same for videos.
        vision_start_token_id: before an item's placeholders in chat templates.
        vision_end_token_id: after them.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    window_size: int | None = 112
    full_attention_layers: tuple[int, ...] = ()
    tokens_per_second: int | None = 2
    layer_norm: bool = False
    gated: bool = True
    patch_bias: bool = False
    position_grid: int | None = None
    deepstack_layers: tuple[int, ...] = ()
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    # Constants of the family, under the names models.layers expects of decoders.
    rms_norm_eps: ClassVar[float] = 1e-6
    norm_offset: ClassVar[float] = 0.0
    float32_norms: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def placeholders(self) -> dict[str, int]:
        """Placeholder ids by kind of item."""
        placeholders = {"image": self.image_token_id}
        if self.tokens_per_second is not None:
            placeholders["video"] = self.video_token_id
        return placeholders

    @property
    def feature_size(self) -> int:
        """Numbers of a feature: for the embedding, and for each of the decoder's first layers."""
        return self.out_size * (1 + len(self.deepstack_layers))

    @property
    def patch_dim(self) -> int:
        """Values in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_side(self) -> int:
        """Features of a window's side."""
        if self.window_size is None:
            return 1 << 20  # more than any image has
        return self.window_size // (self.patch_size * self.merge_size)

    @property
    def window_patches(self) -> int:
        """Most patches of a window, or 64 without windows.

        Numbers of patches are padded to multiples of it.
        """
        if self.window_size is None:
            return 64
        return (self.window_side * self.merge_size) ** 2

    def parameter_shapes(self) -> Params:
        """Return shapes as :meth:`DecoderConfig.parameter_shapes` does."""
        d = self.hidden_size
        merged = self.hidden_size * self.merge_size**2
        shapes: Params = {
            "patch_embed": (
                d,
                self.in_channels,
                self.temporal_patch_size,
                self.patch_size,
                self.patch_size,
            ),
            "layers": {
                name: (self.num_layers, *shape) for name, shape in self.layer_shapes().items()
            },
            "merger_norm": (d,),
            "merger_in": (merged, merged),
            "merger_in_bias": (merged,),
            "merger_out": (self.out_size, merged),
            "merger_out_bias": (self.out_size,),
        }
        if self.patch_bias:
            shapes["patch_embed_bias"] = (d,)
        if self.layer_norm:
            shapes["merger_norm_bias"] = (d,)
        if self.position_grid is not None:
            shapes["positions"] = (self.position_grid**2, d)
        if self.deepstack_layers:
            count = len(self.deepstack_layers)
            shapes |= {
                "deepstack_norm": (count, merged),
                "deepstack_norm_bias": (count, merged),
                "deepstack_in": (count, merged, merged),
                "deepstack_in_bias": (count, merged),
                "deepstack_out": (count, self.out_size, merged),
                "deepstack_out_bias": (count, self.out_size),
            }
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of one layer."""
        d = self.hidden_size
        f = self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (3 * d, d),
            "qkv_bias": (3 * d,),
            "o": (d, d),
            "o_bias": (d,),
            "up": (f, d),
            "down": (d, f),
            "up_bias": (f,),
            "down_bias": (d,),
        }
        if self.gated:
            shapes |= {"gate": (f, d), "gate_bias": (f,)}
        if self.layer_norm:
            shapes |= {"input_norm_bias": (d,), "post_attention_norm_bias": (d,)}
        return shapes | {"input_norm": (d,), "post_attention_norm": (d,)}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Hyperparameters of a decoder-only transformer. Hashable: programs are compiled per config.

    Attributes:
        family: Hugging Face's ``model_type``.
        rope: of full-attention layers.
        qkv_bias: q, k and v have a bias.
        o_bias: o has one.
        attention_sinks: each head's softmax has one more score, a parameter, whose weight goes to
            no value (Xiao et al. 2023, arXiv 2309.17453; a learned one as in gpt-oss).
        qk_norm: q and k have RMS norms.
        qk_norm_over: what they are over: each head by itself, or all heads at once.
        v_norm: v has one per head, without a weight.
        attention_gate: what a head mixes is multiplied by the sigmoid of a gate, which q projects
            as well, after each head's query (Qiu et al. 2025, arXiv 2505.06708).
        norm_offset: the norms multiply by ``offset + weight`` (Gemma 3 stores weights around 0).
        float32_norms: the norms multiply by their weights before they round. They always do with a
            ``norm_offset``.
        norms: where mixers and feed-forward networks have them: before, of what they read; after,
            of their outputs, before these are added; or around, which is both.
        layer_scale: the residual stream is multiplied by a number after each layer, which training
            leaves as it is.
        activation: of the gate, see ``models.layers.ACTIVATIONS``.
        embed_scale: embeddings are multiplied by it.
        attention_scale: of scores; None means 1/sqrt(head_dim).
        logit_softcap: logits become ``cap * tanh(logits / cap)`` with this cap; None for none.
        sliding_window: positions a windowed layer looks back, itself included.
        windowed_layers: which layers have that window (and ``local_rope``); empty means none.
        local_rope: of windowed layers; None for ``rope``.
        global_attention: heads of the layers that are not windowed; None for those of the others.
        shared_kv_layers: how many of the last layers have no keys and values, but read those of the
            last layer before them that is windowed, or is not, as they are.
        wide_shared_layers: these layers have feed-forward networks of twice the
            ``intermediate_size``.
        per_layer_inputs: see ``models.per_layer_inputs``; None for none.
        latent: attention is latent attention; ``head_dim`` is of queries and keys then.
        experts: None means a dense feed-forward network.
        delta_net: None means attention in all layers.
        vision: the vision tower; None for text models.
        carried: fields of the ``config.json`` it was read from that have no effect on what is
            computed (``pad_token_id``), written again with it. Configurations that differ in them
            alone are equal.

    Raises:
        ModelError: layers share keys and values that no layer before them has, or that are
            ambiguous.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    eos_token_ids: tuple[int, ...] = (2,)
    bos_token_id: int | None = 1
    qkv_bias: bool = False
    o_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "heads"] = "head"
    v_norm: bool = False
    attention_gate: bool = False
    norm_offset: float = 0.0
    float32_norms: bool = False
    norms: Literal["before", "around", "after"] = "before"
    layer_scale: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    embed_scale: float = 1.0
    attention_scale: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    global_attention: GlobalAttention | None = None
    shared_kv_layers: int = 0
    wide_shared_layers: bool = False
    per_layer_inputs: PerLayerInputs | None = None
    latent: LatentAttention | None = None
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    vision: VisionConfig | None = None
    carried: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.shared_kv_layers:
            self._check_shared_keys()

    def _check_shared_keys(self) -> None:
        """Check that each layer without keys and values finds those of one layer before it."""
        setting = f"shared_kv_layers={self.shared_kv_layers}"
        windowed = [self.is_windowed(layer) for layer in range(self.num_layers)]
        most = self.num_layers - 1 - max(map(windowed.index, set(windowed)))
        if not 0 <= self.shared_kv_layers <= most:
            raise ModelError(
                f"{setting}: layers share keys and values of an earlier layer with a window, or of"
                f" one without, as they are themselves; set shared_kv_layers from 0 to {most}, so"
                " that there is one"
            )

        windows: dict[MixerName, bool] = {}
        for layer, kind in enumerate(self.layer_kinds):
            if kind.keys == "private":
                continue
            if kind.mixer not in ("attention", "global_attention"):
                raise ModelError(
                    f"{setting}: layer {layer} takes part, but its mixer is {kind.mixer!r}, which"
                    " has no keys and values to share; set shared_kv_layers=0"
                )
            # Layers find the keys and values to read by their mixer.
            if windows.setdefault(kind.mixer, windowed[layer]) != windowed[layer]:
                raise ModelError(
                    f"{setting}: layers with windows and without share keys and values of the same"
                    f" heads; set global_attention to GlobalAttention(num_kv_heads="
                    f"{self.num_kv_heads}, head_dim={self.head_dim}), which keeps them apart"
                )

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        if self.attention_scale is not None:
            return self.attention_scale
        scale = self.head_dim**-0.5
        if self.latent is not None and isinstance(self.rope.scaling, YarnScaling):
            scale *= self.rope.scaling.score_factor
        return scale

    @property
    def mixer_norm(self) -> str | None:
        """Name of the norm of what a mixer reads, if it has one."""
        if self.norms == "after":
            return None
        return "input_norm"

    @property
    def feed_forward_norm(self) -> str | None:
        """Name of the norm of what a feed-forward network reads, if it has one."""
        match self.norms:
            case "before":
                return "post_attention_norm"
            case "around":
                return "pre_feedforward_norm"
            case "after":
                return None

    @property
    def experts_norm(self) -> str | None:
        """Name of the norm of what experts read, if they have one."""
        if self.experts is not None and self.experts.beside_dense:
            return "pre_experts_norm"
        return self.feed_forward_norm

    @property
    def has_output_norms(self) -> bool:
        """Whether the outputs of mixers and feed-forward networks have norms.

        These are ``post_attention_norm`` and ``post_feedforward_norm``.
        """
        return self.norms != "before"

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The norms of a layer around its mixer and its feed-forward network."""
        names = [self.mixer_norm, self.feed_forward_norm]
        if self.has_output_norms:
            names += ["post_attention_norm", "post_feedforward_norm"]
        return tuple(name for name in names if name is not None)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that rotary tables are made for."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim

    def is_windowed(self, layer: int) -> bool:
        """Return whether a layer attends to ``sliding_window`` positions only."""
        return bool(self.windowed_layers) and self.windowed_layers[layer]

    def window_choices(self, mixer: MixerName) -> tuple[bool, ...]:
        """Return whether the layers with this mixer are windowed: one value, or both, False first.

        It is empty if there are none.
        """
        choices = set()
        for layer, kind in enumerate(self.layer_kinds):
            if kind.mixer == mixer:
                choices.add(self.is_windowed(layer))
        return tuple(sorted(choices))

    def layer_kind(self, layer: int) -> LayerKind:
        """Return what a layer computes."""
        mixer: MixerName = "attention"
        if self.latent is not None:
            mixer = "latent_attention"
        elif self.global_attention is not None and not self.is_windowed(layer):
            mixer = "global_attention"
        if self.delta_net is not None and self.delta_net.layers[layer]:
            mixer = "delta_net"

        keys = self._keys_of(layer)
        feed_forward: FeedForwardName = "dense"
        if self.experts is not None and layer >= self.experts.first_dense_layers:
            feed_forward = "dense_and_experts" if self.experts.beside_dense else "experts"
        elif keys == "shared" and self.wide_shared_layers:
            feed_forward = "wide"
        return LayerKind(mixer=mixer, keys=keys, feed_forward=feed_forward)

    def _keys_of(self, layer: int) -> KeysName:
        """Return whose keys and values a layer attends to."""
        if not self.shared_kv_layers:
            return "private"
        first_shared = self.num_layers - self.shared_kv_layers
        if layer >= first_shared:
            return "shared"

        is_windowed = self.is_windowed(layer)
        is_read = any(
            self.is_windowed(i) == is_windowed for i in range(first_shared, self.num_layers)
        )
        is_last = not any(
            self.is_windowed(i) == is_windowed for i in range(layer + 1, first_shared)
        )
        if is_read and is_last:
            return "source"
        return "private"

    def keys_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        kinds = self.layer_kinds
        if kinds[layer].keys != "shared":
            return layer
        sources = [kind.mixer if kind.keys == "source" else None for kind in kinds]
        return sources.index(kinds[layer].mixer)

    def heads(self, mixer: MixerName) -> AttentionHeads:
        """Return the heads of the layers with one of the mixers of keys and values."""
        if mixer == "global_attention":
            assert self.global_attention is not None
            return AttentionHeads(
                prefix="global_",
                num_kv_heads=self.global_attention.num_kv_heads,
                head_dim=self.global_attention.head_dim,
                keys_as_values=self.global_attention.keys_as_values,
            )
        return AttentionHeads(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer computes."""
        return tuple(self.layer_kind(layer) for layer in range(self.num_layers))

    @property
    def mixers(self) -> tuple[MixerName, ...]:
        """The mixers that layers have, each once, in the order of the first of them."""
        names: dict[MixerName, None] = {}
        for kind in self.layer_kinds:
            names[kind.mixer] = None
        return tuple(names)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with a mixture of experts, M of them."""
        return self.layers_with("router")

    def layers_with(self, name: str) -> tuple[int, ...]:
        """Return the layers that have a parameter: those of its stack, in order."""
        kinds = self.layer_kinds
        with_name = {kind for kind in set(kinds) if name in self.kind_shapes(kind)}
        return tuple(layer for layer, kind in enumerate(kinds) if kind in with_name)

    def parameter_shapes(self) -> Params:
        """Return the shape of every parameter, nested as the parameter tree.

        A layer's parameter is stacked over the layers that have it, see :meth:`layers_with`.
        """
        layers: Shapes = {}
        for kind in dict.fromkeys(self.layer_kinds):
            for name, shape in self.kind_shapes(kind).items():
                layers[name] = (len(self.layers_with(name)), *shape)

        shapes: Params = {
            "embed": (self.vocab_size, self.hidden_size),
            "layers": layers,
            "final_norm": (self.hidden_size,),
        }
        if self.per_layer_inputs is not None:
            p = self.per_layer_inputs.size
            shapes["per_layer_embed"] = (self.per_layer_inputs.vocab_size, self.num_layers * p)
            shapes["per_layer_model_projection"] = (self.num_layers * p, self.hidden_size)
            shapes["per_layer_model_norm"] = (p,)
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        if self.vision is not None:
            shapes["vision"] = self.vision.parameter_shapes()
        return shapes

    def layer_shapes(self, layer: int) -> Shapes:
        """Return the shape of every parameter of one layer."""
        return self.kind_shapes(self.layer_kind(layer))

    def kind_shapes(self, kind: LayerKind) -> Shapes:
        """Return the shape of every parameter of a layer of this kind.

        A name has one shape in all kinds that have it.
        """
        d = self.hidden_size
        match kind.mixer:
            case "attention" | "global_attention":
                shapes = self._attention_shapes(kind)
            case "delta_net":
                shapes = self._delta_net_shapes()
            case "latent_attention":
                shapes = self._latent_attention_shapes()
        match kind.feed_forward:
            case "dense":
                shapes |= self._dense_shapes()
            case "wide":
                f = 2 * self.intermediate_size
                shapes |= {"wide_gate": (f, d), "wide_up": (f, d), "wide_down": (d, f)}
            case "experts":
                shapes |= self._expert_shapes()
            case "dense_and_experts":
                shapes |= self._dense_shapes() | self._expert_shapes()
                for name in ("post_dense_norm", "pre_experts_norm", "post_experts_norm"):
                    shapes[name] = (d,)

        for name in self.norm_names:
            shapes[name] = (d,)
        if self.per_layer_inputs is not None:
            p = self.per_layer_inputs.size
            shapes |= {
                "per_layer_gate": (p, d),
                "per_layer_projection": (d, p),
                "post_per_layer_norm": (d,),
            }
        if self.layer_scale:
            shapes["layer_scalar"] = (1,)
        return shapes

    def _attention_shapes(self, kind: LayerKind) -> Shapes:
        heads = self.heads(kind.mixer)
        d = self.hidden_size
        h = heads.head_dim
        query = self.num_heads * h
        key = heads.num_kv_heads * h
        has_keys = kind.keys != "shared"

        query_rows = query
        if self.attention_gate:
            query_rows *= 2
        shapes: Shapes = {"q": (query_rows, d)}
        if has_keys:
            shapes["k"] = (key, d)
            if not heads.keys_as_values:
                shapes["v"] = (key, d)
        shapes["o"] = (d, query)
        if self.qkv_bias:
            shapes["q_bias"] = (query_rows,)
            if has_keys:
                shapes |= {"k_bias": (key,), "v_bias": (key,)}
        if self.o_bias:
            shapes["o_bias"] = (d,)
        if self.attention_sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.qk_norm:
            over_heads = self.qk_norm_over == "heads"
            shapes["q_norm"] = (query,) if over_heads else (h,)
            if has_keys:
                shapes["k_norm"] = (key,) if over_heads else (h,)
        return {heads.prefix + name: shape for name, shape in shapes.items()}

    def _delta_net_shapes(self) -> Shapes:
        assert self.delta_net is not None
        d = self.hidden_size
        keys = self.delta_net.keys_size
        values = self.delta_net.values_size
        heads = self.delta_net.value_heads
        if self.delta_net.fused:
            shapes: Shapes = {
                "delta_qkvz": (2 * keys + 2 * values, d),
                "delta_ba": (2 * heads, d),
            }
        else:
            shapes = {
                "delta_qkv": (self.delta_net.conv_channels, d),
                "delta_z": (values, d),
                "delta_b": (heads, d),
                "delta_a": (heads, d),
            }
        return shapes | {
            "delta_conv": (self.delta_net.conv_channels, 1, self.delta_net.conv_kernel),
            "delta_decay_log": (heads,),
            "delta_decay_bias": (heads,),
            "delta_norm": (self.delta_net.value_dim,),
            "delta_out": (d, values),
        }

    def _latent_attention_shapes(self) -> Shapes:
        assert self.latent is not None
        d = self.hidden_size
        latent = self.latent
        query = self.num_heads * latent.head_dim
        value = self.num_heads * latent.value_dim
        shapes: Shapes = {
            "kv_a": (latent.cached_dim, d),
            "kv_a_norm": (latent.kv_rank,),
            "kv_b": (self.num_heads * latent.nope_dim + value, latent.kv_rank),
            "o": (d, value),
        }
        if latent.q_rank is None:
            shapes["q"] = (query, d)
        else:
            shapes |= {
                "q_a": (latent.q_rank, d),
                "q_a_norm": (latent.q_rank,),
                "q_b": (query, latent.q_rank),
            }
        return shapes

    def _dense_shapes(self) -> Shapes:
        d = self.hidden_size
        f = self.intermediate_size
        return {"gate": (f, d), "up": (f, d), "down": (d, f)}

    def _expert_shapes(self) -> Shapes:
        assert self.experts is not None
        d = self.hidden_size
        e = self.experts.count
        f = self.experts.intermediate_size
        shapes: Shapes = {
            "router": (e, d),
            "expert_gate": (e, f, d),
            "expert_up": (e, f, d),
            "expert_down": (e, d, f),
        }
        if self.experts.bias:
            shapes |= {
                "router_bias": (e,),
                "expert_gate_bias": (e, f),
                "expert_up_bias": (e, f),
                "expert_down_bias": (e, d),
            }
        if self.experts.correction:
            shapes["router_correction"] = (e,)
        if self.experts.router_norm:
            shapes["router_norm"] = (d,)
        if self.experts.weight_factors:
            shapes["router_factors"] = (e,)

        f = self.experts.shared_size
        if f:
            shapes |= {"shared_gate": (f, d), "shared_up": (f, d), "shared_down": (d, f)}
            if self.experts.shared_gated:
                shapes["shared_router"] = (1, d)
        return shapes
