"""The engine's activations beside the learner's: which layer is the first that differs, and in what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.learner.precision import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.tensor_samples import LayerOutput

IDS = 256
"""Of a context that both run."""
SLACK = {"float32": 1e-3, "tf32": 0.02, "float16": 0.02}
"""How far activations may be off, as a part of their size; 0.1 in what is coarser."""


@dataclass(frozen=True, kw_only=True)
class LayerFault:
    """The first layer that differs.

    Attributes:
        layer: its number; -1 for the embeddings.
        parts: of ``keys``, ``values`` and ``hidden`` those that differ.
        apart: the largest difference, as a part of the activations' size.
    """

    layer: int
    parts: tuple[str, ...]
    apart: float

    @property
    def detail(self) -> str:
        """In words."""
        if self.layer < 0:
            return f"the embeddings differ already, by {self.apart:.1%} of their size"
        before = "the embeddings agree" if not self.layer else f"the embeddings and layers 0 to {self.layer - 1} agree"
        if self.parts == ("keys", "hidden") or self.parts == ("keys",):
            what = "its keys differ and its values do not: rotary settings, positions, or the keys' weights"
        elif self.parts == ("hidden",):
            what = (
                "its keys and values agree and its output does not: queries, window, output projection, or what follows"
            )
        elif self.parts == ("values", "hidden") or self.parts == ("values",):
            what = "its values differ and its keys do not: the values' weights"
        else:
            what = "its keys and values differ: their weights, or the norm before them"
        return f"{before}; layer {self.layer} is the first that differs, by {self.apart:.1%} of its size: {what}"


def learner_outputs(model: DecoderConfig, params: Params, dtype: str, token_ids: Sequence[int]) -> list[LayerOutput]:
    """What the learner's layers make of a context."""
    count = len(token_ids)
    shape = (1, -(-count // 128) * 128)
    ids = np.zeros(shape, np.int32)
    ids[0, :count] = token_ids
    inputs = forward.Inputs(
        token_ids=ids, positions=np.arange(shape[1], dtype=np.int32)[None], fresh=np.ones(shape, bool)
    )
    made = forward.activations(model, compute_params(params, dtype), inputs)
    embedded, hidden, keys, values = (
        np.asarray(x.astype(jnp.float32)) for x in (made.embedded, made.hidden, made.keys, made.values)
    )
    outputs = [LayerOutput(hidden=embedded[0, :count])]
    for i in range(model.num_layers):
        own_keys, own_values = (x[i, 0, :, :count].transpose(1, 0, 2) for x in (keys, values))
        outputs.append(LayerOutput(hidden=hidden[i, 0, :count], keys=own_keys, values=own_values))
    return outputs


def first_difference(
    engine: Sequence[LayerOutput], learner: Sequence[LayerOutput], *, precision: str
) -> LayerFault | None:
    """The first layer of which the engine's output is not the learner's; None if all are.

    Args:
        precision: the coarser one of both.
    """
    slack = SLACK.get(precision, 0.1)
    for i, (theirs, own) in enumerate(zip(engine, learner, strict=True)):
        pairs = {
            "keys": (_unrepeated(theirs.keys, own.keys), own.keys),
            "values": (_unrepeated(theirs.values, own.values), own.values),
            "hidden": (theirs.hidden, own.hidden),
        }
        apart = {name: _apart(a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
        parts = tuple(name for name, value in apart.items() if not value <= slack)
        if parts:
            return LayerFault(layer=i - 1, parts=parts, apart=max(apart[part] for part in parts))
    return None


def _unrepeated(x: np.ndarray | None, like: np.ndarray | None) -> np.ndarray | None:
    """Heads [T, K, h] of an engine that keeps each several times."""
    return x if x is None or like is None else x[:, :: x.shape[1] // like.shape[1]]


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    size = float(np.sqrt(np.mean(np.square(b, dtype=np.float64))))
    return float(np.abs(a - b).max()) / max(size, 1e-30)
