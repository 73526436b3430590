"""A backend of this process among others in actors: it takes its weights from the same store, by the same checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.rollout.protocol import Capabilities, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.ray.host import await_reference
from jax_agent_rl.rollout.ray.weights import KIND, Fetch, fetched


class FromStore:
    """The backend itself, in everything but where its weights come from."""

    def __init__(self, backend: RolloutBackend, fetch: Fetch = await_reference) -> None:
        self._backend = backend
        self._fetch = fetch

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._backend.capabilities, weight_payloads=frozenset({KIND}))

    async def update_weights(self, update: WeightUpdate) -> None:
        async with fetched(update, self._fetch) as given:
            await self._backend.update_weights(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
