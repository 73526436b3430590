"""A training step in progress: its batch, and a learner update that an interruption undoes while it still can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.types import Group

UNDO_SECONDS = 2.0  # for an interrupted update to stop and put the state back


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups of one step.

    Attributes:
        groups: before any filter.
        engine: what the engines did while they were collected.
        seconds: over which ``engine`` counts.
        metrics: more named values for the step's record.
    """

    groups: list[Group]
    engine: BackendMetrics
    seconds: float
    metrics: Mapping[str, object] = field(default_factory=dict)


class InterruptibleUpdate:
    """One step's learner update. Ctrl-C or SIGTERM undoes it while that is possible, and otherwise lets it finish.

    Args:
        print_line: prints a line for people.
        stop_rollouts: stops what the engines do meanwhile.

    Attributes:
        cancellation: to be given to the learner.
    """

    def __init__(self, print_line: Callable[[str], None], stop_rollouts: Callable[[], Awaitable[None]]) -> None:
        self._print_line, self._stop_rollouts = print_line, stop_rollouts
        self._task: asyncio.Future[UpdateResult] | None = None
        self.cancellation = StepCancellation()

    @property
    def result(self) -> UpdateResult | None:
        """The result, once the update has succeeded, even if the caller was cancelled meanwhile."""
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
                self._print_line("  its updates have begun: finishing this learner step before saving")
                await self._stop_rollouts()
                await asyncio.wait((self._task,))
                raise
            if self.cancellation.has_begun:  # the thread goes back by itself, unless it is inside a compiler
                await asyncio.wait((self._task,), timeout=UNDO_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise


@dataclass(kw_only=True)
class Step:
    """A training step in progress.

    Attributes:
        number: from 1.
        began: on the trainer's clock.
        learning: the learner's update, which an interruption may undo.
        batch: what :meth:`Trainer.rollout` returned.
        publish_seconds: what :meth:`Trainer.publish` returned.
    """

    number: int
    began: float
    learning: InterruptibleUpdate
    batch: RolloutBatch | None = None
    publish_seconds: float = 0.0
