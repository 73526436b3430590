"""Several engines as one policy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.protocol import BackendMetrics, RolloutBackend


class FleetMetrics:
    """The metrics of several engines added up; one that is gone stays in with what it last said."""

    def __init__(self, backends: Sequence[RolloutBackend]) -> None:
        self._backends = backends
        self._last = [BackendMetrics() for _ in backends]

    async def read(self) -> BackendMetrics:
        for i, backend in enumerate(self._backends):
            with contextlib.suppress(BackendError):
                self._last[i] = await backend.metrics()
        names = BackendMetrics.__dataclass_fields__
        return BackendMetrics(**{name: sum(getattr(m, name) for m in self._last) for name in names})


def check_versions(config: Config, backends: Sequence[RolloutBackend]) -> None:
    """Servers of different weights cannot be one policy.

    Raises:
        ConfigError: they have different policy versions.
    """
    if len({backend.policy_version for backend in backends}) > 1:
        served = {url: b.policy_version for url, b in zip(config.rollout.urls, backends, strict=True)}
        raise ConfigError(f"the rollout servers have different policy versions: {served}; restart all of them")
