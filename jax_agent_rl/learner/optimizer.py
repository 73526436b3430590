r"""The optimizer with global-norm clipping, its learning rate, and how to undo its last update.

::

    rate ▲      ______________________________ constant
         │     /‾‾‾--__‾‾‾‾‾‾‾‾‾‾‾‾\            wsd: decays in the last steps only
         │    /        ‾‾--__       \          linear, cosine
         │   /               ‾‾--____\ peak * min_lr_ratio
         │  /
         └──┬──────┬─────────────────┬─► training step
            1   warm-up           total_steps

A training step is one call of ``Learner.update``. All its updates (``num_minibatches`` times
``ppo_epochs``) have one rate: neither their number nor an update that was skipped moves the end of
the schedule. A step that loses all of its trajectories does not count. A run that resumes with
another number of steps goes on along the new schedule.
"""

from __future__ import annotations

import functools
import math
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
    """The arrays that the optimizer changes.

    Attributes:
        updates: int32, number of optimizer updates so far.
    """

    params: Params
    opt_state: Any
    updates: jax.Array


def make_optimizer(
    config: OptimizerSection, rate: jax.Array | float
) -> optax.GradientTransformation:
    """Return global-norm clipping, the configured optimizer, and the average of parameters if any.

    References: AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. Muon: Jordan et al. 2024; its
    updates are scaled to AdamW's root mean square: Liu et al. 2025, arXiv 2502.16982. Adafactor:
    Shazeer and Stern 2018, arXiv 1804.04235.
    """

    def clip(gradients: Any, _: Any) -> Any:
        # One factor for all: optax's own clip divides every element, and XLA keeps all quotients.
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm < config.max_grad_norm, 1.0, config.max_grad_norm / norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients)

    def decayed(params: Any) -> Any:
        """Return a mask of the parameters with weight decay."""
        return jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path, config), params)

    def labels(label_of: Callable[[Any, Any], str]) -> Callable[[Any], Any]:
        """Return a function that labels every parameter."""
        return functools.partial(jax.tree_util.tree_map_with_path, label_of)

    adamw = optax.adamw(
        rate,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if config.optimizer == "adamw":
        optimizer = adamw
    elif config.optimizer == "muon":
        muon = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            weight_decay_mask=decayed,
            muon_weight_dimension_numbers=_matrix_dimensions,
            consistent_rms=MUON_RMS,
        )
        optimizer = optax.partition({"muon": muon, "adamw": adamw}, labels(_muon_or_adamw))
    else:
        adafactor = functools.partial(
            optax.adafactor,
            rate,
            multiply_by_parameter_scale=False,
            weight_decay_rate=rate * config.weight_decay,  # optax adds it after the rate
            weight_decay_mask=decayed,
        )
        # The labels are in the paths of checkpointed arrays.
        optimizer = optax.partition(
            {"factored": adafactor(), "whole": adafactor(factored=False)},
            labels(_factored_or_whole),
        )

    optimizer = optax.chain(optax.stateless(clip), optimizer)
    if config.averaging:
        optimizer = with_average(optimizer, config.averaging)
    return optimizer


def _matrix_dimensions(params: Any) -> Any:
    """Return for Muon which axes are matrices: the last two, as layers are stacked before them."""
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 1, x.ndim - 2),
        params,
    )


class AveragingState(NamedTuple):
    """The state of :func:`with_average`."""

    inner: Any
    average: Params


def with_average(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """Return the optimizer with an exponential moving average of the updated parameters.

    The average starts from the initial parameters, and changes no update. A skipped update leaves
    it as it is.
    """

    def init(params: Any) -> AveragingState:
        return AveragingState(optimizer.init(params), jax.tree.map(jnp.copy, params))

    def blend(average: jax.Array, updated: jax.Array) -> jax.Array:
        return average + (1 - decay) * (updated - average)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AveragingState]:
        updates, inner = optimizer.update(updates, state.inner, params)
        updated_params = optax.apply_updates(params, updates)
        average = jax.tree.map(blend, state.average, updated_params)
        return updates, AveragingState(inner, average)

    return optax.GradientTransformation(init, update)


def optimizer_bytes(config: OptimizerSection, shapes: Any) -> int:
    """Return the bytes of an optimizer's state; nothing is computed.

    Args:
        shapes: a tree of tuples, the shapes of the float32 parameters.
    """
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    # The other keys of a learner make no difference, but a search of layouts changes them.
    settings = config.model_dump_json(include=set(OptimizerSection.model_fields))
    total = _optimizer_bytes(settings, structure, tuple(leaves))
    if config.averaging:
        total += 4 * sum(math.prod(shape) for shape in leaves)
    return total


@functools.lru_cache(maxsize=16)
def _optimizer_bytes(settings: str, structure: Any, shapes: tuple[Any, ...]) -> int:
    """Return the bytes of an optimizer's state without the average of its parameters.

    Args:
        settings: an ``OptimizerSection`` as JSON, which can be a cache's key.
    """
    config = OptimizerSection.model_validate_json(settings)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    init = make_optimizer(config, 0.0).init
    state = jax.eval_shape(init, jax.tree.unflatten(structure, params))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


MUON_RMS = 0.2
"""Root mean square of Muon's updates per unit of learning rate, about AdamW's."""


def _muon_or_adamw(path: Any, _: Any) -> str:
    """Return the optimizer of a parameter.

    Muon is for matrices of linear layers and of adapters, not for embeddings, heads, routers, norms
    and biases.
    """
    return "muon" if parameter_at(path).is_matrix else "adamw"


def _factored_or_whole(path: Any, _: Any) -> str:
    """Return whether Adafactor factors the second moments of a parameter.

    It does not for vectors: their further axes are stacked layers, not columns.
    """
    kind = parameter_at(path).kind
    return "whole" if kind in _VECTORS else "factored"


_VECTORS = (
    Kind.BIAS,
    Kind.NORM,
    Kind.PLAIN_NORM,
    Kind.FACTOR,
    Kind.SINK,
    Kind.DECAY,
    Kind.CONVOLUTION,
)


def is_decayed(path: Any, config: OptimizerSection) -> bool:
    """Return whether weight decay applies to the parameter of a path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return not any(re.search(pattern, name) for pattern in config.no_weight_decay)


def check_patterns(config: OptimizerSection, params: Params) -> None:
    """Raise ConfigError for a pattern of ``no_weight_decay`` that matches no parameter.

    Patterns that are the default are not checked.
    """
    if not config.changed("no_weight_decay"):
        return

    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        names.append(jax.tree_util.keystr(path, simple=True, separator="."))
    for pattern in config.no_weight_decay:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"no_weight_decay={pattern!r} matches none of the trained parameters, which are"
                f" {', '.join(names)}"
            )


def learning_rate(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    """Return a function from the number of finished training steps to the next learning rate.

    Args:
        config: the peak rate, the warm-up and what follows it.
        total_steps: the step at which a decay reaches ``min_lr_ratio`` of the peak; None if
            unknown.

    Raises:
        ConfigError: a decay needs ``total_steps``.
    """
    return _cached_schedule(config, total_steps)


def _schedule(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    peak = config.learning_rate
    warmup_steps = config.lr_warmup_steps
    after_warmup = _schedule_after_warmup(config, total_steps)
    if not warmup_steps:
        return after_warmup

    # From peak / warmup_steps, not 0: no step is wasted, and the warm-up's last one has the peak.
    warmup = optax.constant_schedule(peak)
    if warmup_steps > 1:
        warmup = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
    return optax.join_schedules([warmup, after_warmup], [warmup_steps])


def _schedule_after_warmup(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    peak = config.learning_rate
    lowest = peak * config.min_lr_ratio
    if config.lr_scheduler_type == "constant":
        return optax.constant_schedule(peak)
    if total_steps is None:
        raise ConfigError(
            f"lr_scheduler_type={config.lr_scheduler_type} decays until the last step, but how many"
            " steps there are is not known; give the learner total_steps, or set"
            " lr_scheduler_type=constant"
        )

    steps = max(total_steps - config.lr_warmup_steps, 1)
    if config.lr_scheduler_type == "linear":
        return optax.linear_schedule(peak, lowest, steps)
    if config.lr_scheduler_type == "cosine":
        return optax.cosine_decay_schedule(peak, steps, alpha=config.min_lr_ratio)

    # wsd: warm-up, stable, decay
    decay_steps = max(round(total_steps * config.lr_decay_ratio), 1)
    stable_steps = max(total_steps - config.lr_warmup_steps - decay_steps, 0)
    return optax.linear_schedule(peak, lowest, decay_steps, transition_begin=stable_steps)


_cached_schedule: Callable[..., optax.Schedule] = functools.cache(_schedule)
"""Equal arguments return the same object: programs that read it are compiled once, see ``bind``."""


def undo_update(state: TrainState, config: OptimizerSection, *, rate: float) -> Params | None:
    """Return the trained parameters before AdamW's last update, up to rounding.

    An update subtracts ``rate * (direction + weight_decay * params)``, and the direction is a
    function of the moments that the optimizer keeps.

    Args:
        state: after the update.
        rate: the update's learning rate.

    Returns:
        None before the first update, and for other optimizers.
    """
    if not int(state.updates) or config.optimizer != "adamw":
        return None
    adam: Any = optax.tree.get(state.opt_state, "ScaleByAdamState")
    first = optax.tree.bias_correction(adam.mu, config.adam_b1, adam.count)
    second = optax.tree.bias_correction(adam.nu, config.adam_b2, adam.count)

    def undo(path: Any, x: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
        direction = mu / (jnp.sqrt(nu) + config.adam_eps)
        decay = rate * config.weight_decay if is_decayed(path, config) else 0.0
        return (x + rate * direction) / (1 - decay)

    return jax.tree_util.tree_map_with_path(undo, state.params, first, second)
