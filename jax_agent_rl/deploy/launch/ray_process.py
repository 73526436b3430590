"""A process of a run on a node: an actor that yields its output, and the watchdog between the two.

``python -m jax_agent_rl.deploy.launch.ray_process COMMAND …`` is the watchdog: it runs a command
while standard input stays open. No process hears of a parent that was killed, but it loses its
standard input; then all of the command's process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

_PR_SET_PDEATHSIG = 1


class NodeProcess:
    """One process on this actor's node; Ray starts and names what is otherwise a plain class."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def address(self) -> str:
        """Return an address of this node at which processes can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            _, port = listener.getsockname()
        return f"{host}:{port}"

    def run(
        self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]
    ) -> Iterator[str | int]:
        """Run ``python -m jax_agent_rl.cli`` in a folder until it ends.

        It yields the lines of its output, and its exit status last. Ray's own forwarding of output
        loses an actor's last lines, which tell why it ended.
        """
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        # Ray's limit of its workers; the learner decides for itself.
        environment.pop("OMP_NUM_THREADS", None)
        # Under a watchdog, in a session of its own: Ray kills the process groups of its workers,
        # and neither that nor the death of the worker alone may leave a process behind.
        watchdog = [sys.executable, "-m", "jax_agent_rl.deploy.launch.ray_process"]
        self._process = subprocess.Popen(
            [*watchdog, sys.executable, "-m", "jax_agent_rl.cli", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.rstrip("\n")
        yield self._process.wait()

    def terminate(self) -> None:
        """Let the process save and end."""
        if self._process is not None:
            self._process.terminate()


def main(argv: Sequence[str]) -> int:
    """Run a command under the watchdog; return its exit status, 128 + n if signal n ended it."""
    libc = ctypes.CDLL(None)
    # A session of its own: what happens to the group of this process does not happen to it. But Ray
    # kills the children of an actor that it kills, this process among them, and the kernel then
    # kills the command.
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )

    def kill_group() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def kill_at_end_of_input() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            continue
        kill_group()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    threading.Thread(target=kill_at_end_of_input, daemon=True).start()
    status = child.wait()
    kill_group()  # what the command started and did not end itself
    if status < 0:
        return 128 - status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
