"""All slices of a run as one: those that learn and, with ``--rollout-hosts``, those that only sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from jax_agent_rl.deploy.launch.tpu.cleanup import to_the_end
from jax_agent_rl.deploy.launch.tpu.slices import Addresses, Slices, SliceStatus, State

T = TypeVar("T")
_WORST_FIRST = (State.LOST, State.ABSENT, State.FAILED, State.WAITING, State.READY)


class Fleet:
    """Several requests, made, watched and given back together.

    Args:
        groups: the learner's first.
        say: takes a line for the screen.
    """

    def __init__(self, groups: Sequence[Slices], *, say: Callable[[str], None]) -> None:
        self._groups, self._say = groups, say

    @property
    def created(self) -> bool:
        """Whether this launcher made the learner's slices, so that no run can be under way there."""
        return self._groups[0].created

    @property
    def there(self) -> bool:
        """Whether there may be slices that cost, as far as this launcher knows."""
        return any(group.there for group in self._groups)

    async def look(self) -> SliceStatus:
        """Return the state of the request that is worst off, and the hosts of all."""
        seen = await _all(group.look() for group in self._groups)
        worst = min(seen, key=lambda one: _WORST_FIRST.index(one.state))
        hosts = tuple(slice for one in seen for slice in one.hosts) if worst.state is State.READY else ()
        return SliceStatus(state=worst.state, word=worst.word, why=worst.why, hosts=hosts)

    async def learner_lives(self) -> bool:
        """Whether the learner's own slices are ready."""
        return (await self._groups[0].look()).state is State.READY

    async def ensure(self) -> Addresses:
        """Ensure all concurrently; see :meth:`Slices.ensure`.

        Raises:
            LaunchError: one of them cannot be had; those that were made stay.
            Preempted: one of them was taken back before all were ready.
        """
        found = await _all(group.ensure() for group in self._groups)
        return tuple(slice for hosts in found for slice in hosts)

    async def delete_lost(self) -> None:
        """Delete preempted slices; the others are used again."""
        for group in self._groups:
            if (await group.look()).state in (State.LOST, State.FAILED):
                await group.delete()

    async def delete(self) -> None:
        """Delete all slices.

        Raises:
            LaunchError: some are left.
        """
        await to_the_end({group.name: group.delete() for group in self._groups})


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all concurrently; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
