"""Waits for foreign code no longer than agreed, whatever it does to its own cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jax_agent_rl.errors import JaxAgentRLError

T = TypeVar("T")


async def in_time(
    work: Awaitable[T], timeout: float, *, late: Callable[[], JaxAgentRLError], error: Callable[[str], JaxAgentRLError]
) -> T:
    """Awaits ``work`` in a task of its own, which is left behind if it ignores its cancellation.

    Args:
        work: user code: a tool, a reward function, an environment.
        timeout: seconds.
        late: makes what is raised when it takes longer.
        error: makes what is raised when it cancelled itself or tried to exit: neither may look like a cancellation of
            the caller, or end the run.
    """
    task = asyncio.ensure_future(_no_exit(work, error))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()
    if not done:
        raise late()
    if task.cancelled():
        raise error("cancelled itself")
    return task.result()


async def _no_exit(work: Awaitable[T], error: Callable[[str], JaxAgentRLError]) -> T:
    try:
        return await work
    except SystemExit as left:
        raise error(f"tried to exit with {left.code!r}") from None
