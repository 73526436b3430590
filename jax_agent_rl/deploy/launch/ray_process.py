"""Processes of a run on the nodes of a Ray cluster: one actor each, which yields what its process says.

Ray's own forwarding of output loses an actor's last lines, which tell why it ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import LaunchError

_READY = "tool server on "
_READY_SECONDS, _RESTART_SECONDS = 120.0, 1.0


class NodeProcess:
    """One process on this actor's node; Ray starts and names what is otherwise a plain class."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def address(self) -> str:
        """Return an address of this node at which processes can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def run(self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> Iterator[str | int]:
        """Run ``python -m jax_agent_rl.cli`` in a folder until it ends; yield its lines, and its exit status last."""
        # Ray limits its workers to one thread; the learner decides for itself.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        # Under a watchdog, in a session of its own: Ray kills the process groups of its workers, and neither that nor
        # the death of the worker alone may leave a process behind.
        watchdog = [sys.executable, "-m", "jax_agent_rl.deploy.launch.watchdog"]
        self._process = subprocess.Popen(
            [*watchdog, sys.executable, "-m", "jax_agent_rl.cli", *arguments],
            cwd=folder,
            env={**environment, "PYTHONUNBUFFERED": "1", **variables},
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


class LearnerProcess(NodeProcess):
    """A process of the learner."""


class ToolServerProcess(NodeProcess):
    """A tool server beside process 0 of the learner."""


def start(kind: type[NodeProcess], name: str, group: Any, bundle: int, *, cpus: int = 1, gpus: int = 0) -> Any:
    """Start the actor of a process in a bundle of a placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = ray.remote(kind).options(
        name=name,
        num_cpus=cpus,
        num_gpus=gpus,
        max_concurrency=2,  # terminate() while run() goes on
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    return options.remote()


def outputs(actor: Any, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[str | int | None]:
    """Yield the lines of an actor's process, then its exit status; None if the actor or its node is lost."""
    import ray
    from ray.exceptions import RayError

    try:
        for reference in actor.run.options(num_returns="streaming").remote(arguments, os.getcwd(), variables):
            yield ray.get(reference)
    except RayError as error:
        yield str(error).strip().splitlines()[0]
        yield None


@contextlib.contextmanager
def tool_server(file: str, group: Any, attempt: int, print_line: Callable[[str], None]) -> Iterator[None]:
    """Run a tool server on the node of process 0 while the context lasts; start it again whenever it ends.

    Args:
        file: its settings, see ``jax-agent-rl tool-server --config``.
        group: placement group of the learner.
        attempt: number of the learner's start, which makes the actors' names unique.
        print_line: prints a line of the tool server.

    Raises:
        LaunchError: it ends, or does not serve, before it was ready once.
    """
    import ray

    ready, ended = threading.Event(), threading.Event()
    actors: list[Any] = []

    def serve() -> None:
        while not ended.is_set():
            actors.append(start(ToolServerProcess, f"tool-server-{attempt}-{len(actors)}", group, 0, cpus=0))
            status = None
            for status in outputs(actors[-1], ["tool-server", "--config", file], {}):
                if isinstance(status, str):
                    print_line(f"[tool server] {status}")
                    if status.startswith(_READY):
                        ready.set()
            if not ready.is_set() or ended.wait(_RESTART_SECONDS):
                return
            print_line(f"[tool server] ended with status {status}: starting it again")

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not ready.wait(_RESTART_SECONDS):
            if not serving.is_alive() or time.monotonic() > deadline:
                raise LaunchError(f"the tool server of --tool-server={file} did not start; the lines above say why")
        yield
    finally:
        ended.set()
        ray.kill(actors[-1])
