"""A process's start and end: logging, JAX on machines without accelerators, Ctrl-C and SIGTERM.

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
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from jax_agent_rl.utils.failures import INSTALLED_FOLDERS
from jax_agent_rl.utils.files import remove_temp_folders
from jax_agent_rl.utils.packages import is_installed
from jax_agent_rl.utils.text import printable

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

KEEP_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"
    ":glibc.malloc.trim_threshold=17179869184"
)
"""``GLIBC_TUNABLES`` of a process that computes on CPUs: freed memory stays, in huge pages."""

ExitWithin = Callable[[float], None]


def keep_freed_memory() -> None:
    """Restart this process, at its very start, with an allocator that keeps freed memory.

    XLA allocates a program's temporaries anew each time it runs: gigabytes in a learner step, which
    the system first has to clear. Keeping them took the learner of
    ``benchmarks/learner_profile.py`` from 77 to 84 % of sgemm on two AVX2 cores. glibc (2.35 or
    newer) reads its settings once, before a program's first statement.

    This does nothing where the settings are made already, and where the system has no glibc.
    """
    if "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    environment = os.environ | {"GLIBC_TUNABLES": KEEP_MEMORY}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def own_python(*arguments: str) -> list[str]:
    """Return a command of this interpreter that does not import from the working directory.

    Otherwise a file of the user's called ``random.py`` or ``types.py`` would take the place of
    Python's module. Where this package is not installed, the process needs :func:`own_environment`.
    """
    return [sys.executable, "-P", *arguments]


def own_environment() -> dict[str, str]:
    """Return the environment of a process that imports this package as this process does."""
    folder = str(Path(__file__).resolve().parents[2])
    if any(part in folder for part in INSTALLED_FOLDERS):
        return dict(os.environ)

    python_path = folder
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        python_path = f"{folder}{os.pathsep}{inherited}"
    return os.environ | {"PYTHONPATH": python_path}


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
        main: the server.
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


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``.

    A live display replaces it to print above itself. If the real standard error is no terminal,
    that one is used.
    """

    def emit(self, record: logging.LogRecord) -> None:
        real_stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.setStream(sys.stderr if real_stderr.isatty() else real_stderr)
        super().emit(record)


class _PrintableFormatter(logging.Formatter):
    """Formatter of records that may quote what others wrote: nothing in one steers the terminal.

    All lines of a record but its first are indented, so that none can be forged.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


def quiet_logging() -> None:
    """Show this package's warnings on the screen, and silence other libraries."""
    handler = _StderrHandler()
    handler.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for library in ("jax", "orbax"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # This package reports Orbax's failures itself.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers misses PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@functools.cache
def ignore_late_writes() -> None:
    """Silence writes of tensorstore that fail after Orbax has given up a checkpoint.

    On a full disk there is one per array. The first one's error is the checkpoint's own. The others
    print tracebacks: threads that are not Python's find their event loop closed, or asyncio finds,
    whenever garbage is collected, that nothing awaited them.
    """
    previous_hook = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        is_runtime_error = unraisable.exc_type is RuntimeError
        if is_runtime_error and str(unraisable.exc_value) == "Event loop is closed":
            return
        previous_hook(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("asyncio").addFilter(_is_no_late_write)


def _is_no_late_write(record: logging.LogRecord) -> bool:
    if "was never retrieved" not in record.getMessage():
        return True
    error = record.exc_info and record.exc_info[1]
    return "in OCDBT database" not in str(error)


def ignore_absent_tpus(devices: Path = Path("/dev")) -> None:
    """Set ``JAX_PLATFORMS=cpu`` where libtpu is installed and the machine has neither TPU nor GPU.

    libtpu may be installed only to compile for absent TPUs (``jax-agent-rl plan``); JAX would look
    for them and complain in every command. A variable that is set stays as it is. Call this before
    JAX is imported.
    """
    if "JAX_PLATFORMS" in os.environ or not is_installed("libtpu"):
        return
    for pattern in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*"):
        if any(devices.glob(pattern)):
            return
    os.environ["JAX_PLATFORMS"] = "cpu"
