"""Several LoRA adapters in training over one frozen model: each is a policy with an optimizer of its own.

::

    groups ─► by Trajectory.adapter ─┬─► Learner of adapter A: advantages, losses, optimizer ─┐
                                     └─► Learner of adapter B                                 ┴─► UpdateResult

The learners share the frozen parameters and the compiled programs. A step changes all of its adapters or none.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UNCHECKED, AgreementCheck, UpdateResult
from jax_agent_rl.learner.optimized_params import HostState, LearnerState, all_or_nothing
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.lora import PeftAdapter, scaled_adapter
from jax_agent_rl.types import Group

_SUMS = (
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
        learner: of the first adapter, not trained yet; the others begin as it does.
        lora: its configuration.
        names: of the adapters.
    """

    def __init__(self, learner: Learner, lora: LoraConfig, names: Sequence[str]) -> None:
        self._lora = lora
        self._learners = {name: learner.twin(f"adapter {name!r}") for name in sorted(set(names))}
        self.state_before: HostState | None = None

    @property
    def state(self) -> dict[str, LearnerState]:
        """The state to checkpoint, by adapter: after the last :meth:`update` that is final."""
        if (before := self.state_before) is not None:
            return before.on_device()
        return {name: learner.state for name, learner in self._learners.items()}

    @state.setter
    def state(self, state: Mapping[str, LearnerState]) -> None:
        for name, learner in self._learners.items():
            learner.state = state[name]

    @property
    def params(self) -> Params:
        """The frozen model below the adapters, on device."""
        learner = next(iter(self._learners.values()))
        return learner.merged(jax.tree.map(jnp.zeros_like, learner.trained))

    def averaged(self) -> MultiAdapterLearner:
        """Return a learner with the moving averages as :attr:`adapters`; valid until the next update."""
        averaged = copy.copy(self)
        averaged._learners = {name: learner.averaged() for name, learner in self._learners.items()}
        return averaged

    @property
    def adapters(self) -> dict[str, PeftAdapter]:
        """The adapters as they are now, on the host."""
        return {
            name: scaled_adapter(self._lora, jax.device_get(learner.trained))
            for name, learner in self._learners.items()
        }

    def store(self, folder: str, dtype: str) -> str:
        """Write :attr:`params` as :meth:`Learner.store` does."""
        stored.write_part(folder, self.params, part=0, dtype=dtype)
        return stored.publish(folder, parts=1)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; all learners run the same."""
        return next(iter(self._learners.values())).programs_compiled

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda done, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """Train each adapter on the trajectories that it sampled; for the arguments see :meth:`Learner.update`.

        Raises:
            StepCancelled, NonFiniteError: as :meth:`Learner.update`; no adapter has changed.
            KeyError: a trajectory was sampled by no adapter in training.
        """
        shares = by_adapter(groups)
        cancellation = cancellation or StepCancellation()
        results = {}
        # A single one is undone by its learner.
        with contextlib.nullcontext() if len(shares) == 1 else all_or_nothing(self, cancellation):
            for name, share in shares.items():
                own = {t.trajectory_id for group in share for t in group.trajectories}.intersection(masked)
                results[name] = self._learners[name].update(
                    share, masked=own, tick=tick, cancellation=cancellation, check=check
                )
        return combined(results)


def by_adapter(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each adapter, with the trajectories that it sampled."""
    shares: dict[str, list[Group]] = {}
    for group in groups:
        names = sorted({str(t.adapter) for t in group.trajectories})
        for name in names:
            members = tuple(t for t in group.trajectories if str(t.adapter) == name)
            shares.setdefault(name, []).append(replace(group, trajectories=members))
    return dict(sorted(shares.items()))


def combined(results: Mapping[str, UpdateResult]) -> UpdateResult:
    """Return the result of a step: each adapter's metrics as ``adapter/<name>/<metric>``, and those of all.

    Of all adapters, counts and seconds are sums, ``…_max`` the largest, rates those of the sums, and the rest means.
    """
    metrics = {
        f"adapter/{name}/{key}": value for name, result in results.items() for key, value in result.metrics.items()
    }
    for key in dict.fromkeys(key for result in results.values() for key in result.metrics):
        values = [result.metrics[key] for result in results.values() if key in result.metrics]
        metrics[key] = sum(values) if key in _SUMS else max(values) if key.endswith("_max") else float(np.mean(values))
    seconds = metrics["learner_seconds"]
    metrics |= {
        "sharing_factor": metrics["batch_tokens"] / metrics["computed_tokens"],
        "learner_tokens_per_second": metrics["batch_tokens"] / seconds,
        "computed_tokens_per_second": metrics["computed_tokens"] / seconds,
    }
    return UpdateResult(
        metrics=metrics,
        skipped=all(result.skipped for result in results.values()),
        rejected=frozenset().union(*(result.rejected for result in results.values())),
        unapplied=frozenset().union(*(result.unapplied for result in results.values())),
        tokens={name: values for result in results.values() for name, values in result.tokens.items()},
    )
