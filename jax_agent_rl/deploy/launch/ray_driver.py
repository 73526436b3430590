"""``python -m jax_agent_rl.deploy.launch.ray_driver``: what a Ray job of ``gpu.sh`` runs.

::

    driver ──► placement group: a bundle on each of learner.multihost.num_processes nodes
       ├─────► actor learner-0 ──► jax-agent-rl train …  ──► engines, in placement groups of their own
       ├─────► actor learner-1… ─► jax-agent-rl train …      all joined by jax.distributed.initialize
       └─────► actor tool-server on the node of process 0 ──► jax-agent-rl tool-server …   (--tool-server)
    a process of the learner or its node is lost ──► all are ended, and started anew from the newest checkpoint
    the tool server ends ──► it is started again; its clients retry meanwhile
    SIGTERM (a job that is stopped) ──► process 0, which saves with the help of all
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.config import Config, load
from jax_agent_rl.deploy.launch import count, positive
from jax_agent_rl.deploy.launch.ray_process import NodeProcess
from jax_agent_rl.errors import JaxAgentRLError, LaunchError
from jax_agent_rl.runtime.ray_cluster import RAY_FIX
from jax_agent_rl.utils.process import EXIT_CODE
from jax_agent_rl.utils.services import start_service_blocking
from jax_agent_rl.utils.text import printable

OWN_KEYS = ("learner.multihost.coordinator", "learner.multihost.process_id", "rollout.ray_address")
"""Keys that the driver sets itself."""
SHARED_UTILIZATION = 0.45
"""vLLM's part of a GPU that it shares with the learner, unless the configuration says otherwise."""
_LEARNER_MEMORY = 0.45
_RUN_FOLDER = "run folder: "
_GRACE = 30.0  # seconds between the end of one process and that of the others
_POLL_SECONDS, _PROGRESS_SECONDS = 0.5, 15.0
_TOOLS_READY = "tool server on "
_TOOLS_READY_SECONDS, _TOOLS_RESTART_SECONDS = 120.0, 1.0
_KILLED = 128  # and the signal's number
Output = str | int | None
"""A line of a process; after the last one its exit status, or None if it is lost."""


def load_run(config: str, overrides: Sequence[str]) -> Config:
    """Load a configuration as runs of ``gpu.sh`` see it: with vLLM, unless an override names another backend.

    Raises:
        ConfigError: it is wrong.
        LaunchError: an override sets a key that the driver sets itself.
    """
    for item in overrides:
        if item.partition("=")[0].strip() in OWN_KEYS:
            raise LaunchError(f"{item}: gpu.sh sets {', '.join(OWN_KEYS)} itself; leave it out")
    return load(config, ["rollout.backend=vllm", *overrides])


def place_engines(config: Config, free_gpus: Sequence[int]) -> tuple[list[str], dict[str, str]]:
    """Decide where the engines run, unless the configuration does by ``rollout.placement``.

    Every GPU that the learner leaves free serves, ``rollout.vllm.tensor_parallel_size`` per engine.
    If it leaves too few, one engine shares the GPUs of the learner. Without GPUs there is one
    engine beside the learner.

    Args:
        config: the configuration.
        free_gpus: GPUs of each node that the learner does not take; empty for a run on CPUs.

    Returns:
        Overrides and environment variables of the learner's processes.
    """
    rollout = config.rollout
    if "placement" in rollout.model_fields_set or rollout.backend == "remote":
        return [], {}
    if not free_gpus:
        return ["rollout.placement=separate", "rollout.gpus_per_engine=0"], {}
    group = rollout.vllm.tensor_parallel_size if rollout.backend == "vllm" else 1
    if engines := sum(gpus // group for gpus in free_gpus):
        return [
            "rollout.placement=separate",
            f"rollout.num_engines={engines}",
            f"rollout.gpus_per_engine={group}",
        ], {}
    chosen = "gpu_memory_utilization" in rollout.vllm.model_fields_set
    part = [] if chosen else [f"rollout.vllm.gpu_memory_utilization={SHARED_UTILIZATION}"]
    return ["rollout.placement=colocated", *part], {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(_LEARNER_MEMORY)
    }


@dataclass
class Driver:
    """Runs the learner's processes, again after each loss."""

    arguments: argparse.Namespace  # the command line
    config: Config
    stop: threading.Event  # set when the job is stopped
    run_dir: str | None = None  # once process 0 has said it

    def __post_init__(self) -> None:
        self.count = self.config.learner.multihost.num_processes or 1
        self.gpus = (
            self.config.learner.mesh.devices // self.count if self.arguments.device == "cuda" else 0
        )

    def run(self) -> int:
        """Run until process 0 ends; return its exit status.

        Raises:
            LaunchError: there are too few nodes, or too many were lost.
        """
        most, tools = self.arguments.max_restarts, self.arguments.tool_server
        resume = ["--resume"] if self.arguments.resume else []
        for attempt in range(most + 1):
            status = None
            with self._placed() as group:
                if group is not None:
                    with _tool_server(tools, group, attempt) if tools else contextlib.nullcontext():
                        status = self._attempt(group, attempt, resume)
            if self.stop.is_set():
                return 0 if status == 0 else EXIT_CODE
            if status is not None:
                return status
            resume = ["--auto-resume"]
            _print_line(f"a process of the learner was lost ({attempt + 1} of {most} times)")
        raise LaunchError(
            f"gave up after {most} restarts (--max-restarts); --resume goes on from the last"
            " checkpoint"
        )

    @contextlib.contextmanager
    def _placed(self) -> Iterator[Any]:
        """Reserve a bundle on every node of the learner; yield None if the job is stopped meanwhile.

        Raises:
            LaunchError: the cluster has no room for learner and engines in time.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle: dict[str, float] = {"CPU": 1, "GPU": self.gpus} if self.gpus else {"CPU": 1}
        needs = self._engine_needs()
        group = placement_group([bundle] * self.count, strategy="STRICT_SPREAD")
        begin, reported = time.monotonic(), -_PROGRESS_SECONDS
        try:
            while not self.stop.is_set():
                placed, free = group.wait(_POLL_SECONDS), ray.available_resources()
                if placed and all(free.get(name, 0) >= wanted for name, wanted in needs.items()):
                    break
                elapsed = time.monotonic() - begin
                if elapsed - reported > _PROGRESS_SECONDS:
                    reported = elapsed
                    _print_line(
                        f"waiting for room: {self.count} node(s) for the learner with"
                        f" {_plain(bundle)} each, and {_plain(needs)} for the engines; free:"
                        f" {_plain(free)}"
                    )
                if elapsed > self.arguments.start_timeout:
                    raise LaunchError(
                        f"no room after {elapsed:.0f} s (--start-timeout), see the line above; add"
                        " nodes"
                    )
                self.stop.wait(_POLL_SECONDS)
            yield None if self.stop.is_set() else group
        finally:
            remove_placement_group(group)

    def _engine_needs(self) -> dict[str, float]:
        """Return the resources of the engines in Ray actors, and of the learner's bundle beside them."""
        rollout = self.config.rollout
        chosen = "placement" in rollout.model_fields_set
        if rollout.backend == "remote" or (chosen and rollout.placement == "colocated"):
            return {}
        engines = rollout.num_engines if chosen or not self.gpus else 0
        return {"CPU": 1 + engines, "GPU": engines * rollout.gpus_per_engine}

    def _attempt(self, group: Any, number: int, resume: Sequence[str]) -> int | None:
        """Run every process to its end; return the exit status of process 0, None if one was lost."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        processes = range(self.count)
        actors = [
            _start(f"learner-{process}-{number}", group, process, gpus=self.gpus)
            for process in processes
        ]
        received: queue.Queue[tuple[int, Output]] = queue.Queue()

        def listen(process: int, arguments: list[str]) -> None:
            for said in _outputs(actors[process], arguments, variables):
                received.put((process, said))

        try:
            overrides, variables = place_engines(self.config, self._free_gpus(group))
            own = [
                *self.arguments.overrides,
                *overrides,
                *([f"run_dir={self.run_dir}"] if self.run_dir else []),
            ]
            timeout = self.arguments.start_timeout
            try:
                address = ray.get(actors[0].address.remote(), timeout=timeout)
            except GetTimeoutError:
                raise LaunchError(
                    f"Ray did not start the learner's first process within {timeout:g} s"
                    f" (--start-timeout); {RAY_FIX}"
                ) from None
            own += [f"learner.multihost.coordinator={address}"]
            own += [f"learner.multihost.num_processes={self.count}", *resume]
            cluster = ray.get_runtime_context().gcs_address
            variables |= {"JAX_PLATFORMS": self.arguments.device, "RAY_ADDRESS": cluster}
            for process in processes:
                arguments = ["train", self.arguments.config, "rollout.backend=vllm", *own]
                arguments.append(f"learner.multihost.process_id={process}")
                threading.Thread(target=listen, args=(process, arguments), daemon=True).start()
            return self._follow(received, actors[0].terminate.remote)
        except RayError as error:
            _print_line(str(error).strip().splitlines()[0])
            return None
        finally:
            for actor in actors:
                ray.kill(actor)

    def _follow(
        self, received: queue.Queue[tuple[int, Output]], terminate: Callable[[], object]
    ) -> int | None:
        """Print what the processes say until all have ended, or one has and the others had their time."""
        statuses: dict[int, int | None] = {}
        deadline, told = float("inf"), False
        while len(statuses) < self.count and time.monotonic() < deadline:
            if self.stop.is_set() and not told:
                told = True
                terminate()
            with contextlib.suppress(queue.Empty):
                process, item = received.get(timeout=_POLL_SECONDS)
                if isinstance(item, str):
                    if process == 0 and item.startswith(_RUN_FOLDER):
                        self.run_dir = str(Path(item.removeprefix(_RUN_FOLDER)).absolute())
                    print(item if process == 0 else f"[learner {process}] {item}", flush=True)
                    continue
                statuses[process] = item
                if item or process == 0:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if statuses.get(0) == 0:
            return 0
        lost = any(s is None or (s > _KILLED and s != EXIT_CODE) for s in statuses.values())
        return None if lost else statuses.get(0)

    def _free_gpus(self, group: Any) -> list[int]:
        """Return the GPUs of each node that the learner does not take; none on CPUs."""
        if not self.gpus:
            return []
        import ray
        from ray.util.placement_group import placement_group_table

        taken = list(placement_group_table(group)["bundles_to_node_id"].values())
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return [
            int(node["Resources"].get("GPU", 0)) - self.gpus * taken.count(node["NodeID"])
            for node in nodes
        ]


def _start(name: str, group: Any, bundle: int, *, cpus: int = 1, gpus: int = 0) -> Any:
    """Start the actor of a process in a bundle of a placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = ray.remote(NodeProcess).options(
        name=name,
        num_cpus=cpus,
        num_gpus=gpus,
        max_concurrency=2,  # terminate() while run() goes on
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    return options.remote()


def _outputs(
    actor: Any, arguments: Sequence[str], variables: Mapping[str, str]
) -> Iterator[Output]:
    """Yield what an actor's process says; the process is lost with the actor or its node."""
    import ray
    from ray.exceptions import RayError

    try:
        for reference in actor.run.options(num_returns="streaming").remote(
            arguments, os.getcwd(), variables
        ):
            yield ray.get(reference)
    except RayError as error:
        yield str(error).strip().splitlines()[0]
        yield None


@contextlib.contextmanager
def _tool_server(file: str, group: Any, attempt: int) -> Iterator[None]:
    """Run a tool server on the node of process 0 while the context lasts; start it again whenever it ends.

    Raises:
        LaunchError: it ends, or does not serve, before it was ready once.
    """
    import ray

    ready, ended = threading.Event(), threading.Event()
    actors: list[Any] = []

    def serve() -> None:
        while not ended.is_set():
            actors.append(_start(f"tool-server-{attempt}-{len(actors)}", group, 0, cpus=0))
            status = None
            for status in _outputs(actors[-1], ["tool-server", "--config", file], {}):
                if isinstance(status, str):
                    _print_line(f"[tool server] {status}")
                    if status.startswith(_TOOLS_READY):
                        ready.set()
            if not ready.is_set() or ended.wait(_TOOLS_RESTART_SECONDS):
                return
            _print_line(f"[tool server] ended with status {status}: starting it again")

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    try:
        deadline = time.monotonic() + _TOOLS_READY_SECONDS
        while not ready.wait(_POLL_SECONDS):
            if not serving.is_alive() or time.monotonic() > deadline:
                raise LaunchError(
                    f"the tool server of --tool-server={file} did not start; the lines above"
                    " say why"
                )
        yield
    finally:
        ended.set()
        for actor in actors:
            ray.kill(actor)


def _plain(resources: Mapping[str, float]) -> str:
    named = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    return (
        ", ".join(f"{count:g} {name}{'s' * (count != 1)}" for name, count in named.items() if count)
        or "nothing"
    )


def _print_line(line: str) -> None:
    print(f"[driver] {line}", flush=True)


def add_run_options(add: Callable[..., Any]) -> None:
    """Add the options that ``gpu.sh`` passes on to the driver."""
    add(
        "overrides",
        nargs="*",
        metavar="[CONFIG] KEY=VALUE",
        help="YAML configuration, and keys that override it",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint of run_dir")
    add(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="what learner and engines compute on",
    )
    add(
        "--tool-server",
        metavar="FILE",
        help="keep a tool server with these settings beside process 0 of the learner",
    )
    add(
        "--start-timeout",
        type=positive,
        default=1800,
        metavar="S",
        help="seconds until the learner's nodes are there",
    )
    add(
        "--max-restarts",
        type=count,
        default=3,
        metavar="N",
        help="restarts after a process or node is lost (3)",
    )


def main(argv: Sequence[str]) -> int:
    """Run the job, or with ``--kill`` end the processes of another at once; return the exit status."""
    parser = argparse.ArgumentParser(prog="ray_driver")
    add_run_options(parser.add_argument)
    parser.add_argument("--config")
    parser.add_argument("--job", required=True, help="namespace of the actors")
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_intermixed_args(argv)
    import ray

    def connect() -> None:
        ray.init(namespace=arguments.job, log_to_driver=False, logging_level=logging.WARNING)

    try:
        start_service_blocking(
            connect, name="the Ray cluster of this job", fix=RAY_FIX, error=LaunchError
        )
    except LaunchError as error:
        print(f"error: {error}", flush=True)
        return 1
    if arguments.kill:
        for name in ray.util.list_named_actors():
            ray.kill(ray.get_actor(name))
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which has handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        return Driver(arguments, load_run(arguments.config, arguments.overrides), stop).run()
    except JaxAgentRLError as error:
        print(f"error: {printable(str(error))}", flush=True)
        return 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
