"""A learner that verifies every trajectory, and a publisher whose weights follow from the version."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.chaos.ledger import Ledger
from jax_agent_rl.testing.chaos.policy import hash_policy
from jax_agent_rl.testing.fake_learner import FakeLearner
from jax_agent_rl.types import Group


class ProvingLearner(FakeLearner):
    """Verifies every trajectory instead of training on it.

    Args:
        ledger: records the trajectories.
        seconds: duration of an update.
    """

    def __init__(self, ledger: Ledger, *, seconds: float) -> None:
        self._ledger = ledger
        self._seconds = seconds

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        begin = time.monotonic()
        self._ledger.learn(trajectory for group in groups for trajectory in group.trajectories)
        time.sleep(max(0.0, begin + self._seconds - time.monotonic()))
        return {}


class PolicyPublisher:
    """Writes each version's weights as a file, after removing that of the previous version.

    Args:
        folder: an empty folder.
        seed: the run's seed.
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
