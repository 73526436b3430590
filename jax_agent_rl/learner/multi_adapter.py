"""Several LoRA adapters in training over one frozen model.

Each is a policy with an optimizer of its own.

::

    groups ─► by Trajectory.adapter ─┬─► Learner of adapter A: advantages, losses, optimizer ─┐
                                     └─► Learner of adapter B                                 │
                                                                             UpdateResult ◄───┘

The learners share the frozen parameters and the compiled programs. A step changes all of its
adapters or none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.optimized_params import LearnerState
from jax_agent_rl.learner.undo import HostState, all_or_nothing
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.lora import PeftAdapter, scaled_adapter
from jax_agent_rl.types import Group

_SUMMED = (
    "batch_tokens",
    "computed_tokens",
    "rows",
    "learner_seconds",
    "trained_tokens",
    "updates",
    "nonfinite_updates",
)


class MultiAdapterLearner:
    """The adapters of ``agent.role_adapters`` and their optimizers.

    Args:
        learner: not trained yet; every adapter begins with its parameters.
        names: of the adapters.

    Attributes:
        learners: the learner of each adapter.
    """

    def __init__(self, learner: Learner, lora: LoraConfig, names: Sequence[str]) -> None:
        self._lora = lora
        self.learners = {name: learner.twin(f"adapter {name!r}") for name in sorted(set(names))}
        self.state_before: HostState | None = None

    @property
    def state(self) -> dict[str, LearnerState]:
        """The state to checkpoint, by adapter: after the last :meth:`update` that is final."""
        if self.state_before is not None:  # an update is in progress, and may be undone
            return self.state_before.on_device()
        return {name: learner.state for name, learner in self.learners.items()}

    @state.setter
    def state(self, state: Mapping[str, LearnerState]) -> None:
        for name, learner in self.learners.items():
            learner.state = state[name]

    @property
    def params(self) -> Params:
        """The frozen model below the adapters, on device."""
        learner = next(iter(self.learners.values()))
        return learner.merged(jax.tree.map(jnp.zeros_like, learner.trained))

    def averaged(self) -> MultiAdapterLearner:
        """Return a learner with the moving averages as :attr:`adapters`.

        It is valid until the next update.
        """
        averaged = copy.copy(self)
        averaged.learners = {name: learner.averaged() for name, learner in self.learners.items()}
        return averaged

    @property
    def adapters(self) -> dict[str, PeftAdapter]:
        """The adapters as they are now, on the host."""
        adapters = {}
        for name, learner in self.learners.items():
            adapters[name] = scaled_adapter(self._lora, jax.device_get(learner.trained))
        return adapters

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; all learners run the same."""
        return next(iter(self.learners.values())).programs_compiled

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda completed, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """Train each adapter on the trajectories that it sampled.

        For the arguments see :meth:`Learner.update`.

        Raises:
            StepCancelled, NonFiniteError: as :meth:`Learner.update`; no adapter has changed.
            KeyError: a trajectory was sampled by no adapter in training.
        """
        groups_of = by_adapter(groups)
        cancellation = cancellation or StepCancellation()

        results = {}
        # The update of a single adapter is undone by its learner.
        with all_or_nothing(self, cancellation, updates=len(groups_of)):
            for name, adapter_groups in groups_of.items():
                trajectories = [t for group in adapter_groups for t in group.trajectories]
                adapter_ids = {trajectory.trajectory_id for trajectory in trajectories}
                results[name] = self.learners[name].update(
                    adapter_groups,
                    masked=adapter_ids.intersection(masked),
                    tick=tick,
                    cancellation=cancellation,
                    check=check,
                )
        return combined(results)


def by_adapter(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each adapter, with the trajectories that it sampled."""
    groups_of: dict[str, list[Group]] = {}
    for group in groups:
        names = sorted({str(t.adapter) for t in group.trajectories})
        for name in names:
            members = tuple(t for t in group.trajectories if str(t.adapter) == name)
            groups_of.setdefault(name, []).append(replace(group, trajectories=members))
    return dict(sorted(groups_of.items()))


def combined(results: Mapping[str, UpdateResult]) -> UpdateResult:
    """Return the result of a step from its adapters' results.

    Each adapter's metrics are ``adapter/<name>/<metric>``. A metric of the whole step is the sum of
    the adapters' for counts and seconds, the largest for ``…_max``, computed from sums for rates,
    and else the mean.
    """
    metrics: dict[str, float] = {}
    values_of: dict[str, list[float]] = {}
    for name, result in results.items():
        for key, value in result.metrics.items():
            metrics[f"adapter/{name}/{key}"] = value
            values_of.setdefault(key, []).append(value)

    for key, values in values_of.items():
        if key in _SUMMED:
            metrics[key] = sum(values)
        elif key.endswith("_max"):
            metrics[key] = max(values)
        else:
            metrics[key] = float(np.mean(values))

    seconds = metrics["learner_seconds"]
    metrics["sharing_factor"] = metrics["batch_tokens"] / metrics["computed_tokens"]
    metrics["learner_tokens_per_second"] = metrics["batch_tokens"] / seconds
    metrics["computed_tokens_per_second"] = metrics["computed_tokens"] / seconds

    tokens: dict[str, Mapping[str, np.ndarray]] = {}
    for result in results.values():
        tokens.update(result.tokens)
    return UpdateResult(
        metrics=metrics,
        skipped=all(result.skipped for result in results.values()),
        rejected=frozenset().union(*(result.rejected for result in results.values())),
        unapplied=frozenset().union(*(result.unapplied for result in results.values())),
        tokens=tokens,
    )
