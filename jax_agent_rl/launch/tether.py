"""``python -m jax_agent_rl.launch.tether COMMAND …``: runs a command for as long as standard input stays open.

A command on another host does not hear of a Ctrl-C here, and no process hears of a parent that was killed. But both
lose their standard input. So each command of a launch runs under a tether on its own host: when its input ends, the
command is told to stop (SIGTERM), gets ``GRACE_SECONDS``, and then all that is left of its process group is killed.

The first line of the input is a JSON object of environment variables for the command: secrets come this way, because
command lines can be read by every user of a host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

GRACE_SECONDS = 20.0
"""Between SIGTERM and SIGKILL: a rollout server closes its engine, Ray ends its processes."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status (128 + n if signal n ended it, 127 if it does not exist)."""
    variables = json.loads(sys.stdin.buffer.readline() or b"{}")
    try:
        # A session of its own: Ctrl-C of a terminal reaches it through the launcher only, and in the launcher's order.
        child = subprocess.Popen(
            argv, env=os.environ | variables, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True
        )
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", flush=True)
        return 127
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(target=_stop_at_end_of_input, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_group(child)  # what the command started and did not end itself
    return status if status >= 0 else 128 - status


def _stop_at_end_of_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        continue
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
