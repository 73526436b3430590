"""One sink in a thread of its own, so that no library, network or full disk can stop or slow training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from jax_agent_rl.observe.sinks.base import RunFacts, Sink


class SinkThread:
    """Feeds a sink; begins at once.

    Args:
        name: as in ``trainer.logger``.
        sink: what is fed.
        run: what it is told.
        begun: takes the name and the sink's identity once it is open.
        say: takes a line for the user.

    Attributes:
        failures: records the sink has lost.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        run: RunFacts,
        *,
        begun: Callable[[str, Mapping[str, str]], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.failures = 0
        self._sink = sink
        self._begun = begun
        self._say = say
        self._said = False
        self._records: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._feed, args=(run,), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queues a record; returns at once."""
        self._records.put((values, step))

    def end(self) -> None:
        """No more records will come."""
        self._records.put(None)

    def wait(self, seconds: float) -> None:
        """Waits for it to have kept all; after ``seconds`` it is left behind, and that is said."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.failures += self._records.qsize()
            self._say(f"  warning: {self.name} did not finish within {seconds:.0f} s; metrics.jsonl has everything")

    def _feed(self, run: RunFacts) -> None:
        works = self._try("cannot begin", lambda: self._begun(self.name, self._sink.open(run)))
        while (item := self._records.get()) is not None:
            values, step = item
            if not works or not self._try("failed", lambda values=values, step=step: self._log(values, step)):
                self.failures += 1
        self._try("cannot end", self._sink.close)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._sink.log(values, step=step)

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Whether it worked. The first failure is said, the rest counted: libraries fail in ways of their own."""
        try:
            action()
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(
                    f"  warning: {self.name} {what} ({type(error).__name__}: {error}); the run goes on, and "
                    "metrics.jsonl has everything"
                )
            return False
        return True
