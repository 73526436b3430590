"""Several coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def gather_or_cancel(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Await all, and return their results in order; none runs on after this has ended.

    The first exception cancels the others, which ``asyncio.gather`` lets run, and is raised as it
    is, which ``asyncio.TaskGroup`` wraps in a group.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
