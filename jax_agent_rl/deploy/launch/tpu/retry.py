"""How long to try what fails because of the network, or of a service that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from jax_agent_rl.errors import LaunchUnansweredError

T = TypeVar("T")
_TRIES = 20
_LONGEST = 16


def pauses(poll: float, tries: int = _TRIES) -> Iterator[float]:
    """Yield the growing seconds before each retry: an hour and more in all for a ``poll`` of 15 s."""
    for number in range(tries):
        yield poll * min(2**number, _LONGEST)


async def patiently(
    act: Callable[[], Awaitable[T]],
    *,
    poll: float,
    say: Callable[[str], None],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Retry through failures of the network and of gcloud, as nobody may be there to start again.

    Args:
        act: may be done twice.
        poll: seconds before the first retry; later ones wait longer.
        say: prints a line.
        sleep: between two tries.

    Raises:
        LaunchError: gcloud refuses, or has failed many times in a row.
    """
    left = pauses(poll)
    while True:
        try:
            return await act()
        except LaunchUnansweredError as error:
            if (pause := next(left, None)) is None:
                raise
            say(f"{error}\ntrying again in {pause:.0f} s")
            await sleep(pause)
