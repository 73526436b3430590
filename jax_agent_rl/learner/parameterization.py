"""Which parameters of a model are trained, and how trained and frozen ones become what a forward pass reads.

::

    params ─┬─► all, or all but the vision tower ──────────────────► view: cast to the compute dtype
            └─► adapters (float32, trained, checkpointed)  ─┬─► view: joined with the frozen base
                base (compute dtype, or 8 or 4 bits)       ─┴─► merge: one float32 model, for engines and export

Mixed precision keeps float32 master parameters and computes in another dtype (Micikevicius et al. 2018, arXiv
1710.03740). The cast is part of the differentiated program, so gradients come back, are summed and are applied in
float32: the master parameters keep an update smaller than half a bfloat16 step (1/256 of a weight).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.config import LearnerConfig, LoraConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.optimized_params import View
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.lora import Adapted, quantize
from jax_agent_rl.models.sharding import adapter_shardings, parameter_shardings, place

FLOAT32_ALWAYS = frozenset({"value_head"})  # values are regressed to, not sampled from: they are read in full


def compute_params(params: Params, dtype: str) -> Params:
    """Cast parameters to the forward pass's dtype; float32 returns the very same arrays."""
    target = jnp.dtype(dtype)

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        return x if x.dtype == target or path[-1].key in FLOAT32_ALWAYS else x.astype(target)

    return jax.tree_util.tree_map_with_path(cast, params)


def target_names(lora: LoraConfig, model: DecoderConfig) -> list[str]:
    """Return the names of the adapted weights in the parameter tree.

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
    """Return for each target ``a`` float32 [L, r, in], drawn as PEFT draws it, and ``b`` [L, out, r], zeros."""
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
    """Return the frozen parameters below adapters: untrained, they need no float32 masters."""
    base = compute_params(params, compute_dtype)
    if lora.quantize == "none":
        return base
    quantized = {name: quantize(params["layers"][name], lora.quantize) for name in target_names(lora, model)}
    return {**base, "layers": {**base["layers"], **quantized}}


def joined(lora: LoraConfig, trained: Params, frozen: Params, compute_dtype: str) -> Params:
    """Return the parameter tree of the forward pass; adapted weights are :class:`Adapted`."""
    return {**frozen, "layers": {**frozen["layers"], **_adapted(lora, compute_params(trained, compute_dtype), frozen)}}


def merged(lora: LoraConfig, trained: Params, frozen: Params) -> Params:
    """Return a float32 model: adapters multiplied out and added to the base."""
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


@dataclass(frozen=True, kw_only=True)
class Parameterization:
    """Initial trained and frozen parameters, and how they become a model.

    Attributes:
        params: the trained ones, float32.
        shardings: theirs.
        frozen: the others; empty if all are trained.
        view: what a forward pass reads, from (trained, frozen).
        merge: the model in float32, from (trained, frozen).
    """

    params: Params
    shardings: Any
    frozen: Params
    view: View
    merge: Callable[[Params, Params], Params]

    @classmethod
    def of(cls, model: DecoderConfig, params: Params, config: LearnerConfig, *, mesh: Mesh) -> Parameterization:
        """Select all parameters, with ``learner.freeze_vision`` all but the tower, or with ``learner.lora`` adapters.

        Args:
            model: the model's hyperparameters.
            params: initial parameters; if they are only shapes, so are the result's.
            config: what to train, and the compute dtype.
            mesh: of the learner.

        Raises:
            ConfigError: the mesh does not divide a parameter, or the model lacks a target, or a tower to freeze.
        """
        dtype, lora = config.compute_dtype, config.lora
        if config.freeze_vision and model.vision is None:
            raise ConfigError(
                f"learner.freeze_vision=true, but a {model.family} model has no vision tower; leave it out"
            )
        shardings = parameter_shardings(mesh, model.parameter_shapes())
        if lora is None:
            trained, frozen, shardings = split_trained(params, shardings, freeze_vision=config.freeze_vision)
            return cls(
                params=trained,
                shardings=shardings,
                frozen=frozen,
                view=functools.partial(plain_view, dtype=dtype),
                merge=lambda trained, frozen: {**trained, **frozen},
            )
        adapters = new_adapters(lora, model)
        placed = jax.tree.map(place, params, shardings)
        return cls(
            params=adapters,
            shardings=adapter_shardings(mesh, adapters),
            frozen=_computed(lambda x: frozen_base(lora, model, x, dtype), placed),
            view=lambda trained, frozen: joined(lora, trained, frozen, dtype),
            merge=jax.jit(functools.partial(merged, lora), out_shardings=shardings),
        )

    def reference(self) -> tuple[Params, Params]:
        """Return the reference policy: a copy of the initial trained parameters, and the frozen ones."""
        return jax.tree.map(place, self.params, self.shardings), self.frozen


def _computed(function: Callable[[Params], Params], params: Params) -> Params:
    """Return ``function(params)``; for mere shapes, those of the compiled program's result and its shardings."""
    run = jax.jit(function)
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
        return run(params)
    lowered = run.lower(params)
    return jax.tree.map(place, lowered.out_info, lowered.compile().output_shardings)


def split_trained(params: Params, shardings: Any, *, freeze_vision: bool) -> tuple[Params, Params, Any]:
    """Split parameters into trained and frozen ones (the vision tower, placed); also return the former's shardings."""
    if not freeze_vision:
        return params, {}, shardings
    trained, places = ({name: x for name, x in tree.items() if name != "vision"} for tree in (params, shardings))
    return trained, jax.tree.map(place, {"vision": params["vision"]}, {"vision": shardings["vision"]}), places


def plain_view(trained: Params, frozen: Params, *, dtype: str) -> Params:
    """Return all parameters in the compute dtype."""
    return compute_params({**trained, **frozen}, dtype)
