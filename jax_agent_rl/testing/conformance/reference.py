"""Correct answers from full forward passes in float64, without a cache, a batch or an engine.

Shapes: T ids of a context, S sampled ids, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jax_agent_rl.errors import ConfigError

_EDGE = 1e-4
"""Relative slack of the nucleus mass: an engine that sums in float32 may cut one id earlier or later."""


class Reference(Protocol):
    """A model whose logits are taken as correct."""

    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        """Return float64 logits [T, V] of a weight set; row t scores what follows ``ids[: t + 1]``."""
        ...

    def router_scores(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        """Return the float64 scores [T, L, E] of a mixture's routers, for ``Capabilities.routed_experts``."""
        ...


class TransformersReference:
    """Hugging Face transformers on the CPU.

    Args:
        folders: model folders by name of the weight set.

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise ConfigError("the reference runs on torch: pip install 'jax_agent_rl[conformance]'") from None
        self._folders = dict(folders)
        self._models: dict[str, Any] = {}

    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self._model(weights)(torch.tensor([list(ids)])).logits[0].double().numpy()

    def router_scores(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        import torch

        with torch.inference_mode():
            layers = self._model(weights)(torch.tensor([list(ids)]), output_router_logits=True).router_logits
        return torch.stack([scores.reshape(len(ids), -1) for scores in layers], dim=1).double().numpy()

    def _model(self, weights: str) -> Any:
        if weights not in self._models:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
            from transformers.utils import logging

            logging.disable_progress_bar()
            folder = self._folders[weights]
            seeing = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
            kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
            plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch's groups lack float64
            model = kind.from_pretrained(folder, dtype=torch.float64, **plain)
            self._models[weights] = model.eval()
        return self._models[weights]


def predictions(reference: Reference, prompt: Sequence[int], sampled: Sequence[int], weights: str) -> np.ndarray:
    """Return the logits, float64 [S, V], from which each sampled id was drawn."""
    if not sampled:
        raise ValueError("no id was sampled: there is nothing to compare")
    return reference.logits([*prompt, *sampled[:-1]], weights=weights)[len(prompt) - 1 :]


def greedy_gaps(logits_SV: np.ndarray, sampled: Sequence[int]) -> np.ndarray:
    """Return how far each sampled id is below the most likely one, in nats, float64 [S]; 0 is greedy."""
    return logits_SV.max(axis=-1) - logits_SV[np.arange(len(sampled)), list(sampled)]


def expected_logprobs(
    logits_SV: np.ndarray,
    sampled: Sequence[int],
    got: Sequence[float],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Return the log-probs, float64 [S], of sampled ids under the distribution they should be drawn from.

    With ``top_p`` < 1 or ``min_p`` the ids that are kept may differ by the one at the edge, so of the few possible
    answers the one nearest to ``got`` is returned. Ids outside the distribution get -inf.
    """
    scaled = logits_SV / (temperature or 1.0)
    rows = np.arange(len(sampled))
    options = []
    masses = {top_p, min(1.0, top_p * (1 + _EDGE)), top_p * (1 - _EDGE)} if top_p < 1 else {1.0}
    for mass, least in itertools.product(masses, {min_p, min_p * (1 + _EDGE), min_p * (1 - _EDGE)}):
        kept = truncate(scaled, top_p=mass, top_k=top_k, min_p=min(least, 1.0))
        options.append(log_softmax(kept)[rows, list(sampled)])
    stacked = np.stack(options)
    distance = np.abs(np.where(np.isfinite(stacked), stacked, -1e9) - np.asarray(got))
    return stacked[distance.argmin(axis=0), rows]


def truncate(scaled_SV: np.ndarray, *, top_p: float, top_k: int, min_p: float = 0.0) -> np.ndarray:
    """Set logits below min-p, then outside the top-k, and then outside the nucleus of the rest, to -inf."""
    out = scaled_SV.copy()
    if min_p:
        out[out < out.max(axis=-1, keepdims=True) + np.log(min_p)] = -np.inf
    if top_k:
        kth = np.sort(out, axis=-1)[:, -min(top_k, out.shape[1])]
        out[out < kth[:, None]] = -np.inf
    if top_p < 1:
        order = np.argsort(-out, axis=-1)
        probs = np.take_along_axis(np.exp(log_softmax(out)), order, axis=-1)
        before = np.cumsum(probs, axis=-1) - probs  # mass of the more likely ids: an id is in while it is < top_p
        dropped = np.zeros(out.shape, bool)
        np.put_along_axis(dropped, order, before >= top_p, axis=-1)
        out[dropped] = -np.inf
    return out


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return log-probs over the last axis; -inf stays -inf."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
