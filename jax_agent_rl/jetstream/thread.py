"""The thread an engine runs in, and how the asyncio side reaches it.

::

    asyncio side                                      the thread
    post(command), call(function) ──► commands ──►    each command, then one turn of the work, repeatedly
        ▲                                                │
        └──── futures, one loop call a turn ◄──settle, tell

Commands run between turns, so pauses, aborts and weight updates never interrupt a step. The thread sleeps on a
condition while it has neither commands nor work. When it ends, every pending future gets the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError

logger = logging.getLogger(__name__)
T = TypeVar("T")
BURST_GAP_SECONDS = 0.001  # an idle engine starts once no request has come for this long,
BURST_SECONDS = 0.02  # or this long after the first


class EngineWork(Protocol):
    """The work of the thread; all of it runs there."""

    def set_up(self) -> None:
        """Prepare; called once, first."""
        ...

    def has_work(self) -> bool:
        """Whether a turn would do something without a command."""
        ...

    def turn(self) -> None:
        """Run one step, after pending commands."""
        ...


class EngineThread:
    """The thread of the module docstring. All but ``settle`` and ``tell`` are for the asyncio side.

    Args:
        on_end: called on the asyncio side when the thread ends, with the reason.
    """

    def __init__(self, on_end: Callable[[BackendError], None]) -> None:
        self._on_end = on_end
        self._commands: deque[Callable[[], object]] = deque()
        self._promises: set[asyncio.Future] = set()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: str | None = None

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def start(self, work: EngineWork) -> None:
        """Start the thread and wait until the work is set up; raise what that raises."""
        if self._thread is not None:
            raise BackendError("the backend was already started")
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(work, ready), name="jetstream-engine", daemon=True)
        self._thread.start()
        await ready

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def post(self, command: Callable[[], object], promise: asyncio.Future | None = None) -> None:
        """Queue a command.

        Args:
            command: runs in the thread.
            promise: a future the command settles, now or later; fails if the thread ends first.

        Raises:
            EngineDiedError: the engine died.
            BackendClosedError: the backend is closed, or not started.
        """
        with self._wake:  # the thread also ends under this lock, so no command comes after its end
            if self._failure:
                raise EngineDiedError(self._failure)
            if self._closing or self._thread is None:
                raise BackendClosedError(
                    "the backend is closed" if self._closing else "the backend was not started: call start()"
                )
            if promise is not None:
                self._promises.add(promise)
                promise.add_done_callback(self._promises.discard)
            self._commands.append(command)
            self._wake.notify()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, between turns, and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # raised in the caller
                self.settle(future, error=error)
            else:
                self.settle(future, result)

        self.post(command, future)
        return await future

    # --- the thread -------------------------------------------------------------------------------------------

    def settle(self, future: asyncio.Future, result: Any = None, *, error: Exception | None = None) -> None:
        """Settle a future of the asyncio side."""
        self.tell(_settle, future, result, error)

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the asyncio loop, unless the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the asyncio loop closed before the engine thread")

    def _run(self, work: EngineWork, ready: asyncio.Future[None]) -> None:
        try:
            work.set_up()
        except Exception as error:
            self.settle(ready, error=error)
            self._end(EngineDiedError(f"the engine could not start: {error}"))
            return
        self.settle(ready)
        try:
            while self._serve_once(work):
                pass
        except Exception as error:  # the engine is lost, its callers must not hang
            logger.exception("the engine thread died")
            self._end(EngineDiedError(f"the engine died: {type(error).__name__}: {error}"))
        else:
            self._end(BackendClosedError("the backend was closed before this ended"))

    def _serve_once(self, work: EngineWork) -> bool:
        """Run commands, then one turn; return False when closing."""
        with self._wake:
            if not (self._closing or self._commands or work.has_work()):
                self._wait_for_commands()
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        work.turn()
        return True

    def _wait_for_commands(self) -> None:
        """Sleep until a command comes, then until the burst of requests ends.

        Otherwise the first request of a burst would decode alone while the others wait for its dispatch.
        """
        while not (self._closing or self._commands):
            self._wake.wait()
        deadline = time.perf_counter() + BURST_SECONDS
        while not self._closing and self._wake.wait(BURST_GAP_SECONDS) and time.perf_counter() < deadline:
            pass

    def _end(self, error: BackendError) -> None:
        with self._wake:
            if isinstance(error, EngineDiedError):
                self._failure = str(error)
            self._commands.clear()
        self.tell(self._fail_all, error)

    def _fail_all(self, error: BackendError) -> None:
        for promise in list(self._promises):
            _settle(promise, None, error)
        self._on_end(error)


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():  # the caller went away, or the thread ended first
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
