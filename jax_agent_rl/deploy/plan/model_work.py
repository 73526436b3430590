"""What a model itself needs of a call: operations without recomputation; weights and visible keys and values once.

This is the ideal that a program's predicted time is compared with.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.models.config import DecoderConfig


def pass_flops(model: DecoderConfig, tokens: int, *, visible: float, head: bool = True) -> float:
    """Return the operations of a forward pass over one context; a multiplication and an addition are two.

    Args:
        model: the architecture.
        tokens: tokens of the pass.
        visible: positions that a token attends to on average.
        head: logits of every token are computed.
    """
    chosen = 1.0 if model.experts is None else model.experts.per_token / model.experts.count
    matrices = {name: math.prod(shape) for name, shape in model.layer_shapes().items() if len(shape) > 1}
    layer = sum(size * (chosen if name.startswith("expert") else 1) for name, size in matrices.items())
    spans = [
        min(visible, model.sliding_window or visible) if model.is_windowed(i) else visible
        for i in range(model.num_layers)
    ]
    attention = 4 * model.num_heads * model.head_dim * sum(spans)
    return tokens * (2 * (model.num_layers * layer + head * model.vocab_size * model.hidden_size) + attention)


class EngineWork(NamedTuple):
    """What an engine has to compute and read, from its described arrays; all devices together."""

    model: DecoderConfig
    weights: EngineParams
    cache: KVCache

    def of(self, key: tuple) -> tuple[float, float] | None:
        """Return operations and bytes of a program of the engine's table, or of one step; None if it runs no model."""
        if self.model.vision is not None:
            return None
        match key:
            case ("decode", _, width, span):
                return pass_flops(self.model, width, visible=span), self._weights(width) + self._kv(width, span)
            case ("chunks", _, rows, count, span):
                flops = pass_flops(self.model, rows * count, visible=span + (count + 1) / 2, head=False)
                return flops, self._weights(rows * count, head=False) + self._kv(rows, span)
        return None

    def _weights(self, tokens: int, *, head: bool = True) -> float:
        """Return the bytes of all layers' weights, of the experts that so many tokens choose, and of the head."""
        experts, size = self.model.experts, 0.0
        for layer in self.weights.layers:
            for name, weight in layer.items():
                # Each token misses an expert with probability 1 - k / E.
                missed = (
                    0.0
                    if experts is None or not name.startswith("expert")
                    else (1 - experts.per_token / experts.count) ** tokens
                )
                size += _bytes(weight) * (1 - missed)
        return size + head * _bytes(self.weights.embed if self.weights.head is None else self.weights.head)

    def _kv(self, contexts: int, span: int) -> float:
        """Return the bytes of the visible positions; keys and values that are kept twice count once."""
        size = 0.0
        for number, layer in enumerate(self.cache.layers):
            windowed = self.model.is_windowed(number)
            visible = min(span, self.model.sliding_window or span) if windowed else span
            kept = layer.values.shape[1] / self.model.num_kv_heads
            size += contexts * visible * _bytes(layer) / (layer.values.shape[0] * layer.values.shape[2]) / kept
        return size


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
