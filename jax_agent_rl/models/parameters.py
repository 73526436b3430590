"""What every parameter of a model is: its kind, and what its axes stand for.

Parameters are known by their name in the parameter tree::

    layers.expert_gate        axes = ("layers", "experts", "mlp", "embed")      kind = matrix
                                      └── stacks ────────┘  └ out   └ in
    layers.expert_gate_bias   axes = ("layers", "experts", "mlp")               kind = bias

An array's number of axes says nothing about what it is: layers and experts are stacked, so that a
bias may have three axes and a matrix four. This module is the one place that says whether a
parameter is a matrix (for the optimizer, quantization, adapters, initial values), and what an axis
is (for sharding, see ``models.sharding.RULES``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.utils.weight_transfer import FLOAT32_PARAMETERS, rounded

STACKS = ("layers", "experts")
"""Axes that stack parameters of equal shape. They come first."""


class Kind(StrEnum):
    """What a parameter does in the model."""

    MATRIX = "matrix"
    """Of a linear layer, [.., out, in]."""
    EMBEDDING = "embedding"
    """Rows that are looked up, or the map from something else to such a row."""
    HEAD = "head"
    """Maps the last hidden states to logits or to a value."""
    ROUTER = "router"
    """Scores the experts. A matrix by shape, but its rows are compared with each other, one per
    expert."""
    CORRECTION = "correction"
    """Of the experts' probabilities, for their choice alone. No gradient reaches it."""
    CONVOLUTION = "convolution"
    """Weights of each channel's last inputs."""
    DECAY = "decay"
    """Of a recurrent state, by head."""
    BIAS = "bias"
    NORM = "norm"
    PLAIN_NORM = "plain_norm"
    """A norm that multiplies by its weight, whatever the model's ``norm_offset``."""
    FACTOR = "factor"
    """Multiplies the weights of an expert."""
    SINK = "sink"
    """A further score of each head's softmax."""
    CONSTANT = "constant"
    """A number that training leaves as it is."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's kind, and the logical axes of its array, the ones in ``STACKS`` first."""

    kind: Kind
    axes: tuple[str, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether each element of the stack is the matrix of a linear layer.

        The matrix has the last two axes then.
        """
        return self.kind is Kind.MATRIX

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer may change it."""
        return self.kind not in (Kind.CORRECTION, Kind.CONSTANT)

    @property
    def is_of_experts(self) -> bool:
        """Whether there is one for each expert."""
        return "experts" in self.axes


def _matrix(*axes: str) -> Parameter:
    return Parameter(Kind.MATRIX, axes)


def _bias(*axes: str) -> Parameter:
    return Parameter(Kind.BIAS, axes)


def _norm(*axes: str) -> Parameter:
    return Parameter(Kind.NORM, axes)


PARAMETERS: dict[str, Parameter] = {
    "embed": Parameter(Kind.EMBEDDING, ("vocab", "embed")),
    "lm_head": Parameter(Kind.HEAD, ("vocab", "embed")),
    "final_norm": _norm("norm"),
    "value_head": Parameter(Kind.HEAD, ("norm",)),
    "q": _matrix("layers", "heads", "embed"),
    "k": _matrix("layers", "heads", "embed"),
    "v": _matrix("layers", "heads", "embed"),
    "o": _matrix("layers", "embed", "heads"),
    "q_bias": _bias("layers", "heads"),
    "k_bias": _bias("layers", "heads"),
    "v_bias": _bias("layers", "heads"),
    "o_bias": _bias("layers", "norm"),
    "q_a": _matrix("layers", "latent", "embed"),
    "q_b": _matrix("layers", "heads", "latent"),
    "kv_a": _matrix("layers", "latent", "embed"),
    "kv_b": _matrix("layers", "heads", "latent"),
    "q_a_norm": _norm("layers", "norm"),
    "kv_a_norm": _norm("layers", "norm"),
    "sinks": Parameter(Kind.SINK, ("layers", "heads")),
    "q_norm": _norm("layers", "norm"),
    "k_norm": _norm("layers", "norm"),
    "delta_qkv": _matrix("layers", "heads", "embed"),
    "delta_z": _matrix("layers", "heads", "embed"),
    "delta_b": _matrix("layers", "heads", "embed"),
    "delta_a": _matrix("layers", "heads", "embed"),
    "delta_qkvz": _matrix("layers", "heads", "embed"),
    "delta_ba": _matrix("layers", "heads", "embed"),
    "delta_conv": Parameter(Kind.CONVOLUTION, ("layers", "heads", "kernel", "kernel")),
    "delta_decay_log": Parameter(Kind.DECAY, ("layers", "heads")),
    "delta_decay_bias": Parameter(Kind.DECAY, ("layers", "heads")),
    "delta_norm": Parameter(Kind.PLAIN_NORM, ("layers", "norm")),
    "delta_out": _matrix("layers", "embed", "heads"),
    "gate": _matrix("layers", "mlp", "embed"),
    "up": _matrix("layers", "mlp", "embed"),
    "down": _matrix("layers", "embed", "mlp"),
    "router": Parameter(Kind.ROUTER, ("layers", "choices", "embed")),
    "router_bias": _bias("layers", "choices"),
    "router_correction": Parameter(Kind.CORRECTION, ("layers", "choices")),
    "router_norm": _norm("layers", "norm"),
    "router_factors": Parameter(Kind.FACTOR, ("layers", "choices")),
    "expert_gate": _matrix("layers", "experts", "mlp", "embed"),
    "expert_up": _matrix("layers", "experts", "mlp", "embed"),
    "expert_down": _matrix("layers", "experts", "embed", "mlp"),
    "expert_gate_bias": _bias("layers", "experts", "mlp"),
    "expert_up_bias": _bias("layers", "experts", "mlp"),
    "expert_down_bias": _bias("layers", "experts", "norm"),
    "shared_gate": _matrix("layers", "mlp", "embed"),
    "shared_up": _matrix("layers", "mlp", "embed"),
    "shared_down": _matrix("layers", "embed", "mlp"),
    "shared_router": Parameter(Kind.ROUTER, ("layers", "choices", "embed")),
    "input_norm": _norm("layers", "norm"),
    "post_attention_norm": _norm("layers", "norm"),
    "pre_feedforward_norm": _norm("layers", "norm"),
    "post_feedforward_norm": _norm("layers", "norm"),
    # Experts beside a dense network (Experts.beside_dense).
    "post_dense_norm": _norm("layers", "norm"),
    "pre_experts_norm": _norm("layers", "norm"),
    "post_experts_norm": _norm("layers", "norm"),
    # Layers that are not windowed, where their heads are others (DecoderConfig.global_attention).
    "global_q": _matrix("layers", "heads", "embed"),
    "global_k": _matrix("layers", "heads", "embed"),
    "global_v": _matrix("layers", "heads", "embed"),
    "global_o": _matrix("layers", "embed", "heads"),
    "global_q_norm": _norm("layers", "norm"),
    "global_k_norm": _norm("layers", "norm"),
    # Networks of twice the size (DecoderConfig.wide_shared_layers).
    "wide_gate": _matrix("layers", "mlp", "embed"),
    "wide_up": _matrix("layers", "mlp", "embed"),
    "wide_down": _matrix("layers", "embed", "mlp"),
    # models.per_layer_inputs
    "per_layer_embed": Parameter(Kind.EMBEDDING, ("vocab", "embed")),
    "per_layer_model_projection": Parameter(Kind.EMBEDDING, ("patch", "embed")),
    "per_layer_model_norm": _norm("norm"),
    "per_layer_gate": _matrix("layers", "choices", "embed"),
    "per_layer_projection": _matrix("layers", "embed", "choices"),
    "post_per_layer_norm": _norm("layers", "norm"),
    "layer_scalar": Parameter(Kind.CONSTANT, ("layers", "norm")),
}
"""Parameters of decoders and critics."""

VISION_PARAMETERS: dict[str, Parameter] = {
    "patch_embed": Parameter(Kind.EMBEDDING, ("embed", "patch", "patch", "patch", "patch")),
    "patch_embed_bias": _bias("norm"),
    "positions": Parameter(Kind.EMBEDDING, ("patch", "embed")),
    "qkv": _matrix("layers", "heads", "embed"),
    "qkv_bias": _bias("layers", "heads"),
    "o": _matrix("layers", "embed", "heads"),
    "o_bias": _bias("layers", "norm"),
    "gate": _matrix("layers", "tower_mlp", "embed"),
    "up": _matrix("layers", "tower_mlp", "embed"),
    "down": _matrix("layers", "embed", "tower_mlp"),
    "gate_bias": _bias("layers", "tower_mlp"),
    "up_bias": _bias("layers", "tower_mlp"),
    "down_bias": _bias("layers", "norm"),
    "input_norm": _norm("layers", "norm"),
    "input_norm_bias": _bias("layers", "norm"),
    "post_attention_norm": _norm("layers", "norm"),
    "post_attention_norm_bias": _bias("layers", "norm"),
    "deepstack_norm": _norm("layers", "norm"),
    "deepstack_norm_bias": _bias("layers", "norm"),
    "deepstack_in": _matrix("layers", "mlp", "embed"),
    "deepstack_in_bias": _bias("layers", "mlp"),
    "deepstack_out": _matrix("layers", "embed", "mlp"),
    "deepstack_out_bias": _bias("layers", "norm"),
    "merger_norm": _norm("norm"),
    "merger_norm_bias": _bias("norm"),
    "merger_in": _matrix("mlp", "embed"),
    "merger_in_bias": _bias("mlp"),
    "merger_out": _matrix("embed", "mlp"),
    "merger_out_bias": _bias("norm"),
}
"""Parameters of vision towers, the subtree ``vision``.

Deepstack layers are stacked as ``layers`` are.
"""


def parameter_at(path: Sequence[Any]) -> Parameter:
    """Return the parameter at a path of the parameter tree, or of a tree of LoRA adapters.

    Args:
        path: names, or jax's keys of them: ``layers.q``, ``vision.layers.up``, ``adapters.q.a``.

    Raises:
        ValueError: no parameter of that name is known.
    """
    names = [str(getattr(key, "key", key)) for key in path]
    table = VISION_PARAMETERS if names[0] == "vision" else PARAMETERS
    if names[0] == "adapters":
        name = names[1]
        part = names[-1]
    else:
        name = names[-1]
        part = None
    if name not in table or part not in (None, "a", "b"):
        raise ValueError(
            f"no parameter is called {'.'.join(names)!r}; add it to models.parameters with its"
            " meaning"
        )
    parameter = table[name]
    if part is None:
        return parameter

    *stacks, out, inputs = parameter.axes
    if part == "a":
        return _matrix(*stacks, "rank", inputs)
    return _matrix(*stacks, out, "rank")


def leaves_by_key(params: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a parameter tree, each with its own name, in jax's order."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append((path[-1].key, leaf))
    return leaves


def dtype_of(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of a parameter of this name in a model of ``dtype``."""
    if name in FLOAT32_PARAMETERS:
        return jnp.dtype(jnp.float32)
    return dtype


def cast_params(params: Any, dtype: jnp.dtype) -> Any:
    """Return a parameter tree in a dtype, except for ``FLOAT32_PARAMETERS``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(dtype_of(path[-1].key, dtype)), params
    )


def rounded_params(params: Any, dtype: str) -> Any:
    """Return a parameter tree in the dtype of a transfer, see ``weight_transfer.rounded``."""
    return jax.tree_util.tree_map_with_path(lambda path, x: rounded(x, dtype, path[-1].key), params)
