"""A learner that hands every trajectory to the ledger, not to an optimizer; its weights follow from the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import AgreementCheck
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.chaos.ledger import Ledger
from jax_agent_rl.testing.chaos.policy import hash_policy
from jax_agent_rl.types import DropReason, Group


class ProvingLearner:
    """Stands where :class:`~jax_agent_rl.learner.learner.Learner` does.

    Args:
        ledger: gets the trajectories.
        seconds: one update takes.
    """

    params = None
    state = None
    programs_compiled = 0

    def __init__(self, ledger: Ledger, *, seconds: float) -> None:
        self._ledger = ledger
        self._seconds = seconds

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Mapping[str, DropReason],
        tick: Callable[[int, int], None],
        gate: StepCancellation,
        check: AgreementCheck,
    ) -> UpdateResult:
        """Proves every trajectory of the step, more strictly than ``check`` would; runs in the learner's thread."""
        tick(0, 1)
        with gate.update():
            begin = time.monotonic()
            self._ledger.learn(trajectory for group in groups for trajectory in group.trajectories)
            time.sleep(max(0.0, begin + self._seconds - time.monotonic()))
        tick(1, 1)
        return UpdateResult(metrics={}, skipped=False)


class PolicyPublisher:
    """Writes each version's weights as a file; that of the version before is removed first.

    Args:
        folder: an empty one.
        seed: the run's.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed

    def make(self, learner: Any, version: int) -> WeightUpdate:
        self.close()
        file = self._folder / f"version-{version}.safetensors"
        hash_policy(self._seed, version).save(file)
        return WeightUpdate(version=version, kind="safetensors", payload=[str(file)], lasting=True)

    def close(self) -> None:
        for file in self._folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


class NoCheckpoints:
    """Nothing is saved: what a killed learner leaves behind is another test's."""

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        pass

    def check(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def written(self) -> str:
        return ""
