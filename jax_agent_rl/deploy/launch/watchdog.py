"""``python -m jax_agent_rl.deploy.launch.watchdog COMMAND …``: runs a command while standard input stays open.

No process hears of a parent that was killed, but it loses its standard input. So each process of the learner runs under
a watchdog: when its input ends, all of its process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run a command; return its exit status: 128 + n if signal n ended it."""
    libc = ctypes.CDLL(None)
    # A session of its own: what happens to the group of this process does not happen to it. But Ray kills the children
    # of an actor that it kills, this process among them, and the kernel then kills the command.
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(target=_kill_at_end_of_input, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_group(child)  # what the command started and did not end itself
    return status if status >= 0 else 128 - status


def _kill_at_end_of_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        continue
    _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
