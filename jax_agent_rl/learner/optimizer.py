r"""The optimizer, with global-norm clipping, its learning rate, and how to undo AdamW's last update.

::

    rate ▲      ______________________________ constant
         │     /‾‾‾--__‾‾‾‾‾‾‾‾‾‾‾‾\            wsd: decays in the last steps only
         │    /        ‾‾--__       \          linear, cosine
         │   /               ‾‾--____\ peak * min_lr_ratio
         │  /
         └──┬──────┬─────────────────┬─► training step
            1   warm-up           total_steps

A training step is one call of ``Learner.update``. All its updates (``num_minibatches`` times ``ppo_epochs``) have one
rate, so neither those two nor an update that was skipped moves the end of the schedule. A step that loses all of its
trajectories does not count. A run that resumes with another number of steps goes on along the new schedule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.parameters import Kind, parameter_at


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays that the optimizer changes; ``updates`` (int32) counts the optimizer updates done."""

    params: Params
    opt_state: Any
    updates: jax.Array


def make_optimizer(config: OptimizerSection, rate: jax.Array | float) -> optax.GradientTransformation:
    """Return global-norm clipping, the configured optimizer at a learning rate, and the average of parameters if any.

    References: AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. Muon: Jordan et al. 2024; its updates are scaled to
    AdamW's root mean square: Liu et al. 2025, arXiv 2502.16982. Adafactor: Shazeer and Stern 2018, arXiv 1804.04235.
    """

    def clip(gradients: Any, _: Any) -> Any:
        # One factor for all: optax's own clip divides every element, and XLA keeps a copy of all quotients.
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm < config.max_grad_norm, 1.0, config.max_grad_norm / norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients)

    decayed = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: is_decayed(path, config))
    adamw = optax.adamw(
        rate,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if config.optimizer == "adamw":
        chosen = adamw
    elif config.optimizer == "muon":
        muon = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            weight_decay_mask=decayed,
            muon_weight_dimension_numbers=functools.partial(
                jax.tree.map, lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 1, x.ndim - 2)
            ),
            consistent_rms=MUON_RMS,
        )
        labels = functools.partial(jax.tree_util.tree_map_with_path, _muon_or_adamw)
        chosen = optax.partition({"muon": muon, "adamw": adamw}, labels)
    else:
        adafactor = functools.partial(
            optax.adafactor,
            rate,
            multiply_by_parameter_scale=False,
            weight_decay_rate=rate * config.weight_decay,  # optax adds it after the rate
            weight_decay_mask=decayed,
        )
        labels = functools.partial(jax.tree_util.tree_map_with_path, _factored_or_whole)
        chosen = optax.partition({"factored": adafactor(), "whole": adafactor(factored=False)}, labels)
    optimizer = optax.chain(optax.stateless(clip), chosen)
    return with_average(optimizer, config.averaging) if config.averaging else optimizer


class AveragingState(NamedTuple):
    """The state of :func:`with_average`."""

    inner: Any
    average: Params


def with_average(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer with an exponential moving average of the parameters that its updates lead to.

    The average starts from the initial parameters and changes no update. An update that is skipped averages nothing.
    """

    def init(params: Any) -> AveragingState:
        return AveragingState(optimizer.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AveragingState]:
        updates, inner = optimizer.update(updates, state.inner, params)
        reached = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), state.average, reached)
        return updates, AveragingState(inner, average)

    return optax.GradientTransformation(init, update)


def optimizer_bytes(config: OptimizerSection, shapes: Any) -> int:
    """Return the bytes of an optimizer's state for float32 parameters of these shapes (tuples); nothing is computed."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = jax.eval_shape(make_optimizer(config, 0.0).init, params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


MUON_RMS = 0.2
"""Root mean square of Muon's updates per unit of learning rate, about AdamW's."""


def _muon_or_adamw(path: Any, _: Any) -> str:
    """Matrices of linear layers and of adapters are for Muon; embeddings, heads, routers, norms and biases are not."""
    return "muon" if parameter_at(path).is_matrix else "adamw"


def _factored_or_whole(path: Any, _: Any) -> str:
    """Second moments of biases, norms and sinks are kept whole: their further axes are stacks, not columns."""
    is_vector = parameter_at(path).kind in (Kind.BIAS, Kind.NORM, Kind.SINK)
    return "whole" if is_vector else "factored"


def is_decayed(path: Any, config: OptimizerSection) -> bool:
    """Return whether weight decay applies to the parameter of a path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return not any(re.search(pattern, name) for pattern in config.no_weight_decay)


def check_patterns(config: OptimizerSection, params: Params) -> None:
    """Raise ConfigError for a pattern of ``no_weight_decay`` that was set and matches no parameter."""
    named = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
    for pattern in config.no_weight_decay if config.changed("no_weight_decay") else ():
        if not any(re.search(pattern, path) for path in paths):
            raise ConfigError(
                f"no_weight_decay={pattern!r} matches none of the trained parameters, which are {', '.join(paths)}"
            )


def learning_rate(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    """Return a function from the number of finished training steps to the learning rate of the next.

    Args:
        config: the peak rate, the warm-up and what follows it.
        total_steps: of the run, where a decay reaches ``min_lr_ratio`` of the peak; None if unknown.

    Raises:
        ConfigError: a decay needs ``total_steps``.
    """
    return _kept_schedule(config, total_steps)


def _schedule(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    peak, warm_up = config.learning_rate, config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        after = optax.constant_schedule(peak)
    elif total_steps is None:
        raise ConfigError(
            f"lr_scheduler_type={config.lr_scheduler_type} decays until the last step, but how many steps there are is "
            "not known; give the learner total_steps, or set lr_scheduler_type=constant"
        )
    elif config.lr_scheduler_type == "wsd":
        decay = max(round(total_steps * config.lr_decay_ratio), 1)
        stable = max(total_steps - warm_up - decay, 0)
        after = optax.linear_schedule(peak, peak * config.min_lr_ratio, decay, transition_begin=stable)
    elif config.lr_scheduler_type == "linear":
        after = optax.linear_schedule(peak, peak * config.min_lr_ratio, max(total_steps - warm_up, 1))
    else:
        after = optax.cosine_decay_schedule(peak, max(total_steps - warm_up, 1), alpha=config.min_lr_ratio)
    if not warm_up:
        return after
    # From peak / warm_up, not 0: no step is wasted, and the last one of the warm-up has the peak.
    rise = optax.linear_schedule(peak / warm_up, peak, warm_up - 1) if warm_up > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([rise, after], [warm_up])


_kept_schedule: Callable[..., optax.Schedule] = functools.cache(_schedule)
"""What equal arguments make is one object: programs that read it are compiled once, see ``bind``."""


def undo_update(state: TrainState, config: OptimizerSection, *, rate: float) -> Params | None:
    """Return the trained parameters of one update ago, to rounding; None before the first update, and not of AdamW.

    An update subtracts ``rate * (direction + decay * before)``, and the direction is a function of the moments that
    the optimizer keeps.

    Args:
        state: after the update.
        config: of the optimizer.
        rate: the update's learning rate.
    """
    if not int(state.updates) or config.optimizer != "adamw":
        return None
    adam: Any = optax.tree.get(state.opt_state, "ScaleByAdamState")
    first = optax.tree.bias_correction(adam.mu, config.adam_b1, adam.count)
    second = optax.tree.bias_correction(adam.nu, config.adam_b2, adam.count)

    def back(path: Any, x: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
        direction = mu / (jnp.sqrt(nu) + config.adam_eps)
        return (x + rate * direction) / (1 - rate * config.weight_decay * is_decayed(path, config))

    return jax.tree_util.tree_map_with_path(back, state.params, first, second)
