"""A learner without an optimizer and a checkpointer that saves nothing, for tests and simulations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import AgreementCheck
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.types import DropReason, Group


class FakeLearner(ABC):
    """Replaces a :class:`~jax_agent_rl.learner.learner.Learner`; a subclass defines :meth:`learn`."""

    params = None
    state = None
    programs_compiled = 0

    @abstractmethod
    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take the groups of a step and return its metrics."""

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Mapping[str, DropReason],
        tick: Callable[[int, int], None],
        cancellation: StepCancellation,
        check: AgreementCheck,
    ) -> UpdateResult:
        tick(0, 1)
        with cancellation.update():
            metrics = self.learn(groups)
        tick(1, 1)
        return UpdateResult(metrics=metrics, skipped=False)


class NoCheckpoints:
    """Replaces a :class:`~jax_agent_rl.learner.checkpoint.Checkpointer`; saves nothing."""

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def written(self) -> str:
        return ""
