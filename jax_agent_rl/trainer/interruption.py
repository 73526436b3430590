"""A learner update that an interruption (Ctrl-C, SIGTERM) undoes while it still can, and otherwise lets finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.metrics import UpdateResult

UNDO_SECONDS = 2.0  # for an interrupted update to stop and put the state back


class InterruptibleUpdate:
    """One step's learner update.

    Args:
        say: prints a line for people.
        stop_rollouts: stops what the engines do meanwhile.

    Attributes:
        cancellation: to be given to the learner.
    """

    def __init__(self, say: Callable[[str], None], stop_rollouts: Callable[[], Awaitable[None]]) -> None:
        self._say, self._stop_rollouts = say, stop_rollouts
        self._task: asyncio.Future[UpdateResult] | None = None
        self.cancellation = StepCancellation()

    @property
    def result(self) -> UpdateResult | None:
        """The result once the update has succeeded, even if the caller was cancelled meanwhile."""
        task = self._task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def run(self, update: Awaitable[UpdateResult]) -> None:
        """Run the update.

        Raises:
            asyncio.CancelledError: the caller was cancelled. The update is undone, or finished if it has begun for
                good; :attr:`result` tells.
        """
        self._task = asyncio.ensure_future(update)
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self.cancellation.cancel():
                self._say("  its updates have begun: finishing this learner step before saving")
                await self._stop_rollouts()
                await asyncio.wait((self._task,))
                raise
            if self.cancellation.has_begun:  # the thread goes back by itself, unless it is inside a compiler
                await asyncio.wait((self._task,), timeout=UNDO_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise
