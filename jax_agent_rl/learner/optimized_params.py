"""One set of parameters with its optimizer: the policy, and for PPO the critic.

::

    for each micro-batch:  gradients += d loss   (fixed shapes, one program)
    apply:                 clip, the optimizer   (a non-finite gradient changes nothing, to the bit)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import NonFiniteError
from jax_agent_rl.learner.optimizer import TrainState, check_patterns, make_optimizer
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import place
from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)

Arrays = dict[str, jax.Array]
Statistics = dict[str, Arrays]
Loss = Callable[[Any, Arrays], tuple[jax.Array, Statistics]]
View = Callable[[Params, Params], Any]
"""From trained and frozen parameters to the model that the forward pass runs, differentiably."""


_bound: Callable[..., Any] = functools.lru_cache(maxsize=256)(functools.partial)


def bind(function: Callable[..., Any], *args: Any, **keywords: Any) -> Callable[..., Any]:
    """Return ``functools.partial`` of hashable arguments: the same object for the same ones.

    JAX looks up traced and compiled programs by the function. So learners of one configuration
    share their programs. The result of a program must follow from ``function`` and its arguments
    alone.
    """
    return _bound(function, *args, **keywords)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One optimizer update.

    Attributes:
        norm: global norm of the gradient.
        finite: whether the norm was finite, and so the update was applied.
        rate: learning rate.
    """

    norm: float
    finite: bool
    rate: float


class UpdatePrograms:
    """The programs of an update.

    They hold no array, and can be compiled for devices that are not present.

    Args:
        params: initial parameters, or their shapes.
        view: from trained and frozen parameters to the model that the loss takes.
        shardings: one per parameter.
        everywhere: sharding of scalars.
        rate: the learning rate, a function of the number of finished training steps.
        loss: a micro-batch's share of the loss, and statistics: ``sum`` adds up over micro-batches,
            ``max`` takes the largest.

    Attributes:
        state_shardings: the sharding of every array of a :class:`TrainState`.
        everywhere: the sharding of scalars.
        init: parameters (donated) to the first state.
        zeros: parameters to gradients of zero.
        accumulate: parameters, frozen ones, gradients (donated) and a micro-batch to gradients and
            statistics.
        apply: a state (donated), gradients and the number of finished training steps to the next
            state, the gradients' norm, whether that was finite, and the learning rate.
        compiled_apply: ``apply`` once compiled.
        widths: lengths of the rows that ``accumulate`` has run for, each with a program of its own.
    """

    def __init__(
        self,
        params: Params,
        *,
        view: View,
        shardings: Any,
        everywhere: NamedSharding,
        optimizer: OptimizerSection,
        rate: optax.Schedule,
        loss: Loss,
    ) -> None:
        check_patterns(optimizer, params)
        transformation = make_optimizer(optimizer, 0.0)  # the rate is not part of its state
        # Outputs have the shardings of the inputs they replace, so that no call compiles anew for
        # the result of another.
        self.everywhere = everywhere
        self.state_shardings = _state_shardings(transformation, params, shardings, everywhere)
        self.init = jax.jit(
            bind(_init, optimizer), out_shardings=self.state_shardings, donate_argnums=0
        )
        self.zeros = jax.jit(_zeros, out_shardings=shardings)
        self.accumulate = jax.jit(
            bind(_accumulate, loss, view),
            donate_argnums=(2,),
            out_shardings=(shardings, everywhere),
            compiler_options=exchange_options(everywhere.mesh),
        )
        self.apply = jax.jit(
            bind(apply_update, optimizer, rate),
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, everywhere, everywhere, everywhere),
        )
        self.compiled_apply: jax.stages.Compiled | None = None
        self.widths: set[int] = set()


_ON_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    # Products take whole weights: in windows they would sum up in memory, and wait for each part.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
}
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "TPU v5": {
        **_ON_SPARSE_CORES,
        # Chips on two axes of the torus gather weights, too; without it before each product.
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    },
    "TPU v6 lite": _ON_SPARSE_CORES,
}
"""Options of gradients by kind of device: sparse cores exchange data beside the products."""


def exchange_options(mesh: Any) -> dict[str, Any]:
    """Return the compiler options of gradients on a mesh: how its devices exchange data.

    There are none for a single device.
    """
    if mesh.size == 1:
        return {}
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].device_kind, {})


class OptimizedParams:
    """One model in training: its parameters, its optimizer state, and the updates of both.

    Updates that are not finite are counted here, so that no other model changes the count.

    Args:
        params: initial parameters; copied.
        frozen: parameters that are read and never change.
        programs: made for parameters of these shapes.
        name: names the model in messages.
        section: names the configuration's section of its optimizer in messages.

    Attributes:
        state: its buffers are donated by :meth:`apply`.
        frozen: as given.
        nonfinite_steps: training steps in a row in which every update of this model had a
            non-finite gradient; part of a checkpoint, see :class:`LearnerState`.
        applied_rate: learning rate of the last update that was applied; None before the first, and
            after a checkpoint was loaded.
    """

    def __init__(
        self,
        params: Params,
        *,
        frozen: Params,
        programs: UpdatePrograms,
        name: str = "policy",
        section: str = "learner",
    ) -> None:
        # A copy: the buffers are donated, so they must be our own.
        self.state: TrainState = programs.init(
            jax.tree.map(place, params, programs.state_shardings.params)
        )
        self.frozen = frozen
        self.nonfinite_steps = 0
        self.applied_rate: float | None = None
        self._name = name
        self._section = section
        self._programs = programs

    @property
    def weights(self) -> tuple[Params, Params]:
        """Trained and frozen parameters, as ``view`` takes them."""
        return self.state.params, self.frozen

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far, not counting those for shorter rows."""
        programs = self._programs
        count = 0
        for program in (programs.zeros, programs.accumulate):
            count += program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        if programs.compiled_apply is not None:
            count += 1
        for_shorter_rows = max(0, len(programs.widths) - 1)
        return count - for_shorter_rows

    def gradients(self, micro_batches: Iterable[Arrays]) -> tuple[Params, Statistics]:
        """Accumulate a mini-batch's gradient and statistics.

        Args:
            micro_batches: at least one; the next is asked for when the one before is computed.
        """
        gradients = self._programs.zeros(self.state.params)
        statistics: Statistics | None = None
        for arrays in micro_batches:
            self._programs.widths.add(arrays["token_ids"].shape[1])
            gradients, micro_statistics = self._programs.accumulate(
                self.state.params,
                self.frozen,
                gradients,
                arrays,
            )
            if statistics is None:
                statistics = micro_statistics
            else:
                statistics = _merge(statistics, micro_statistics)
            jax.block_until_ready(micro_statistics)

        assert statistics is not None  # a batch has at least one row
        return gradients, jax.device_get(statistics)

    def compile_apply(self, gradients: Params) -> jax.stages.Compiled:
        """Return the compiled program of :meth:`apply`.

        Args:
            gradients: like those that will be applied.
        """
        if self._programs.compiled_apply is None:
            step = place(np.int32(0), self._programs.everywhere)
            lowered = self._programs.apply.lower(self.state, gradients, step)
            self._programs.compiled_apply = lowered.compile()
        return self._programs.compiled_apply

    def apply(self, gradients: Params, step: int) -> Applied:
        """Run one optimizer update. A gradient that is not finite changes nothing.

        Args:
            gradients: of the whole mini-batch.
            step: training steps that are finished, for the learning rate.
        """
        compiled = self.compile_apply(gradients)
        placed_step = place(np.int32(step), self._programs.everywhere)
        self.state, norm, finite, rate = compiled(self.state, gradients, placed_step)
        if finite:
            self.applied_rate = float(rate)
        return Applied(norm=float(norm), finite=bool(finite), rate=float(rate))

    def end_step(self, updates: Sequence[Applied]) -> None:
        """Count a training step as finite if any of this model's updates was.

        A step without updates does not count.
        """
        for update in updates:
            if not update.finite:
                logger.warning(
                    "%s: gradient norm is %s: the update was skipped", self._name, update.norm
                )
        if any(update.finite for update in updates):
            self.nonfinite_steps = 0
        elif updates:
            self.nonfinite_steps += 1

    def require_finite(self, limit: int) -> None:
        """Raise NonFiniteError after ``limit`` training steps in a row that were not finite."""
        if self.nonfinite_steps >= limit:
            raise NonFiniteError(
                f"the {self._name} had no update with a finite gradient in"
                f" {counted(self.nonfinite_steps, 'training step')} in a row"
                f" (learner.max_nonfinite_steps={limit}); its parameters are those before them."
                f" Lower {self._section}.learning_rate, or look at the rewards or rows of the last"
                " step"
            )


def _init(optimizer: OptimizerSection, params: Params) -> TrainState:
    return TrainState(params, make_optimizer(optimizer, 0.0).init(params), jnp.int32(0))


def _zeros(params: Params) -> Params:
    return jax.tree.map(jnp.zeros_like, params)


def _accumulate(
    loss: Loss,
    view: View,
    params: Params,
    frozen: Params,
    gradients: Params,
    batch: Arrays,
) -> tuple[Params, Statistics]:
    def loss_of_params(params: Params) -> tuple[jax.Array, Statistics]:
        return loss(view(params, frozen), batch)

    differentiate = jax.value_and_grad(loss_of_params, has_aux=True)
    (_, statistics), micro_gradients = differentiate(params)
    return jax.tree.map(jnp.add, gradients, micro_gradients), statistics


def apply_update(
    config: OptimizerSection,
    schedule: optax.Schedule,
    state: TrainState,
    gradients: Params,
    step: jax.Array,
) -> tuple[TrainState, jax.Array, jax.Array, jax.Array]:
    """Run the optimizer on traced arrays; a gradient that is not finite changes nothing.

    Args:
        config: of the optimizer; its numbers may be traced as well.
        schedule: the learning rate, a function of ``step``.
        state: before the update.
        gradients: one per parameter.
        step: training steps that are finished.

    Returns:
        the next state, the gradients' global norm, whether this is finite, and the learning rate.
    """
    norm = optax.tree.norm(gradients)
    rate = jnp.asarray(schedule(step), jnp.float32)
    finite = jnp.isfinite(norm)

    def updated() -> TrainState:
        optimizer = make_optimizer(config, rate)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = cast(Params, optax.apply_updates(state.params, updates))
        return TrainState(params, opt_state, state.updates + 1)

    def unchanged() -> TrainState:
        return state

    return jax.lax.cond(finite, updated, unchanged), norm, finite, rate


def _state_shardings(
    optimizer: optax.GradientTransformation,
    params: Params,
    shardings: Any,
    everywhere: NamedSharding,
) -> TrainState:
    """Return the shardings of a state.

    An array of the optimizer is sharded like the parameter of the same shape at the end of its
    path. All others are everywhere.
    """
    shapes = jax.tree.map(lambda x: x.shape, params)
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    shape_at = dict(leaves)
    sharding_at = dict(jax.tree_util.tree_leaves_with_path(shardings))

    def sharding(path: tuple[Any, ...], array: Any) -> Any:
        for begin in range(len(path)):
            parameter_path = path[begin:]
            if shape_at.get(parameter_path) == array.shape:
                return sharding_at[parameter_path]
        return everywhere

    opt_state = jax.eval_shape(optimizer.init, params)
    opt_shardings = jax.tree_util.tree_map_with_path(sharding, opt_state)
    return TrainState(shardings, opt_shardings, cast(Any, everywhere))


def _merge(a: Statistics, b: Statistics) -> Statistics:
    return {
        "sum": jax.tree.map(jnp.add, a["sum"], b["sum"]),
        "max": jax.tree.map(jnp.maximum, a["max"], b["max"]),
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerState:
    """Everything a resumed run needs of the learner.

    Attributes:
        policy: parameters and optimizer of the policy.
        critic: parameters and optimizer of the critic, with adv_estimator gae.
        kl_coef: float32, coefficient of the KL controller.
        steps: int32, calls of :meth:`Learner.update`.
        nonfinite: int32, ``nonfinite_steps`` of the policy.
        critic_nonfinite: int32, ``nonfinite_steps`` of the critic; None without one.
    """

    policy: TrainState
    critic: TrainState | None
    kl_coef: jax.Array
    steps: jax.Array
    nonfinite: jax.Array
    critic_nonfinite: jax.Array | None = None
