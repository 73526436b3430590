"""Ctrl-C and SIGTERM: the first one asks the run to save and end, a second one kills the process as usual."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSING_SECONDS = 3.0
EXIT_CODE = 130


class Interruption:
    """Inside, the first signal cancels the current task.

    Args:
        say: takes a line for the user.
        leave: sees to it that the process ends soon; called when everything worth it is on disk.
    """

    def __init__(self, say: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._say = say
        self._leave = leave
        self._training = False

    def __enter__(self) -> Interruption:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            self._restore()
            task.cancel()
            if self._training:
                self._say("interrupted: saving the last finished step (once more: leave at once)")
            else:
                self._say("interrupted before training; nothing has changed")
                self._leave()

        for number in SIGNALS:
            self._loop.add_signal_handler(number, interrupt)
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore()

    def training_begins(self) -> None:
        """From here on there is something to save before the process may go."""
        self._training = True

    def saved(self, step: int) -> None:
        """The state after ``step`` is on disk."""
        self._say(f"interrupted; a checkpoint of step {step} is saved. Go on with --resume")
        self._leave()

    def _restore(self) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)


def leave_soon(say: Callable[[str], None]) -> None:
    """Gives an orderly shutdown a moment, then ends the process: a thread inside a compiler cannot be stopped."""

    def leave() -> None:
        say("something that cannot be stopped (a compilation?) still runs; leaving without waiting for it")
        os._exit(EXIT_CODE)

    timer = threading.Timer(CLOSING_SECONDS, leave)
    timer.daemon = True
    timer.start()
