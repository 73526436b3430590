"""All slices of a run as one: the learner's and, with ``--rollout-hosts``, those that only sample."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud
from jax_agent_rl.deploy.launch.tpu.slices import Addresses, Slices, SliceStatus, State
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

T = TypeVar("T")
_WORST_FIRST = (State.LOST, State.ABSENT, State.FAILED, State.WAITING, State.READY)


class Fleet:
    """Several slice requests, created, watched and deleted together.

    Args:
        groups: the learner's first.
        print_line: takes a line for the screen.
    """

    def __init__(self, groups: Sequence[Slices], *, print_line: Callable[[str], None]) -> None:
        self._groups, self._print_line = groups, print_line

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


async def delete_by_name(name: str, cloud: Gcloud, *, print_line: Callable[[str], None]) -> list[str]:
    """Delete all resources with a run's name; return their names.

    Raises:
        LaunchError: some are left.
    """
    own = re.compile(rf"{re.escape(name)}(-rollout-\d+)?")

    async def found(listed: tuple[str, ...]) -> list[str]:
        names = (entry["name"].rpartition("/")[2] for entry in await cloud.read_json(listed))
        return sorted(filter(own.fullmatch, names))

    async def delete(names: Iterable[str], how: Callable[[str], tuple[str, ...]]) -> None:
        await to_the_end({each: _delete(cloud, how(each)) for each in names})

    queued = await found(gcloud.list_queued())
    if queued:
        print_line(f"deleting {', '.join(queued)}")
        await delete(queued, gcloud.delete_queued)
    nodes = await found(gcloud.list_nodes())  # those of queued resources are gone by now
    if nodes:
        print_line(f"deleting {', '.join(nodes)}")
        await delete(nodes, gcloud.delete_node)
    return queued + nodes


async def _delete(cloud: Gcloud, call: tuple[str, ...]) -> None:
    try:
        await cloud.read(call)
    except LaunchTargetError:  # somebody else was faster
        return


async def to_the_end(deletions: Mapping[str, Awaitable[Any]]) -> None:
    """Run deletions concurrently, each to its end, whatever becomes of the others.

    Raises:
        LaunchError: with the names of those that failed, and why; it is a :class:`LaunchUnansweredError` if none was
            refused.
    """
    results = await asyncio.gather(*deletions.values(), return_exceptions=True)
    failed = {name: each for name, each in zip(deletions, results, strict=True) if isinstance(each, BaseException)}
    for error in failed.values():
        if not isinstance(error, LaunchError):
            raise error
    if failed:
        why = "\n".join(str(error) for error in failed.values())
        unanswered = all(isinstance(error, LaunchUnansweredError) for error in failed.values())
        kind = LaunchUnansweredError if unanswered else LaunchError
        raise kind(f"{why}\n{', '.join(failed)}: still there, and costs; try --delete again")
