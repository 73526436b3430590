"""A process's start: its allocator, its environment, its log, and JAX without accelerators."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import sys
import threading
from pathlib import Path
from typing import TextIO

from jax_agent_rl.utils.failures import INSTALLED_FOLDERS
from jax_agent_rl.utils.memory import available_memory
from jax_agent_rl.utils.packages import is_installed
from jax_agent_rl.utils.text import printable

KEEP_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"
    ":glibc.malloc.trim_threshold=17179869184"
)
"""``GLIBC_TUNABLES`` of a process that computes on CPUs: freed memory stays, in huge pages."""
AHEAD_BYTES = 4 * 2**30
"""Memory that is touched ahead: weights, optimizer, cache and first gradients of a small model."""
_PIECE_BYTES = 64 * 2**20


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


def touch_memory_ahead(count: int = AHEAD_BYTES) -> threading.Thread | None:
    """Let the system clear memory beside this process's imports, in a thread.

    Memory is cleared when it is touched for the first time, by the thread that touches it. On a
    virtual machine the host may have to find it first: two seconds a gigabyte were measured. What
    is freed here stays with a process that :func:`keep_freed_memory` has started, and XLA's next
    allocations take it. Nothing is touched in other processes.

    Args:
        count: bytes, of which no more are touched than half of what is available.

    Returns:
        the thread; None if nothing is touched.
    """
    if os.environ.get("GLIBC_TUNABLES") != KEEP_MEMORY:
        return None
    num_pieces = min(count, available_memory() // 2) // _PIECE_BYTES
    thread = threading.Thread(target=_touch, args=(num_pieces,), name="touch-memory", daemon=True)
    thread.start()
    return thread


def _touch(num_pieces: int) -> None:
    libc = ctypes.CDLL(None)  # its calls run without Python's lock
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    # First all, then one after another: what is freed meanwhile is taken by others, and must not
    # come back here.
    pieces = []
    for _ in range(num_pieces):
        address = libc.malloc(_PIECE_BYTES)
        if address is None:
            break
        pieces.append(address)
    for address in pieces:
        libc.memset(address, 0, _PIECE_BYTES)
        libc.free(address)


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


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``.

    A live display replaces it to print above itself. If the real standard error is not a terminal,
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
    handler.setLevel(logging.WARNING)  # Harbor's loggers ask for every record themselves
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
def ignore_abandoned_transfers() -> None:
    """Silence reads and writes of tensorstore that end after Orbax has given up a checkpoint.

    On a full disk there is one per array, and where an array is damaged there may be. The first
    one's error is the checkpoint's own. The others print tracebacks: threads that are not Python's
    find their event loop closed, or asyncio finds, whenever garbage is collected, that nothing
    awaited them. A read that Orbax has left unfinished in a loop that it has closed prints a page
    when it is collected.
    """
    previous_hook = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        text = str(unraisable.exc_value)
        if unraisable.exc_type is RuntimeError and text == "Event loop is closed":
            return
        if text.startswith("Encountered error while reading array index"):
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
