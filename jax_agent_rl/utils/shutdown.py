"""A process's end: Ctrl-C and SIGTERM.

The first signal lets the run save and end, the second ends the process at once.

::

    signal ─► wakeup descriptor ─► watching thread ─┬─► cancel the run's task: it saves, then closes
                                                    │   everything
                                                    └─► second signal, or closing takes too long:
                                                        clean up, exit

A thread watches, since the main thread may be inside a compiler or loader for minutes, which would
delay Python's own signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from jax_agent_rl.utils.files import remove_temp_folders

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHUTDOWN_TIMEOUT_SECONDS = 4.5
"""Time from the signal to the end of the process; a save may take longer."""
MIN_CLOSE_SECONDS = 0.5
MAX_CLOSE_SECONDS = 2.0
"""Limits of the time for an orderly shutdown."""
LEADER_CLOSE_SECONDS = 60.0
"""The same where other processes have to stop first: without their leader they would crash."""
SERVER_EXIT_SECONDS = 10.0
"""Time from the end of a server to the end of its process."""
EXIT_CODE = 130

ExitWithin = Callable[[float], None]


class InterruptStage(Enum):
    """Stage of a run, and the message if it is interrupted there."""

    STARTING = "interrupted before training; nothing has changed"
    TRAINING = "interrupted: saving the last finished step (once more: leave at once)"
    CLOSING = "interrupted while closing; everything is saved"
    SAMPLING = "interrupted: what is complete is kept"
    """A command that trains nothing."""
    SERVING = "stopping (once more: leave at once)"
    """A server."""


_FORCED_EXIT_MESSAGES = {InterruptStage.SERVING: "leaving at once"}


@dataclass(eq=False)
class Interruption:
    """Context in which the first signal cancels the current task. Use it in the main thread.

    Args:
        print_line: prints a line for the user; called from another thread.
        exit_within: ends the process within the given seconds; called when everything worth keeping
            is on disk.
        leads: whether other processes of the run depend on this one.
        stage: the stage at the beginning, later the current one.
    """

    print_line: Callable[[str], None]
    exit_within: ExitWithin
    _: KW_ONLY
    leads: bool = False
    stage: InterruptStage = InterruptStage.STARTING
    _signalled: float | None = field(default=None, init=False)  # when the first signal came
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> Interruption:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(
            self._outbox.fileno(), warn_on_full_buffer=False
        )
        self._previous_handlers = {}
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="interruption", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self._outbox.close()

    def training_begins(self) -> None:
        """Enter the stage in which there is something to save before the process may end."""
        self._enter_stage(InterruptStage.TRAINING)

    def training_ended(self) -> None:
        """Enter the stage in which everything is on disk, so that nothing is worth waiting for."""
        self._enter_stage(InterruptStage.CLOSING)
        if self._signalled is not None:  # the signal came while the last step was saved
            self.print_line(InterruptStage.CLOSING.value)
            self._exit_in_time()

    def saved(self, step: int) -> None:
        """Report that the state after ``step`` is on disk, and leave in time."""
        self.print_line(f"interrupted; a checkpoint of step {step} is saved. Go on with --resume")
        self._exit_in_time()

    def _enter_stage(self, stage: InterruptStage) -> None:
        with self._lock:
            self.stage = stage

    def _watch(self) -> None:
        with self._inbox:
            while received := self._inbox.recv(64):
                for number in received:
                    if number in SIGNALS:
                        self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._signalled is not None:
                again = "interrupted again: leaving at once; complete checkpoints are intact"
                self.print_line(_FORCED_EXIT_MESSAGES.get(self.stage, again))
                self.exit_within(0.0)
                return
            self._signalled = time.monotonic()
            stage = self.stage

        self.print_line(stage.value)
        self._loop.call_soon_threadsafe(self._task.cancel)
        # A run has to save, and a server to finish its requests; both leave in time by themselves.
        if stage not in (InterruptStage.TRAINING, InterruptStage.SERVING):
            self._exit_in_time()

    def _exit_in_time(self) -> None:
        assert self._signalled is not None
        if self.leads:
            self.exit_within(LEADER_CLOSE_SECONDS)
            return
        remaining = self._signalled + SHUTDOWN_TIMEOUT_SECONDS - time.monotonic()
        self.exit_within(min(max(remaining, MIN_CLOSE_SECONDS), MAX_CLOSE_SECONDS))


_exit_hooks: list[Callable[[], None]] = []


@contextlib.contextmanager
def on_forced_exit(hook: Callable[[], None]) -> Iterator[None]:
    """Call ``hook`` if the process is forced to exit within the context.

    Args:
        hook: ends the process's children, say; called in another thread.
    """
    _exit_hooks.append(hook)
    try:
        yield
    finally:
        _exit_hooks.remove(hook)


def exit_within(print_line: Callable[[str], None], seconds: float) -> None:
    """Give an orderly shutdown some seconds, then end the process.

    A thread inside a compiler, for one, cannot be stopped.

    Args:
        print_line: prints a line for the user; called from another thread.
        seconds: 0 ends the process at once.
    """

    def force_exit() -> None:
        if seconds:
            print_line(
                "something that cannot be stopped (a compilation?) still runs; leaving without"
                " waiting for it"
            )
        for hook in list(_exit_hooks):
            hook()
        remove_temp_folders()
        os._exit(EXIT_CODE)

    if not seconds:
        force_exit()
    timer = threading.Timer(seconds, force_exit)
    timer.daemon = True
    timer.start()


def run_server(
    main: Coroutine[Any, Any, None], *, print_line: Callable[[str], None] = print
) -> None:
    """Run a server on an event loop until SIGINT or SIGTERM cancels it.

    The second signal ends the process at once.

    Args:
        print_line: prints a line for the user; called from another thread.
    """
    interruption = Interruption(
        print_line,
        functools.partial(exit_within, print_line),
        stage=InterruptStage.SERVING,
    )

    async def run_until_interrupted() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(interruption)
            try:
                await main
            except asyncio.CancelledError:
                stack.pop_all()  # keep handling signals while the interpreter ends
                # The interpreter would wait even for threads that cannot be stopped.
                exit_within(print_line, SERVER_EXIT_SECONDS)

    asyncio.run(run_until_interrupted())
