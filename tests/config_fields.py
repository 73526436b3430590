"""Variations of a model's ``config.json``: each leaves out one field, gives it another value, or
adds one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families import read_config

Raw = dict[str, Any]
NOT_A_FIELD = ("architectures", "model_type", "transformers_version")
ADDED: Raw = {
    "attention_bias": True,
    "attention_multiplier": 0.1,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "is_causal": False,
    "logit_scale": 0.5,
    "mlp_bias": True,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"1": {"rms_norm_eps": 0.1}},
    "query_pre_attn_scalar": 7,
    "rope_local_base_freq": 50.0,
    "rope_theta": 77.0,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "swiglu_limit": 0.3,
    "use_bidirectional_attention": True,
    "use_sliding_window": True,
}
"""Fields that change what some family computes."""
ROPES: list[Raw] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]


def variations(raw: Raw) -> Iterator[tuple[str, Raw]]:
    """Yield a name for each variation, and the whole file: a copy, for transformers writes into
    what it reads.
    """
    yield from _of_section(raw, ())
    for name, value in ADDED.items():
        yield f"{name}={value}, added", copy.deepcopy(raw | {name: value})
    for rope in ROPES:
        yield f"rope_parameters={rope}", copy.deepcopy(raw | {"rope_parameters": rope})
        yield (
            f"rope_scaling={rope}",
            copy.deepcopy({**raw, "rope_parameters": None, "rope_scaling": rope}),
        )


def _of_section(raw: Raw, path: tuple[str, ...]) -> Iterator[tuple[str, Raw]]:
    section = _at(raw, path)
    for name, value in section.items():
        if name in NOT_A_FIELD:
            continue
        label = ".".join((*path, name))
        if isinstance(value, Mapping):
            yield from _of_section(raw, (*path, name))
        without = copy.deepcopy(raw)
        del _at(without, path)[name]
        yield f"without {label}", without
        for other_value in _others(value):
            changed = copy.deepcopy(raw)
            _at(changed, path)[name] = other_value
            yield f"{label}={other_value}", changed


def _at(raw: Raw, path: tuple[str, ...]) -> Raw:
    for name in path:
        raw = raw[name]
    return raw


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 3 + 0.01]
    if isinstance(value, str):
        return ["gelu"]
    if isinstance(value, list):
        return [value[::-1]]
    return [] if isinstance(value, Mapping) else [3, True]


def check_every_field(
    raw: Raw,
    *,
    theirs: Callable[[Raw], np.ndarray],
    resolved: Callable[[Raw], Raw],
    ours: Callable[[DecoderConfig], np.ndarray] | None = None,
) -> int:
    """Compare every variation that is read here with transformers; return the number compared.

    A field that gives the same :class:`DecoderConfig` must not change what transformers computes.

    Args:
        raw: the file.
        theirs: transformers' logits of the same weights under a file; raises what it likes where it
            refuses.
        resolved: the file as transformers understands it, with its defaults.
        ours: logits of the same weights here; None: only the configurations are compared.
    """
    base = read_config(raw)
    compared = 0
    expected = theirs(raw)
    for label, changed in variations(raw):
        try:
            config = read_config(changed)
        except ModelError:
            continue
        if config.parameter_shapes() != base.parameter_shapes():
            continue
        try:
            output = theirs(changed)
        except Exception:
            continue
        compared += 1
        if config == base:
            np.testing.assert_allclose(output, expected, atol=1e-4, err_msg=label)
        elif ours is not None:
            np.testing.assert_allclose(ours(config), output, atol=1e-4, err_msg=label)
        else:
            assert read_config(json.loads(json.dumps(resolved(changed)))) == config, label
    return compared
