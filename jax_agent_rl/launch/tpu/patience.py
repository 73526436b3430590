"""How long to try what fails because of the network, or of a service that is away."""

from __future__ import annotations

from collections.abc import Iterator

_TRIES = 20
_LONGEST = 16


def pauses(poll: float) -> Iterator[float]:
    """Seconds before each next try, longer and longer: an hour and more in all for a ``poll`` of 15 s."""
    for tries in range(_TRIES):
        yield poll * min(2**tries, _LONGEST)
