"""The learning rate of each training step.

::

    rate ▲      ______________________________ constant
         │     /‾‾‾--__  cosine, linear
         │    /        ‾‾--__
         │   /               ‾‾--____ peak * min_lr_ratio
         │  /
         └──┬──────┬─────────────────┬─► training step
            1   warm-up           total_steps

A training step is one call of ``Learner.update``. All its updates (``num_minibatches`` times ``ppo_epochs``) have one
rate, so neither those two nor an update that was skipped moves the end of the schedule. A step that loses all of its
trajectories does not count. A run that resumes with another number of steps goes on along the new schedule.
"""

from __future__ import annotations

import optax

from jax_agent_rl.config.base import OptimizerSection
from jax_agent_rl.errors import ConfigError


def learning_rate(config: OptimizerSection, total_steps: int | None) -> optax.Schedule:
    """A function from the number of finished training steps to the rate of the next one.

    Args:
        config: the peak rate, the warm-up and what follows it.
        total_steps: of the run; at it, a decay would reach ``min_lr_ratio`` of the peak, and stays there. None where it
            is not known.

    Raises:
        ConfigError: a decay needs to know when the run ends.
    """
    peak, warm_up = config.learning_rate, config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        after = optax.constant_schedule(peak)
    elif total_steps is None:
        raise ConfigError(
            f"lr_scheduler_type={config.lr_scheduler_type} decays until the last step, but how many steps there are is "
            "not known; give the learner total_steps, or set lr_scheduler_type=constant"
        )
    elif config.lr_scheduler_type == "linear":
        after = optax.linear_schedule(peak, peak * config.min_lr_ratio, max(total_steps - warm_up, 1))
    else:
        after = optax.cosine_decay_schedule(peak, max(total_steps - warm_up, 1), alpha=config.min_lr_ratio)
    if not warm_up:
        return after
    # From peak / warm_up, not 0: no step is wasted, and the last one of the warm-up has the peak.
    rise = optax.linear_schedule(peak / warm_up, peak, warm_up - 1) if warm_up > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([rise, after], [warm_up])
