"""Rollout servers as Ray actors, one per server, each on the node that was planned for it.

``python -m jax_agent_rl.deploy.launch.ray_servers --address H:P --gpus-per-server N --server NAME=ADDRESS:PORT …
-- COMMAND``

The command's ``{name}``, ``{address}`` and ``{port}`` are filled in for every server. Each node offers a resource with
the name of each of its servers, so Ray places them there and gives them GPUs. The first server that ends, ends all.

Actors yield what their servers say, line by line: Ray's own forwarding of output loses the last lines of an actor,
which are those that tell why it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.deploy.launch.hosts import require_free_port
from jax_agent_rl.deploy.launch.plan import SERVER_GRACE, TOKEN
from jax_agent_rl.errors import LaunchError

_JOIN_SECONDS = 120.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ServerEndpoint:
    """Name and address of a server."""

    name: str
    address: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ServerEndpoint:
        """Parse ``NAME=ADDRESS:PORT``."""
        name, _, where = text.partition("=")
        address, _, port = where.rpartition(":")
        return cls(name=name, address=address, port=int(port))

    def fill_in(self, command: Sequence[str]) -> list[str]:
        """Return the command for this server."""
        values = {"{name}": self.name, "{address}": self.address, "{port}": str(self.port)}
        for placeholder, value in values.items():
            command = [word.replace(placeholder, value) for word in command]
        return list(command)


class ServerActor:
    """One server process on this actor's node; Ray starts and names what is otherwise a plain class."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self._endpoint = endpoint
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: Sequence[str], folder: str, token: str) -> Iterator[str | int]:
        """Run the server in a folder until it ends; yield its lines, and its exit status last."""
        where = self._endpoint
        try:
            require_free_port(where.name, where.address, where.port, option="--port")
        except LaunchError as error:
            yield str(error)
            yield 1
            return
        # Ray limits its workers to one thread; the engine decides for itself.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        # Under a tether, in a session of its own: Ray kills the process groups of its workers, and neither that nor the
        # death of the worker alone may leave a server behind.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jax_agent_rl.deploy.launch.watchdog", f"{SERVER_GRACE:g}", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({TOKEN: token}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            yield line.rstrip("\n")
        yield self._process.wait()

    def stop(self) -> None:
        """Stop the server; :meth:`run` returns when it has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def main(argv: Sequence[str]) -> int:
    """Run all servers until one ends (its status is returned, at least 1) or SIGTERM comes (0)."""
    parser = argparse.ArgumentParser(prog="ray_servers")
    parser.add_argument("--address", required=True)
    parser.add_argument("--gpus-per-server", type=int, default=0)
    parser.add_argument("--server", action="append", type=ServerEndpoint.parse, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(address=arguments.address, log_to_driver=False)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which has handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        return _serve(ray, arguments.server, arguments.gpus_per_server, arguments.command, stop)
    finally:
        ray.shutdown()


def _serve(
    ray: Any, endpoints: Sequence[ServerEndpoint], gpus: int, command: Sequence[str], stop: threading.Event
) -> int:
    if missing := _wait_for_nodes(ray, endpoints, stop):
        print(f"no Ray node came for {', '.join(missing)} within {_JOIN_SECONDS:g} s", flush=True)
        return 1
    if stop.is_set():
        return 0
    received: queue.Queue[tuple[ServerEndpoint, str | int]] = queue.Queue()
    actors = []
    for endpoint in endpoints:
        # Two threads: stop() while run() waits.
        options = {"resources": {endpoint.name: 1}, "num_gpus": gpus, "num_cpus": 0, "max_concurrency": 2}
        actor = ray.remote(ServerActor).options(**options).remote(endpoint)
        said = actor.run.options(num_returns="streaming").remote(
            endpoint.fill_in(command), os.getcwd(), os.environ[TOKEN]
        )
        threading.Thread(target=_listen, args=(ray, endpoint, said, received), daemon=True).start()
        actors.append(actor)
    status = _show(received, 1, until=stop.is_set)
    for actor in actors:
        actor.stop.remote()
    deadline = time.monotonic() + SERVER_GRACE
    _show(received, len(endpoints) - (status is not None), until=lambda: time.monotonic() > deadline)
    return 0 if status is None else max(status, 1)


def _listen(
    ray: Any, endpoint: ServerEndpoint, said: Any, received: queue.Queue[tuple[ServerEndpoint, str | int]]
) -> None:
    """Forward what an actor yields."""
    try:
        for reference in said:
            received.put((endpoint, ray.get(reference)))
    except ray.exceptions.RayError as error:  # its node is gone, say
        received.put((endpoint, str(error).strip().splitlines()[0]))
        received.put((endpoint, 1))


def _show(
    received: queue.Queue[tuple[ServerEndpoint, str | int]], count: int, *, until: Callable[[], bool]
) -> int | None:
    """Print lines until ``count`` servers have ended or time is up; return the last one's status, if any ended."""
    status = None
    while count and not until():
        with contextlib.suppress(queue.Empty):
            endpoint, item = received.get(timeout=_POLL_SECONDS)
            if isinstance(item, int):
                count, status = count - 1, item
                item = f"ended on {endpoint.address} (exit status {status})"
            print(f"{endpoint.name}: {item}", flush=True)
    return status


def _wait_for_nodes(ray: Any, endpoints: Sequence[ServerEndpoint], stop: threading.Event) -> list[str]:
    """Return the servers whose node is not in the cluster when time is up."""
    for _ in range(int(_JOIN_SECONDS / _POLL_SECONDS)):
        offered = ray.cluster_resources()
        missing = [endpoint.name for endpoint in endpoints if endpoint.name not in offered]
        if not missing or stop.wait(_POLL_SECONDS):
            return []
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
