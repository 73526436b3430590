"""Trained and frozen parameters of a model, and the modules that forward passes make of them.

::

    params ─┬─► all, or all but the vision tower ──────────────► view: cast to the compute dtype
            └─► adapters (float32, trained, checkpointed)  ─┬──► view: beside the frozen base
                base (compute dtype, or 8 or 4 bits)       ─┴──► merge: one float32 model,
                                                                 for engines and export

Mixed precision keeps float32 master parameters and computes in another dtype (Micikevicius et al.
2018, arXiv 1710.03740). The cast is part of the differentiated program, so gradients are float32
when they are summed and applied: the master parameters keep an update that is smaller than half a
bfloat16 step (1/256 of a weight).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.config import LearnerConfig, LoraConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.critic import Critic, critic_shapes
from jax_agent_rl.learner.optimized_params import View, bind
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.families import FAMILIES
from jax_agent_rl.models.lora import LoRA, linear_targets, quantize, target_parameters
from jax_agent_rl.models.parameters import dtype_of
from jax_agent_rl.models.sharding import adapter_shardings, parameter_shardings, place


def compute_params(params: Params, dtype: str) -> Params:
    """Cast parameters to the forward pass's dtype; float32 returns the very same arrays."""
    target = jnp.dtype(dtype)

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        is_within_quantized = not isinstance(path[-1], jax.tree_util.DictKey)  # codes and scales
        if is_within_quantized or x.dtype == target:
            return x
        return x.astype(dtype_of(path[-1].key, target))

    return jax.tree_util.tree_map_with_path(cast, params)


def target_names(lora: LoraConfig, model: DecoderConfig) -> list[str]:
    """Return the names of the adapted weights in the parameter tree.

    Raises:
        ConfigError: a target this model does not have, or stores in one matrix with others.
    """
    parameters = target_parameters(lora, model)
    missing = [target for target, names in parameters.items() if not names]
    if missing:
        raise ConfigError(
            f"learner.lora.targets: a {model.family} model of this kind has no {', '.join(missing)}"
            f" (experts are not adapted); name some of {', '.join(linear_targets(model))}"
        )

    packed_names = FAMILIES[model.family].packed.keys()
    packed = [target for target, names in parameters.items() if packed_names & set(names)]
    if packed:
        raise ConfigError(
            f"learner.lora.targets: a {model.family} model stores {', '.join(packed)} in one"
            " matrix, for which PEFT has one adapter; name some of"
            f" {', '.join(linear_targets(model))}"
        )
    return list(itertools.chain.from_iterable(parameters.values()))


def new_adapters(lora: LoraConfig, model: DecoderConfig) -> Params:
    """Return new adapters: for each target ``a`` float32 [L, r, in], and ``b`` [L, out, r].

    ``a`` is drawn as PEFT draws it, ``b`` is zero.
    """
    shapes = model.parameter_shapes()["layers"]
    adapters: Params = {}
    for number, name in enumerate(target_names(lora, model)):
        layers, out, inputs = shapes[name]
        bound = 1 / math.sqrt(inputs)
        key = jax.random.fold_in(jax.random.key(lora.seed), number)
        a = jax.random.uniform(key, (layers, lora.rank, inputs), jnp.float32, -bound, bound)
        adapters[name] = {"a": a, "b": jnp.zeros((layers, out, lora.rank), jnp.float32)}
    return {"adapters": adapters}


def frozen_base(
    lora: LoraConfig, model: DecoderConfig, params: Params, compute_dtype: str
) -> Params:
    """Return the frozen parameters below adapters: untrained, they need no float32 masters."""
    base = compute_params(params, compute_dtype)
    if lora.quantize == "none":
        return base
    layers = dict(base["layers"])
    for name in target_names(lora, model):
        layers[name] = quantize(params["layers"][name], lora.quantize)
    return {**base, "layers": layers}


def with_adapters(
    lora: LoraConfig, model: DecoderConfig, base: Params, adapters: Params
) -> Decoder:
    """Return a model over a frozen base with adapters as :func:`new_adapters` returns them."""
    decoder = Decoder.from_params(model, base)
    scale = lora.alpha / lora.rank
    modules = {}
    for name, weights in adapters["adapters"].items():
        modules[name] = LoRA(a=weights["a"], b=weights["b"], scale=scale)
    decoder.adapters = nnx.Dict(modules)
    return decoder


def merge_adapters(decoder: Decoder) -> Params:
    """Return a model's float32 parameters, with its adapters multiplied out and added."""
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Not(nnx.LoRAParam)))
    for name, adapter in decoder.adapters.items():
        params["layers"][name] = adapter.merged(params["layers"][name])
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def _merged(graphdef: nnx.GraphDef, *weights: Params) -> Params:
    return merge_adapters(nnx.merge(graphdef, *weights))


@dataclass(frozen=True, kw_only=True)
class Parameterization:
    """Initial trained and frozen parameters, and how they become a model.

    Attributes:
        params: trained parameters, float32.
        shardings: one per trained parameter.
        frozen: all other parameters; empty if all are trained.
        view: from (trained, frozen) to the model that a forward pass runs.
        merge: from (trained, frozen) to the model's parameters in float32.
    """

    params: Params
    shardings: Any
    frozen: Params
    view: View
    merge: Callable[[Params, Params], Params]

    @classmethod
    def policy(
        cls, model: DecoderConfig, params: Params, config: LearnerConfig, *, mesh: Mesh
    ) -> Parameterization:
        """Return the parameterization of a policy.

        All parameters are trained except the corrections of routers, with
        ``learner.freeze_vision`` all but those and the vision tower, with ``learner.lora`` only
        adapters.

        Args:
            model: the model's hyperparameters.
            params: initial parameters. If they are only shapes, so are the result's.
            config: says what is trained, and the compute dtype.

        Raises:
            ConfigError: the mesh does not divide a parameter, or the model lacks a target or a
                tower to freeze.
        """
        lora = config.lora
        if config.freeze_vision and model.vision is None:
            raise ConfigError(
                f"learner.freeze_vision=true, but a {model.family} model has no vision tower;"
                " leave it out"
            )
        shardings = parameter_shardings(mesh, model.parameter_shapes())
        if lora is None:
            return cls._without_adapters(Decoder, model, params, shardings, config)

        placed = jax.tree.map(place, params, shardings)
        base = _computed(lambda x: frozen_base(lora, model, x, config.compute_dtype), placed)
        make_adapters = functools.partial(new_adapters, lora, model)
        adapters = jax.eval_shape(make_adapters) if _are_shapes(params) else make_adapters()
        decoder = with_adapters(lora, model, base, adapters)
        graphdef, trained, frozen = _split(decoder, nnx.LoRAParam)
        return cls(
            params=trained,
            shardings=adapter_shardings(mesh, trained),
            frozen=frozen,
            view=bind(compute_model, graphdef, config.compute_dtype),
            merge=jax.jit(bind(_merged, graphdef), out_shardings=shardings),
        )

    @classmethod
    def critic(
        cls, model: DecoderConfig, params: Params, config: LearnerConfig, *, mesh: Mesh
    ) -> Parameterization:
        """Return the parameterization of a critic; ``learner.freeze_vision`` freezes its tower.

        Args:
            model: hyperparameters of the policy.
            params: see :func:`critic_params`; arrays or shapes.
        """
        shardings = parameter_shardings(mesh, critic_shapes(model))
        return cls._without_adapters(Critic, model, params, shardings, config)

    @classmethod
    def _without_adapters(
        cls,
        kind: type[Decoder],
        model: DecoderConfig,
        params: Params,
        shardings: Params,
        config: LearnerConfig,
    ) -> Parameterization:
        is_trained: Any = nnx.Param  # no buffer
        if config.freeze_vision:
            is_trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("vision")))
        graphdef, trained, frozen = _split(kind.from_params(model, params), is_trained)
        # A model of shardings is split in the same way as a model of parameters.
        sharding_model = kind.from_params(model, shardings)
        _, trained_shardings, frozen_shardings = _split(sharding_model, is_trained)

        def merge(trained: Params, frozen: Params) -> Params:
            return nnx.to_pure_dict(nnx.state(nnx.merge(graphdef, trained, frozen)))

        return cls(
            params=trained,
            shardings=trained_shardings,
            frozen=jax.tree.map(place, frozen, frozen_shardings),
            view=bind(compute_model, graphdef, config.compute_dtype),
            merge=merge,
        )

    def reference(self) -> tuple[Params, Params]:
        """Return the reference policy: copied initial parameters, and the frozen ones."""
        return jax.tree.map(place, self.params, self.shardings), self.frozen


def compute_model(graphdef: nnx.GraphDef, dtype: str, trained: Params, frozen: Params) -> Any:
    """Return the model of trained and frozen parameters, in the compute dtype.

    Args:
        graphdef: structure of the model.
        dtype: the compute dtype.
        trained: some of its parameters.
        frozen: its other parameters.
    """
    return nnx.merge(graphdef, compute_params(trained, dtype), compute_params(frozen, dtype))


def _split(model: Decoder, is_trained: Any) -> tuple[nnx.GraphDef, Params, Params]:
    """Return a model's structure, the parameters that an nnx filter selects, and all others."""
    graphdef, trained, frozen = nnx.split(model, is_trained, ...)
    return graphdef, nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen)


def _computed(function: Callable[[Params], Params], params: Params) -> Params:
    """Return ``function(params)``.

    If the parameters are only shapes, return the shapes and shardings of the compiled program's
    result.
    """
    program = jax.jit(function)
    if not _are_shapes(params):
        return program(params)
    lowered = program.lower(params)
    return jax.tree.map(place, lowered.out_info, lowered.compile().output_shardings)


def _are_shapes(params: Params) -> bool:
    """Return whether parameters are only shapes, as those of a plan are."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
