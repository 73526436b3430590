"""A backend behind a rollout server of its own, or in a Ray actor of its own cluster, as one backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.ray.backend import RayBackend
from jax_agent_rl.runtime.ray_cluster import open_ray


class ServedBackend(RemoteBackend):
    """Starts and closes the backend and its server with itself.

    Args:
        make: builds the backend.
        weight_dir: of the server.
        client: options of :class:`RemoteBackend`.
    """

    def __init__(self, make: Callable[[], RolloutBackend], *, weight_dir: str | None = None, **client: Any) -> None:
        super().__init__("http://127.0.0.1:1", **client)  # the server's address is known once it listens
        self.inner = make()
        self.server = RolloutServer(self.inner, heartbeat_seconds=0.2, weight_dir=weight_dir)

    async def start(self) -> None:
        await self.inner.start()
        await self.server.start()
        self.url = self.server.url
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self.inner.close()


class ActorBackend(RayBackend):
    """Starts and ends Ray with itself, unless it runs already. The actor gets a GPU where there is one."""

    def __init__(self, make: Callable[[], RolloutBackend]) -> None:
        super().__init__(make)
        self._ray = AsyncExitStack()

    async def start(self) -> None:
        await self._ray.enter_async_context(open_ray(None))
        import ray

        self._options["num_gpus"] = min(1, ray.cluster_resources().get("GPU", 0))
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._ray.aclose()
