"""Giving back what has a run's name, however it was asked for: its slices, and those that only sampled for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError


async def delete_by_name(name: str, cloud: Gcloud, *, say: Callable[[str], None]) -> list[str]:
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
        say(f"deleting {', '.join(queued)}")
        await delete(queued, gcloud.delete_queued)
    nodes = await found(gcloud.list_nodes())  # those of queued resources are gone by now
    if nodes:
        say(f"deleting {', '.join(nodes)}")
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
