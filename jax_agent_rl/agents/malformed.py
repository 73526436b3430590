"""Tool calls that could not be decoded, told on the console without flooding it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class MalformedCalls:
    """Tells of such calls, at most once in ``interval`` seconds, and of their number in the end.

    Args:
        interval: seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, *, interval: float = 30.0, clock: Callable[[], float] = time.monotonic):
        self._interval = interval
        self._clock = clock
        self._total = self._untold = 0
        self._quiet_until = float("-inf")

    def tell(self, text: str) -> None:
        """Count one, and show what the model wrote if there was silence for long enough."""
        self._total += 1
        now = self._clock()
        if now < self._quiet_until:
            self._untold += 1
            return
        more = f" (and {self._untold} more since the last one told)" if self._untold else ""
        self._untold, self._quiet_until = 0, now + self._interval
        # Escaped: models write control characters, too, which a terminal would obey.
        logger.warning("Failed to decode tool call: %.200r%s", text, more)

    def sum_up(self) -> None:
        """Say how many there were, and begin anew."""
        if self._total:
            logger.warning(
                "Failed to decode %d tool calls in all. If the model writes calls in another format, set "
                "agent.tool_format",
                self._total,
            )
        self._total = self._untold = 0
