"""Holds a long-lived program still between two exchanges, so that its limits need no watching meanwhile.

What it started in the background is killed, and the program itself, all its threads, stopped. Signals from outside, one
process at a time, race with processes that fork or continue each other; so a pause counts only once two looks in a row
have found nothing else. Two are enough: after the first, an orphan can only be where every later look begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.watch import tree

_LOOKS = 500
_BETWEEN_SECONDS = 0.001
_DEAD, _STOPPED = "ZX", "TtZX"  # states in /proc; a dead process is there until its parent has asked for it


async def pause(pid: int, wrappers: int) -> bool:
    """Stop a program and kill everything it started.

    Args:
        pid: of the process that was started.
        wrappers: processes down from there that are not the program's: bubblewrap's.

    Returns:
        whether nothing runs any more. If not, all of it has to be ended.
    """
    quiet = 0
    for _ in range(_LOOKS):
        program, others = _split(pid, wrappers)
        if program is None:
            return True
        _send(program, signal.SIGSTOP)
        running = [other for other in others if not _all_in(other, _DEAD)]
        for other in running:
            _send(other, signal.SIGKILL)
        quiet = quiet + 1 if not running and _all_in(program, _STOPPED) else 0
        if quiet == 2:
            return True
        await asyncio.sleep(0 if quiet else _BETWEEN_SECONDS)
    return False


def resume(pid: int, wrappers: int) -> None:
    """Continue a paused program."""
    program, _ = _split(pid, wrappers)
    if program is not None:
        _send(program, signal.SIGCONT)


def _split(pid: int, wrappers: int) -> tuple[int | None, list[int]]:
    """Return the program's first process (None when it is gone) and all others it started."""
    pids = tree(pid)[
        wrappers:
    ]  # the program is the oldest child of its namespace's first process, hence the first here
    return (pids[0], pids[1:]) if pids else (None, [])


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _all_in(pid: int, states: str) -> bool:
    """Whether every thread of a process is in one of the states; the first may be dead while others run."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            if Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] not in states:
                return False
    except (FileNotFoundError, ProcessLookupError):
        return False  # changing: the next look tells
    return True
