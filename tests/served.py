"""A backend served over HTTP and reached through the remote client, as one backend: what the tests of both run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.remote.client import RemoteBackend
from jax_agent_rl.rollout.remote.server import RolloutServer
from tests.toy_backend import ToyBackend


class ServedBackend(RemoteBackend):
    """Starts and closes the inner backend and its server with itself."""

    def __init__(self, make: Callable[[], RolloutBackend], **client) -> None:
        super().__init__("http://127.0.0.1:1", **client)
        self.inner = make()
        self.server = RolloutServer(self.inner, heartbeat_seconds=0.2)

    async def start(self) -> None:
        await self.inner.start()
        await self.server.start()
        self.url = self.server.url
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self.inner.close()


def served_toy(**client) -> ServedBackend:
    return ServedBackend(lambda: ToyBackend(tick_seconds=0.001, weight_payloads=frozenset({"safetensors"})), **client)


def toy_files(folder: Path) -> Callable[[str, str], list[str]]:
    """Payloads of kind ``safetensors`` for the toy: a file that holds the name of the weight set."""

    def payload(kind: str, which: str) -> list[str]:
        file = folder / f"{which}.safetensors"
        file.write_text(which)
        return [str(file)]

    return payload
