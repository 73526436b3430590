"""What of a model is trained: all of it, its decoder, or adapters over it. The learner reads each through the same
functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.lora import frozen_base, joined, merged, new_adapters
from jax_agent_rl.learner.optimized_params import View
from jax_agent_rl.learner.precision import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import adapter_shardings, parameter_shardings, place


@dataclass(frozen=True, kw_only=True)
class Parameterization:
    """Parameters at the start of a run, and how they become a model.

    Attributes:
        params: the trained ones, float32.
        shardings: theirs.
        frozen: the others; empty if all are trained.
        view: what a forward pass reads, from (trained, frozen).
        whole: the model in float32, from (trained, frozen).
    """

    params: Params
    shardings: Any
    frozen: Params
    view: View
    whole: Callable[[Params, Params], Params]

    @classmethod
    def of(cls, model: DecoderConfig, params: Params, config: LearnerConfig, *, mesh: Mesh) -> Parameterization:
        """Everything, with ``learner.freeze_vision`` all but the tower, or with ``learner.lora`` adapters.

        Args:
            params: initial parameters. If they are only described (by shapes), so are the result's.

        Raises:
            ConfigError: the mesh does not divide a parameter, or the model lacks a target, or a tower to freeze.
        """
        dtype, lora = config.compute_dtype, config.lora
        if config.freeze_vision and model.vision is None:
            raise ConfigError(
                f"learner.freeze_vision=true, but a {model.family} model has nothing that reads pictures; leave it out"
            )
        shardings = parameter_shardings(mesh, model.parameter_shapes())
        if lora is None:
            trained, frozen, shardings = divided(params, shardings, freeze_vision=config.freeze_vision)
            return cls(
                params=trained,
                shardings=shardings,
                frozen=frozen,
                view=functools.partial(plain_view, dtype=dtype),
                whole=lambda trained, frozen: {**trained, **frozen},
            )
        adapters = new_adapters(lora, model)
        placed = jax.tree.map(place, params, shardings)
        return cls(
            params=adapters,
            shardings=adapter_shardings(mesh, adapters),
            frozen=_computed(lambda x: frozen_base(lora, model, x, dtype), placed),
            view=lambda trained, frozen: joined(lora, trained, frozen, dtype),
            whole=jax.jit(functools.partial(merged, lora), out_shardings=shardings),
        )

    def reference(self) -> tuple[Params, Params]:
        """A copy of what is trained, as it is now, and what is frozen: new adapters are the model itself."""
        return jax.tree.map(place, self.params, self.shardings), self.frozen


def _computed(function: Callable[[Params], Params], params: Params) -> Params:
    """``function(params)``; of described parameters what the compiled program would give, and where."""
    run = jax.jit(function)
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
        return run(params)
    lowered = run.lower(params)
    return jax.tree.map(place, lowered.out_info, lowered.compile().output_shardings)


def divided(params: Params, shardings: Any, *, freeze_vision: bool) -> tuple[Params, Params, Any]:
    """What is trained, what is not (the tower, which then takes no optimizer state either; laid out), and the first
    one's shardings.
    """
    if not freeze_vision:
        return params, {}, shardings
    trained, places = ({name: x for name, x in tree.items() if name != "vision"} for tree in (params, shardings))
    return trained, jax.tree.map(place, {"vision": params["vision"]}, {"vision": shardings["vision"]}), places


def plain_view(trained: Params, frozen: Params, *, dtype: str) -> Params:
    """All parameters in the compute type."""
    return compute_params({**trained, **frozen}, dtype)
