"""Training adapters over a frozen model: which parameters are trained, which are only read, and how they are joined.

::

    params ─► split ─► adapters (float32, trained, checkpointed)  ─┬─► joined: what losses and scores are computed of
                       base (compute dtype, or 8 or 4 bits)       ─┴─► merged: a whole model, for engines and export
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.precision import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.lora import Adapted, quantize


def target_names(lora: LoraConfig, model: DecoderConfig) -> list[str]:
    """Names of the adapted weights in the parameter tree.

    Raises:
        ConfigError: a target this model does not have.
    """
    names = [target.removesuffix("_proj") for target in lora.targets]
    there = model.parameter_shapes()["layers"]
    missing = [f"{name}_proj" for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"learner.lora.targets: a {model.family} model of this kind has no {', '.join(missing)} "
            "(experts are not adapted); name others"
        )
    return names


def new_adapters(lora: LoraConfig, model: DecoderConfig) -> Params:
    """For each target ``a`` float32 [L, r, in], drawn as PEFT draws it, and ``b`` [L, out, r], zeros."""
    shapes = model.parameter_shapes()["layers"]
    adapters: Params = {}
    for number, name in enumerate(target_names(lora, model)):
        layers, out, inputs = shapes[name]
        bound = 1 / math.sqrt(inputs)
        key = jax.random.fold_in(jax.random.key(lora.seed), number)
        a = jax.random.uniform(key, (layers, lora.rank, inputs), jnp.float32, -bound, bound)
        adapters[name] = {"a": a, "b": jnp.zeros((layers, out, lora.rank), jnp.float32)}
    return {"adapters": adapters}


def frozen_base(lora: LoraConfig, model: DecoderConfig, params: Params, compute_dtype: str) -> Params:
    """The model's parameters as they are kept: nothing of them is trained, so nothing needs float32 masters."""
    base = compute_params(params, compute_dtype)
    if lora.quantize == "none":
        return base
    quantized = {name: quantize(params["layers"][name], lora.quantize) for name in target_names(lora, model)}
    return {**base, "layers": {**base["layers"], **quantized}}


def joined(lora: LoraConfig, trained: Params, frozen: Params, compute_dtype: str) -> Params:
    """The parameter tree of the forward pass; adapted weights are :class:`Adapted`."""
    return {**frozen, "layers": {**frozen["layers"], **_adapted(lora, compute_params(trained, compute_dtype), frozen)}}


def merged(lora: LoraConfig, trained: Params, frozen: Params) -> Params:
    """A whole float32 model: adapters multiplied out and added to the base."""
    weights = {name: weight.merged() for name, weight in _adapted(lora, trained, frozen).items()}
    rest = {name: x.astype(jnp.float32) for name, x in frozen["layers"].items() if name not in weights}
    top = jax.tree.map(lambda x: x.astype(jnp.float32), {k: x for k, x in frozen.items() if k != "layers"})
    return {**top, "layers": {name: (weights | rest)[name] for name in frozen["layers"]}}


def _adapted(lora: LoraConfig, trained: Params, frozen: Params) -> Mapping[str, Any]:
    scale = lora.alpha / lora.rank
    return {
        name: Adapted(frozen["layers"][name], adapter["a"], adapter["b"], scale)
        for name, adapter in trained["adapters"].items()
    }
