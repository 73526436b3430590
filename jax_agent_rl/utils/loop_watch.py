"""Notices when somebody's code holds the event loop, so that nothing else runs, and names it.

A blocking call in an ``async def`` (``time.sleep``, ``requests.get``, a long computation) freezes
every trajectory, and no time limit can end it: limits are kept by the same loop. A thread sees what
the loop cannot::

    watch thread ──► every so often: has the loop run since?  ──yes──► ask it again
                                          │ no, several times in a row
                                          ▼
                       the task at work and the line it is at ──► a warning that names both,
                                                                  once for each hold

Whose code it is, the stack says: the frames inside the loop, from the innermost out, up to the
first coroutine of this package. This package's own work (a compilation, say) is nobody's fault, and
neither is what called the loop: the command, or a script of the user's.

The thread counts its own rounds, not seconds, so a machine that was suspended is not a false alarm.
A call that never releases the interpreter (a backtracking regular expression) stops this thread as
well.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jax_agent_rl.utils.failures import is_own_file, is_user_file, place

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
_ROUNDS = 5  # in that time
_LOOP_MODULES = frozenset({"asyncio.base_events", "asyncio.events", "asyncio.runners"})
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
_REMEDY = (
    "nothing else can run until it returns, and no time limit can end it. Declare it `def` instead"
    " of `async def` where that is allowed (tools, rewards: they then run in a thread), or call"
    " what blocks with `await asyncio.to_thread(...)`"
)
_at_work: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Name what the current task runs, for a warning if it holds the loop.

    Args:
        what: such as ``tool 'search'``.
    """
    task = asyncio.current_task()
    if task is None:
        yield
        return

    outer = _at_work.get(task)
    _at_work[task] = what
    try:
        yield
    finally:
        if outer is None:
            _at_work.pop(task, None)
        else:
            _at_work[task] = outer


@contextmanager
def watch_loop(
    report: Callable[..., None], *, patience: float = PATIENCE_SECONDS
) -> Iterator[None]:
    """Watch the running loop within the context.

    Args:
        report: takes a kind and a message, as
            :meth:`~jax_agent_rl.utils.failures.FailureLog.report`; called in a thread of its own.
        patience: seconds without the loop running before somebody is named.
    """
    watch = _Watch(asyncio.get_running_loop(), report, patience)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    """The watch thread; see :func:`watch_loop`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Callable[..., None], patience: float
    ) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._report = report
        self._patience = patience
        self._has_run = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-loop-watch", daemon=True)

    def start(self) -> None:
        self._has_run.set()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        missed_rounds = 0
        while not self._stopping.wait(self._patience / _ROUNDS):
            if not self._has_run.is_set():
                missed_rounds += 1
                if missed_rounds == _ROUNDS:
                    self._report_holder()
                continue

            missed_rounds = 0
            self._has_run.clear()
            try:
                self._loop.call_soon_threadsafe(self._has_run.set)
            except RuntimeError:  # the loop is closed
                return

    def _report_holder(self) -> None:
        """Report whose code holds the loop, unless it is this package's own work."""
        task = asyncio.current_task(self._loop)
        what = None
        if task is not None:
            what = _at_work.get(task)

        innermost = sys._current_frames().get(self._loop_thread)
        line = line_of_others(innermost, is_named=what is not None)
        if line is None:
            return

        what = what or "code"
        self._report(
            f"{what} held the event loop",
            f"{what} holds the event loop for {self._patience:g} s, at {line}: {_REMEDY}",
        )


def line_of_others(innermost: FrameType | None, *, is_named: bool) -> str | None:
    """Return the line at which code that is not this package's holds the loop.

    Args:
        innermost: frame of the loop's thread.
        is_named: others' code is at work in this task, so an installed package's coroutine that
            this package awaits is theirs, and no dependency's.

    Returns:
        None if it is this package's own work.
    """
    user_line = None
    callee = None
    frame = innermost
    while frame is not None and frame.f_globals.get("__name__") not in _LOOP_MODULES:
        file = frame.f_code.co_filename
        if is_user_file(file):
            if frame.f_code.co_name == "<module>":
                user_line = None  # an import is the work of the code that imports the file
            elif user_line is None:
                user_line = place(file, frame.f_lineno)
        elif is_own_file(file):
            if user_line is not None:
                return user_line
            if is_named and callee is not None and _is_coroutine_of_others(callee):
                return place(callee.f_code.co_filename, callee.f_lineno)
            if _is_coroutine(frame):  # the code of others further out awaits it, and waits itself
                return None
        callee = frame
        frame = frame.f_back
    return user_line


def _is_coroutine_of_others(frame: FrameType) -> bool:
    return _is_coroutine(frame) and not is_own_file(frame.f_code.co_filename)


def _is_coroutine(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & _COROUTINE)


class OwnTime:
    """The seconds that a coroutine's own steps take, without what it waits for.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    async def measure(self, work: Coroutine[Any, Any, T], clock: Callable[[], float]) -> T:
        """Await ``work`` and add up the time of its steps.

        The steps of tasks that it starts do not count.
        """
        return await self._steps(work, clock)

    @types.coroutine
    def _steps(
        self, work: Coroutine[Any, Any, T], clock: Callable[[], float]
    ) -> Generator[Any, Any, T]:
        resume: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            start = clock()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.seconds += clock() - start

            try:
                value = yield awaited
                resume = work.send
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # a cancellation, say: it is the work's to handle
                value = error
                resume = work.throw
