"""Failures of the user's code: where it failed, and a log that tells of repeated failures once.

Tools, rewards, environments, simulated users and agents are the user's. When one of them fails, it
usually fails for every trajectory, and a model repeats its mistakes likewise. So a
:class:`FailureLog` tells of the first failure of a kind in full, and counts the others::

    report(kind, message) ──► first of its kind ──► a warning, with the lines of the user's code
                          └─► a repetition ──► counted ──► one line for all kinds, once per
                                                           interval and at the end
"""

from __future__ import annotations

import logging
import os
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_agent_rl.errors import TrajectoryError
from jax_agent_rl.utils.text import printable

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE_FOLDERS = (
    f"{_ROOT / 'jax_agent_rl'}{os.sep}",
    f"{_ROOT / 'gpu_backend'}{os.sep}",
)
_SCRIPTS = os.path.realpath(sysconfig.get_path("scripts"))
_STANDARD_LIBRARY = str(Path(os.__file__).resolve().parent) + os.sep
INSTALLED_FOLDERS = (f"{os.sep}site-packages", f"{os.sep}dist-packages")
_MAX_MESSAGE = 1000  # characters, and of an error
_MAX_ERROR = 300
_MAX_KINDS = 64


# --- where it failed ------------------------------------------------------------------------------


def is_user_file(name: str) -> bool:
    """Return whether a file with code is the user's.

    It is not if it belongs to this package, to Python or to an installed package.
    """
    if name.startswith("<"):  # <frozen importlib._bootstrap>, <string>
        return False
    if is_own_file(name) or name.startswith(_STANDARD_LIBRARY):
        return False
    if os.path.realpath(os.path.dirname(name)) == _SCRIPTS:
        return False  # jax-agent-rl, pytest: they only start what is installed
    return not any(folder + os.sep in name for folder in INSTALLED_FOLDERS)


def is_own_file(name: str) -> bool:
    """Return whether a file with code is of this package."""
    return name.startswith(_PACKAGE_FOLDERS)


def place(file: str, line: int) -> str:
    """Return ``my_tools.py:12``; files below the working directory are named from there."""
    working_directory = os.getcwd() + os.sep
    return f"{file.removeprefix(working_directory)}:{line}"


def error_place(error: BaseException) -> str:
    """Return the line of the user's code in which an exception was raised.

    Without such a line it is the line that raised it; empty for an exception that was never raised
    here.
    """
    lines = _traceback_lines(error)
    if not lines:
        return ""
    user_lines = [(file, line) for file, line in lines if is_user_file(file)]
    file, line = (user_lines or lines)[-1]
    return place(file, line)


def raised_by_user(error: BaseException) -> str:
    """Return the line that raised an exception if it is the user's code, else an empty text."""
    lines = _traceback_lines(error)
    if not lines:
        return ""
    file, line = lines[-1]
    if not is_user_file(file):
        return ""
    return place(file, line)


def _traceback_lines(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each call that an exception went through, outermost first."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        lines.append((frame.f_code.co_filename, line))
    return lines


def describe_error(error: BaseException) -> str:
    """Return ``ValueError: no such shop (my_tools.py:12)``."""
    text = f"{type(error).__name__}: {_brief(str(error), _MAX_ERROR)}".removesuffix(": ")
    location = error_place(error)
    if not location:
        return text
    return f"{text} ({location})"


def user_code_error(
    error_type: type[TrajectoryError], what: str, error: BaseException
) -> TrajectoryError:
    """Return the error of a trajectory that is lost because the user's code raised.

    Its message has file and line.

    Args:
        error_type: class of the error to return.
        what: names the code that raised, e.g. ``environment 'shop': step``.
    """
    trajectory_error = error_type(f"{what} raised {describe_error(error)}")
    trajectory_error.failed_at = error_place(error)
    return trajectory_error


@contextmanager
def user_code(error_type: type[TrajectoryError], what: str) -> Iterator[None]:
    """Turn what the user's code raises inside into the error of a lost trajectory.

    A TrajectoryError passes as it is. Arguments as in :func:`user_code_error`.
    """
    try:
        yield
    except TrajectoryError:
        raise
    except Exception as error:
        raise user_code_error(error_type, what, error) from error


# --- the log --------------------------------------------------------------------------------------


class FailureLog:
    """Logs failures that repeat; may be called from any thread.

    Args:
        interval: seconds between two lines about repetitions.
        clock: seconds, monotonic.
        emit: receives each text for the user; None logs it as a warning.
    """

    def __init__(
        self,
        *,
        interval: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        emit: Callable[[str], None] | None = None,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._emit = emit or _log
        self._known: set[str] = set()
        self._repeated: Counter[str] = Counter()
        self._latest: dict[str, str] = {}
        self._next_summary = 0.0
        self._lock = threading.Lock()

    def report(
        self,
        kind: str,
        message: str,
        *,
        hint: str = "",
        error: BaseException | None = None,
        once: bool = False,
    ) -> None:
        """Tell of a failure, or count it if the user has been told of one of its kind.

        Args:
            kind: names what repetitions have in common, in few words; must not hold what differs
                between them.
            message: what happened; anybody may have written parts of it.
            hint: what to do about it; told the first time.
            error: the exception behind it, whose lines are shown the first time.
            once: do not count repetitions here, since metrics and each step's line tell of them.
        """
        message = printable(_brief(message, _MAX_MESSAGE), one_line=True)
        with self._lock:
            if kind not in self._known and len(self._known) >= _MAX_KINDS:
                kind = "other failures"
            is_first = kind not in self._known
            self._known.add(kind)
            if not is_first:
                if not once:
                    self._count(kind, message)
                return

        text = f"{message}; {hint}" if hint else message
        if error is not None:
            text += "\n" + _user_lines(error)
        self._emit(text)

    def flush(self) -> None:
        """Tell of the repetitions that were only counted."""
        with self._lock:
            self._summarize()

    def _count(self, kind: str, message: str) -> None:
        now = self._clock()
        if not self._repeated:  # the first repetition since the last summary
            self._next_summary = now + self._interval
        self._repeated[kind] += 1
        self._latest[kind] = message
        if now >= self._next_summary:
            self._summarize()

    def _summarize(self) -> None:
        if not self._repeated:
            return
        by_frequency = self._repeated.most_common()
        counts = "; ".join(f"{count} x {kind}" for kind, count in by_frequency)
        most_frequent, _ = by_frequency[0]
        latest = _brief(self._latest[most_frequent], _MAX_ERROR)
        self._repeated.clear()
        self._latest.clear()
        self._emit(f"since then, again: {counts}. The latest: {latest}")


def _log(text: str) -> None:
    logger.warning("%s", text)


def _brief(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}…"


def _user_lines(error: BaseException) -> str:
    """Return the lines of a traceback that are the user's; all of them if none is."""
    lines = traceback.extract_tb(error.__traceback__)
    user_lines = [line for line in lines if is_user_file(line.filename)]
    text = "".join(traceback.format_list(user_lines or lines))
    return printable(text.rstrip())
