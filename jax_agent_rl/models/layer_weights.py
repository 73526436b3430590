"""One layer's part of a decoder's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh

from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.models.layers import apart, linear, rms_norm
from jax_agent_rl.models.lora import LoRA


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The parameters of one layer, and what multiplies with them.

    Attributes:
        kind: what the layer computes.
        params: ``config.kind_shapes(kind)``; matrices may be quantized.
        adapters: by name of the matrix.
        mesh: splits rows, tokens and experts; None on one device.
    """

    config: DecoderConfig
    kind: LayerKind
    params: Params
    adapters: Mapping[str, LoRA] = field(default_factory=dict)
    mesh: Mesh | None = None

    def linear(self, name: str, x: jax.Array, *, by_head: bool = False) -> jax.Array:
        """Apply the matrix ``name``, its adapter, and the bias ``name_bias`` if there is one.

        For ``by_head`` see :func:`~jax_agent_rl.models.layers.linear`.
        """
        y = linear(x, self.params[name], self.mesh, self.adapters.get(name), by_head=by_head)
        bias = self.params.get(f"{name}_bias")
        if bias is None:
            return y
        return y + bias

    def norm(self, name: str | None, x: jax.Array) -> jax.Array:
        """Apply the RMS norm ``name`` over the last axis; None for none."""
        if name is None:
            return x
        return apart(rms_norm(self.config, x, self.params[name]))
