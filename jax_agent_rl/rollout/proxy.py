"""A backend that stands for an engine in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import PauseMode, TokenScores


class ProxyBackend(ABC):
    """Forwards the calls of a backend.

    Args:
        name: names the engine in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._capabilities: Capabilities | None = None
        self._version = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise BackendError(f"the capabilities of {self.name} are known after start()")
        return self._capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    @abstractmethod
    async def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine, and note the policy version it reports."""

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        return await self._call("score", token_ids=list(token_ids), start=start, top_k=top_k)

    async def abort(self, request_id: str) -> bool:
        return await self._call("abort", request_id=request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode=mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")
