"""One layer of an engine: its arrays, and the LoRA adapters that are added to their products.

Shapes as in ``jetstream.forward``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from jax_agent_rl.jetstream.adapters import LayerAdapters, add_low_rank, low_rank_by_head
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import product, product_by_head, rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedLayer:
    """One layer's arrays, its adapters, and each context's choice of them.

    Attributes:
        adapter: int32 [B], see ``adapters.add_low_rank``; None if there are none.
        native: use ``jetstream.cpu``.
    """

    params: Params
    adapters: LayerAdapters
    adapter: jax.Array | None
    native: bool = field(default=False, metadata={"static": True})

    def multiply(
        self, config: DecoderConfig, name: str, x: jax.Array, norm: str | None = None
    ) -> jax.Array:
        """Multiply a matrix with x [in, B] -> [..., out, B].

        Args:
            config: the model, for the norm.
            name: name of the matrix.
            x: the columns.
            norm: name of the RMS norm that is applied to ``x`` first; None for none.
        """
        scale = None if norm is None else self.params[norm]
        if scale is not None and (self.is_adapted(name) or not self.native):
            # Adapters read the normalized columns, which the native product would not return.
            x = rms_norm(config, x, scale, axis=0)
            scale = None

        weight = self.params[name]
        out = cpu_kernels.product(config, weight, x, scale) if self.native else product(weight, x)
        if self.adapter is None or name not in self.adapters:
            return out
        return add_low_rank(out, self.adapters[name], x, self.adapter, native=self.native)

    def multiply_heads(self, name: str, x: jax.Array) -> jax.Array:
        """Multiply each head's matrix of ``k_b`` or ``v_b`` with its x [H, in, B] -> [H, out, B].

        Both are parts of ``kv_b``, and so are their adapters.
        """
        out = product_by_head(self.params[name], x)
        if not self.is_adapted("kv_b"):
            return out
        assert self.adapter is not None
        return out + low_rank_by_head(self.adapters["kv_b"], name, x, self.adapter)

    def is_adapted(self, name: str) -> bool:
        return self.adapter is not None and name in self.adapters
