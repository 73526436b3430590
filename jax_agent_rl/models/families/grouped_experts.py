"""Mixtures of experts as DeepSeek-V3 names their fields, which other families have taken over.

Some of the first layers are dense. Behind them each layer has a shared expert, and a router that
scores each expert by itself, with a correction, and may choose among groups of them.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import Experts
from jax_agent_rl.models.families.hf_config import (
    Fields,
    bad_field,
    integer,
    number,
    refuse,
    switch,
)

_PREDICTION_LAYER_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers")
"""Names of the number of layers that predict further tokens: their tensors are not read, and not
written."""


def read_grouped_experts(raw: Fields, num_layers: int, defaults: Experts) -> Experts:
    """Read the mixture of a ``config.json``.

    Args:
        defaults: what transformers takes for fields that are absent.

    Raises:
        ModelError: a field is of a wrong type, or the fields do not fit each other.
    """
    for name in _PREDICTION_LAYER_COUNTS:
        raw.get(name)  # read only to count as known

    count = integer(raw, "n_routed_experts", defaults.count)
    refuse(raw, num_local_experts=count)  # another name of the same
    size = integer(raw, "moe_intermediate_size", defaults.intermediate_size)
    experts = Experts(
        count=count,
        per_token=integer(raw, "num_experts_per_tok", defaults.per_token),
        intermediate_size=size,
        normalize=switch(raw, "norm_topk_prob", defaults.normalize),
        first_dense_layers=integer(
            raw, "first_k_dense_replace", defaults.first_dense_layers, least=0
        ),
        scoring="sigmoid",
        correction=True,
        groups=integer(raw, "n_group", defaults.groups),
        groups_per_token=integer(raw, "topk_group", defaults.groups_per_token),
        scale=number(raw, "routed_scaling_factor", defaults.scale),
        shared_size=size * integer(raw, "n_shared_experts", 1),
    )
    _check(raw, experts, num_layers)
    return experts


def _check(raw: Fields, experts: Experts, num_layers: int) -> None:
    """Check that numbers of layers, experts and groups fit each other."""
    if experts.first_dense_layers >= num_layers:
        raise bad_field(raw, "first_k_dense_replace", f"less than num_hidden_layers={num_layers}")
    if experts.count % experts.groups or experts.count < 2 * experts.groups:
        raise ModelError(
            f"config.json: n_routed_experts={experts.count} do not make n_group={experts.groups}"
            " groups of one size, of at least two; correct the file"
        )
    if experts.groups_per_token > experts.groups:
        raise bad_field(raw, "topk_group", f"at most n_group={experts.groups}")
    candidates = experts.groups_per_token * (experts.count // experts.groups)
    if experts.per_token > candidates:
        raise bad_field(
            raw, "num_experts_per_tok", f"at most the {candidates} experts of topk_group groups"
        )


def write_grouped_experts(experts: Experts) -> dict[str, Any]:
    """Return the fields of a ``config.json``."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "first_k_dense_replace": experts.first_dense_layers,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        **dict.fromkeys(_PREDICTION_LAYER_COUNTS, 0),
    }
