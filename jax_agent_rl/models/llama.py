"""Llama family (Llama 3.x, SmolLM2) in Flax NNX.

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, h head size, F feed-forward, V vocabulary,
L layers. Linear weights are stored as Hugging Face stores them, [out, in], stacked over layers, so that reading and
writing safetensors is a copy, and one compiled layer body serves all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.attention import tree_attention

Params = dict[str, Any]
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Hyperparameters, named as in this package; :meth:`from_hf` and :meth:`to_hf` translate.

    ``rope_scaling`` holds Llama 3's fields (``factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings``) as sorted items, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float], ...] | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    eos_token_ids: tuple[int, ...] = (2,)
    bos_token_id: int | None = 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads the content of a Hugging Face ``config.json``.

        A null ``eos_token_id`` gives no EOS id; one that is absent gives 2, Llama's default.

        Raises:
            ModelError: a field is missing or has a value of a wrong kind, or one that this implementation does not
                honour is set.
        """
        for field in ("attention_bias", "mlp_bias"):
            if config.get(field):
                raise ModelError(f"config.json: {field}=true is not supported by the Llama model")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"config.json: hidden_act={config['hidden_act']!r} is not supported, only 'silu'")
        heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
        rope = _section(config, "rope_parameters")
        made = cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", hidden // heads),
            rope_theta=_number({**config, **rope}, "rope_theta", 10000.0),
            rope_scaling=_rope_scaling(_section(config, "rope_scaling") or rope),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=_integer(config, "max_position_embeddings", 2048),
            eos_token_ids=_token_ids(config, "eos_token_id", (2,)),
            bos_token_id=next(iter(_token_ids(config, "bos_token_id", ())), None),
        )
        if heads % made.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={made.num_kv_heads}; correct the file"
            )
        return made

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face ``config.json``."""
        scaling = {"rope_type": "llama3", **dict(self.rope_scaling)} if self.rope_scaling else None
        eos = list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else next(iter(self.eos_token_ids), None)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "eos_token_id": eos,
            "bos_token_id": self.bos_token_id,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def parameter_shapes(self) -> Params:
        """Shape of every parameter, as the parameter tree is nested."""
        d, f, count = self.hidden_size, self.intermediate_size, self.num_layers
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layers = {
            "q": (query, d),
            "k": (key, d),
            "v": (key, d),
            "o": (d, query),
            "gate": (f, d),
            "up": (f, d),
            "down": (d, f),
            "input_norm": (d,),
            "post_attention_norm": (d,),
        }
        shapes: Params = {
            "embed": (self.vocab_size, d),
            "layers": {name: (count, *shape) for name, shape in layers.items()},
            "final_norm": (d,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, d)
        return shapes


def _rope_scaling(scaling: Mapping[str, Any]) -> tuple[tuple[str, float], ...] | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"config.json: rope_scaling type {kind!r} is not supported, only 'llama3'")
    names = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
    return tuple((name, _number(scaling, name)) for name in names)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer field; where it is absent or null, the default."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad_field(config, name, "a positive integer")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number field; where it is absent or null, the default."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _bad_field(config, name, "a positive number")
    return float(value)


def _token_ids(config: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A token id or a list of them; none where it is null."""
    value = config.get(name, default)
    ids = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise _bad_field(config, name, "a token id, a list of them, or null")
    return ids


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that holds fields; empty where it is absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise _bad_field(config, name, "an object or null")
    return value


def _bad_field(config: Mapping[str, Any], name: str, expected: str) -> ModelError:
    found = f"{name}={config[name]!r}" if name in config else f"{name} is missing"
    return ModelError(f"config.json: {found}, expected {expected}; correct the file or download the model again")


def rope_frequencies(config: LlamaConfig) -> jax.Array:
    """Rotary frequencies float32 [h/2], with Llama 3's long-context scaling where configured."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    scaling = dict(config.rope_scaling)
    wavelengths = 2 * math.pi / frequencies
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


class Llama(nnx.Module):
    """The model as an NNX module: its parameters are the tree every function below takes.

    >>> model = Llama(config, rngs=nnx.Rngs(0))                      # doctest: +SKIP
    >>> logits = model(token_ids)                                    # doctest: +SKIP
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        self.config = config

        def draw(shape: tuple[int, ...]) -> nnx.Param:
            if len(shape) == 1 or shape == (config.num_layers, config.hidden_size):
                return nnx.Param(jnp.ones(shape, dtype))
            return nnx.Param((jax.random.normal(rngs.params(), shape) * 0.02).astype(dtype))

        shapes = config.parameter_shapes()
        self.embed = draw(shapes["embed"])
        self.layers = nnx.Dict({name: draw(shape) for name, shape in shapes["layers"].items()})
        self.final_norm = draw(shapes["final_norm"])
        if "lm_head" in shapes:
            self.lm_head = draw(shapes["lm_head"])

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Causal logits float32 [B, T, V] of int32 [B, T]."""
        params = model_params(self)
        rows, count = token_ids.shape
        positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
        ends = jnp.full((rows, count), count, jnp.int32)
        return logits(params, hidden_states(self.config, params, token_ids, positions, ends))


def model_params(model: Llama) -> Params:
    """The module's parameters as a plain nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_params(config: LlamaConfig, params: Params) -> Llama:
    """The inverse of :func:`model_params`: a module that holds these very arrays."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(model, state)
    return model


def hidden_states(
    config: LlamaConfig,
    params: Params,
    token_ids: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
    *,
    remat: str = "none",
) -> jax.Array:
    """Final hidden states (after the last norm) of packed rows of token trees.

    Args:
        token_ids: int32 [B, T], each row a forest of tokens in depth-first order.
        positions: int32 [B, T], depth of each token in its tree.
        subtree_end: int32 [B, T], index one past the last descendant. Token i attends to j iff
            ``j <= i < subtree_end[j]``: its ancestors and itself. A plain causal row has T everywhere.
        remat: what the backward pass recomputes: ``none``; ``dots``, all but matrix products; ``full``, each layer.

    Returns:
        [B, T, D].
    """
    angles = positions[:, None, :, None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [B, 1, T, h/2]

    def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        normed = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        x = x + _attention(config, layer, normed, cos, sin, subtree_end)
        return x + _feed_forward(layer, rms_norm(x, layer["post_attention_norm"], config.rms_norm_eps)), None

    if remat != "none":
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat])
    x, _ = jax.lax.scan(body, params["embed"][token_ids], params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """float32 [..., V] of hidden states [..., D]."""
    head = params.get("lm_head", params["embed"])
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm over the last axis, computed in float32 as Hugging Face does."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return weight * scaled.astype(x.dtype)


def _attention(
    config: LlamaConfig, layer: Params, x: jax.Array, cos: jax.Array, sin: jax.Array, subtree_end: jax.Array
) -> jax.Array:
    rows, count, _ = x.shape

    def heads(weight: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, heads, T, h]"""
        return _linear(x, weight).reshape(rows, count, -1, config.head_dim).transpose(0, 2, 1, 3)

    q, k = _rotate(heads(layer["q"]), cos, sin), _rotate(heads(layer["k"]), cos, sin)
    mixed = tree_attention(q, k, heads(layer["v"]), subtree_end)
    return _linear(mixed.transpose(0, 2, 1, 3).reshape(rows, count, -1), layer["o"])


def _feed_forward(layer: Params, x: jax.Array) -> jax.Array:
    return _linear(jax.nn.silu(_linear(x, layer["gate"])) * _linear(x, layer["up"]), layer["down"])


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    # Flat, so that the weight gradient contracts one axis: one plain product on every platform.
    flat = jnp.einsum("nd,od->no", x.reshape(-1, x.shape[-1]), weight)
    return flat.reshape(*x.shape[:-1], -1)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates halves of the last axis (Hugging Face's layout)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
