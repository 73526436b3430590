"""``python -m jax_agent_rl.deploy.launch.watchdog SECONDS COMMAND …``: runs a command while standard input stays open.

A command on another host does not hear of a Ctrl-C here, and no process hears of a parent that was killed. But both
lose their standard input. So each command of a launch runs under a tether on its own host: when its input ends, the
command is told to stop (SIGTERM), gets so many seconds, and then all that is left of its process group is killed.

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


def main(argv: Sequence[str]) -> int:
    """Run ``argv[1:]``, with ``argv[0]`` seconds to stop; return its exit status.

    That is 128 + n if signal n ended it, and 127 if it cannot be run.
    """
    grace, command = float(argv[0]), argv[1:]
    variables = json.loads(sys.stdin.buffer.readline() or b"{}")
    try:
        # A session of its own: Ctrl-C of a terminal reaches it through the launcher only, and in the launcher's order.
        child = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True
        )
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", flush=True)
        return 127
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(target=_stop_at_end_of_input, args=(child, grace), daemon=True).start()
    status = child.wait()
    _kill_group(child)  # what the command started and did not end itself
    return status if status >= 0 else 128 - status


def _stop_at_end_of_input(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        continue
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
