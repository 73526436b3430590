"""What a decoder is made of. Families (``models.families``) translate to and from Hugging Face's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths stretched by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: base ``theta`` and how long contexts stretch it."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward network.

    Attributes:
        count: E.
        per_token: experts a token goes through.
        intermediate_size: F of one expert.
        normalize: the chosen experts' probabilities are scaled to sum to 1.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Hyperparameters of a decoder-only transformer. Hashable: programs are compiled per config.

    Attributes:
        family: Hugging Face's ``model_type``.
        rope: of full-attention layers.
        qkv_bias: q, k and v have a bias.
        qk_norm: q and k are RMS-normed per head.
        norm_offset: the norms multiply by ``offset + weight`` (Gemma stores weights around 0).
        sandwich_norms: also what attention and feed-forward give is normed, before it is added.
        activation: of the gate.
        embed_scale: embeddings are multiplied by it.
        attention_scale: of scores; None means 1/sqrt(head_dim).
        sliding_window: positions a windowed layer looks back, itself included.
        windowed_layers: which layers have that window (and ``local_rope``); empty means none.
        local_rope: of windowed layers.
        experts: None means a dense feed-forward network.
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
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_scale: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    experts: Experts | None = None

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer sees only ``sliding_window`` positions."""
        return bool(self.windowed_layers) and self.windowed_layers[layer]

    def parameter_shapes(self) -> Params:
        """Shape of every parameter, as the parameter tree is nested; those of layers are stacked, [L, ...]."""
        shapes: Params = {
            "embed": (self.vocab_size, self.hidden_size),
            "layers": {name: (self.num_layers, *shape) for name, shape in self._layer_shapes().items()},
            "final_norm": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        d, h = self.hidden_size, self.head_dim
        query, key = self.num_heads * h, self.num_kv_heads * h
        shapes: dict[str, tuple[int, ...]] = {"q": (query, d), "k": (key, d), "v": (key, d), "o": (d, query)}
        if self.qkv_bias:
            shapes |= {"q_bias": (query,), "k_bias": (key,), "v_bias": (key,)}
        if self.qk_norm:
            shapes |= {"q_norm": (h,), "k_norm": (h,)}
        if self.experts is None:
            f = self.intermediate_size
            shapes |= {"gate": (f, d), "up": (f, d), "down": (d, f)}
        else:
            e, f = self.experts.count, self.experts.intermediate_size
            shapes |= {"router": (e, d), "expert_gate": (e, f, d), "expert_up": (e, f, d), "expert_down": (e, d, f)}
        shapes |= {"input_norm": (d,), "post_attention_norm": (d,)}
        if self.sandwich_norms:
            shapes |= {"pre_feedforward_norm": (d,), "post_feedforward_norm": (d,)}
        return shapes
