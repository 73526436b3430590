"""``python -m jax_agent_rl.deploy.launch.ray_driver``: what a Ray job of ``gpu.sh`` runs.

::

    driver ──► placement group: a bundle on each of learner.multihost.num_processes nodes
       ├─────► actor learner-0 ──► jax-agent-rl train …  ──► engines, in placement groups
       ├─────► actor learner-1… ─► jax-agent-rl train …      joined by jax.distributed.initialize
       └─────► actor tool-server ► jax-agent-rl tool-server …   on the node of process 0

    a process of the learner or its node is lost ──► all are ended, and started anew from the
                                                     newest checkpoint
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
from jax_agent_rl.deploy.launch.arguments import count, positive
from jax_agent_rl.deploy.launch.ray_process import NodeProcess
from jax_agent_rl.errors import JaxAgentRLError, LaunchError
from jax_agent_rl.runtime.ray_cluster import RAY_FIX
from jax_agent_rl.utils.services import start_service_blocking
from jax_agent_rl.utils.shutdown import EXIT_CODE
from jax_agent_rl.utils.text import counted, printable

OWN_KEYS = ("learner.multihost.coordinator", "learner.multihost.process_id", "rollout.ray_address")
"""Keys that the driver sets itself."""
SHARED_UTILIZATION = 0.45
"""vLLM's part of a GPU that it shares with the learner, unless the configuration says otherwise."""
_LEARNER_MEMORY = 0.45
_RUN_FOLDER = "run folder: "
_GRACE_SECONDS = 30.0  # for the other processes to end after one has
_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 15.0
_TOOLS_READY = "tool server on "
_TOOLS_READY_SECONDS = 120.0
_TOOLS_RESTART_SECONDS = 1.0
_KILLED = 128  # plus the signal's number
Output = str | int | None
"""A line of a process; after the last one its exit status, or None if it is lost."""


def load_run(config: str, overrides: Sequence[str]) -> Config:
    """Load a configuration as runs of ``gpu.sh`` see it.

    The backend is vLLM, unless an override names another one.

    Raises:
        ConfigError: it is wrong.
        LaunchError: an override sets a key that the driver sets itself.
    """
    for item in overrides:
        key, _, _ = item.partition("=")
        if key.strip() in OWN_KEYS:
            raise LaunchError(f"{item}: gpu.sh sets {', '.join(OWN_KEYS)} itself; leave it out")
    return load(config, ["rollout.backend=vllm", *overrides])


def place_engines(config: Config, free_gpus: Sequence[int]) -> tuple[list[str], dict[str, str]]:
    """Decide where the engines run, unless the configuration does by ``rollout.placement``.

    Every GPU that the learner leaves free serves, ``rollout.vllm.tensor_parallel_size`` per engine.
    If it leaves too few, one engine shares the GPUs of the learner. Without GPUs there is one
    engine beside the learner.

    Args:
        free_gpus: GPUs of each node that the learner does not take; empty for a run on CPUs.

    Returns:
        Overrides and environment variables of the learner's processes.
    """
    rollout = config.rollout
    if "placement" in rollout.model_fields_set or rollout.backend == "remote":
        return [], {}
    if not free_gpus:
        return ["rollout.placement=separate", "rollout.gpus_per_engine=0"], {}

    gpus_per_engine = 1
    if rollout.backend == "vllm":
        gpus_per_engine = rollout.vllm.tensor_parallel_size
    engines = sum(gpus // gpus_per_engine for gpus in free_gpus)
    if engines:
        overrides = [
            "rollout.placement=separate",
            f"rollout.num_engines={engines}",
            f"rollout.gpus_per_engine={gpus_per_engine}",
        ]
        return overrides, {}

    overrides = ["rollout.placement=colocated"]
    if "gpu_memory_utilization" not in rollout.vllm.model_fields_set:
        overrides.append(f"rollout.vllm.gpu_memory_utilization={SHARED_UTILIZATION}")
    return overrides, {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(_LEARNER_MEMORY)}


@dataclass
class Driver:
    """Runs the learner's processes, again after each loss.

    Attributes:
        arguments: the command line.
        stop: set when the job is stopped.
        run_dir: the run's folder; None until process 0 has printed it.
        count: number of the learner's processes.
        gpus: GPUs of each of them; 0 on CPUs.
    """

    arguments: argparse.Namespace
    config: Config
    stop: threading.Event
    run_dir: str | None = None

    def __post_init__(self) -> None:
        self.count = self.config.learner.multihost.num_processes or 1
        self.gpus = 0
        if self.arguments.device == "cuda":
            self.gpus = self.config.learner.mesh.devices // self.count

    def run(self) -> int:
        """Run until process 0 ends; return its exit status.

        Raises:
            LaunchError: there are too few nodes, or too many were lost.
        """
        max_restarts = self.arguments.max_restarts
        resume = ["--resume"] if self.arguments.resume else []
        for attempt in range(max_restarts + 1):
            status = None
            with self._placed() as group:
                if group is not None:
                    with self._tools(group, attempt):
                        status = self._attempt(group, attempt, resume)

            if self.stop.is_set():
                return 0 if status == 0 else EXIT_CODE
            if status is not None:
                return status

            # The next attempt goes on from the newest checkpoint, if there is any.
            resume = ["--auto-resume"]
            _print_line(
                "a process of the learner was lost"
                f" ({attempt + 1} of {counted(max_restarts, 'time')})"
            )

        raise LaunchError(
            f"gave up after {counted(max_restarts, 'restart')} (--max-restarts); --resume goes on"
            " from the last checkpoint"
        )

    def _tools(self, group: Any, attempt: int) -> contextlib.AbstractContextManager[None]:
        """Return the context of a tool server, if one is asked for."""
        file = self.arguments.tool_server
        if not file:
            return contextlib.nullcontext()
        return _tool_server(file, group, attempt)

    @contextlib.contextmanager
    def _placed(self) -> Iterator[Any]:
        """Reserve a bundle on every node of the learner.

        It yields the placement group, or None if the job is stopped meanwhile.

        Raises:
            LaunchError: the cluster has no room for learner and engines in time.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle: dict[str, float] = {"CPU": 1}
        if self.gpus:
            bundle["GPU"] = self.gpus
        engine_needs = self._engine_needs()
        group = placement_group([bundle] * self.count, strategy="STRICT_SPREAD")
        start_time = time.monotonic()
        next_report = 0.0  # seconds after the start
        try:
            while not self.stop.is_set():
                is_placed = group.wait(_POLL_SECONDS)
                free = ray.available_resources()
                if is_placed and _has_room(free, engine_needs):
                    break
                elapsed = time.monotonic() - start_time
                if elapsed > next_report:
                    next_report = elapsed + _PROGRESS_SECONDS
                    _print_line(
                        f"waiting for room: {counted(self.count, 'node')} for the learner with"
                        f" {_format_resources(bundle)} each, and {_format_resources(engine_needs)}"
                        f" for the engines; free: {_format_resources(free)}"
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
        """Return the free resources that engines in Ray actors need, with the learner's bundle."""
        rollout = self.config.rollout
        is_configured = "placement" in rollout.model_fields_set
        if rollout.backend == "remote":
            return {}
        if is_configured and rollout.placement == "colocated":
            return {}
        engines = rollout.num_engines
        if not is_configured and self.gpus:
            engines = 0  # as many as the learner leaves GPUs for, see `place_engines`
        return {"CPU": 1 + engines, "GPU": engines * rollout.gpus_per_engine}

    def _attempt(self, group: Any, number: int, resume: Sequence[str]) -> int | None:
        """Run every process to its end.

        Returns:
            The exit status of process 0; None if a process was lost.
        """
        import ray
        from ray.exceptions import RayError

        actors = []
        for process in range(self.count):
            actors.append(_start(f"learner-{process}-{number}", group, process, gpus=self.gpus))
        outputs: queue.Queue[tuple[int, Output]] = queue.Queue()

        def listen(process: int, arguments: list[str], variables: Mapping[str, str]) -> None:
            for output in _outputs(actors[process], arguments, variables):
                outputs.put((process, output))

        try:
            overrides, variables = place_engines(self.config, self._free_gpus(group))
            arguments = ["train", self.arguments.config, "rollout.backend=vllm"]
            arguments += [*self.arguments.overrides, *overrides]
            if self.run_dir:
                arguments.append(f"run_dir={self.run_dir}")
            arguments.append(f"learner.multihost.coordinator={self._coordinator(actors[0])}")
            arguments.append(f"learner.multihost.num_processes={self.count}")
            arguments += resume
            variables["JAX_PLATFORMS"] = self.arguments.device
            variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address

            for process in range(self.count):
                process_id = f"learner.multihost.process_id={process}"
                thread = threading.Thread(
                    target=listen, args=(process, [*arguments, process_id], variables), daemon=True
                )
                thread.start()
            return self._follow(outputs, actors[0].terminate.remote)
        except RayError as error:
            _print_line(str(error).strip().splitlines()[0])
            return None
        finally:
            for actor in actors:
                ray.kill(actor)

    def _coordinator(self, actor: Any) -> str:
        """Return the address at which the processes meet, on the node of process 0.

        Raises:
            LaunchError: Ray did not start its actor in time.
        """
        import ray
        from ray.exceptions import GetTimeoutError

        timeout = self.arguments.start_timeout
        try:
            return ray.get(actor.address.remote(), timeout=timeout)
        except GetTimeoutError:
            raise LaunchError(
                f"Ray did not start the learner's first process within {timeout:g} s"
                f" (--start-timeout); {RAY_FIX}"
            ) from None

    def _follow(
        self, outputs: queue.Queue[tuple[int, Output]], terminate: Callable[[], object]
    ) -> int | None:
        """Print what the processes say until all have ended.

        Once one has, the others have :data:`_GRACE_SECONDS`. See :meth:`_attempt` for the result.

        Args:
            terminate: lets process 0 save and end.
        """
        statuses: dict[int, int | None] = {}
        deadline = float("inf")
        was_terminated = False
        while len(statuses) < self.count and time.monotonic() < deadline:
            if self.stop.is_set() and not was_terminated:
                was_terminated = True
                terminate()
            try:
                process, output = outputs.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(output, str):
                self._print_output(process, output)
                continue
            statuses[process] = output
            if output or process == 0:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)

        if statuses.get(0) == 0:
            return 0
        for status in statuses.values():
            if status is None or (status > _KILLED and status != EXIT_CODE):
                return None
        return statuses.get(0)

    def _print_output(self, process: int, line: str) -> None:
        """Print a line of a process; note the run's folder if it is that line."""
        if process != 0:
            print(f"[learner {process}] {line}", flush=True)
            return
        if line.startswith(_RUN_FOLDER):
            self.run_dir = str(Path(line.removeprefix(_RUN_FOLDER)).absolute())
        print(line, flush=True)

    def _free_gpus(self, group: Any) -> list[int]:
        """Return the GPUs of each node that the learner does not take; none on CPUs."""
        if not self.gpus:
            return []
        import ray
        from ray.util.placement_group import placement_group_table

        learner_nodes = list(placement_group_table(group)["bundles_to_node_id"].values())
        free = []
        for node in ray.nodes():
            if node["Alive"]:
                bundles = learner_nodes.count(node["NodeID"])
                free.append(int(node["Resources"].get("GPU", 0)) - self.gpus * bundles)
        return free


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
    """Run a tool server on the node of process 0 while the context lasts.

    It is started again whenever it ends.

    Raises:
        LaunchError: it ends, or does not serve, before it was ready once.
    """
    import ray

    is_ready = threading.Event()
    is_over = threading.Event()  # the context
    actors: list[Any] = []

    def serve() -> None:
        while not is_over.is_set():
            actor = _start(f"tool-server-{attempt}-{len(actors)}", group, 0, cpus=0)
            actors.append(actor)
            status: Output = None
            for output in _outputs(actor, ["tool-server", "--config", file], {}):
                status = output  # the last output is the exit status
                if isinstance(output, str):
                    _print_line(f"[tool server] {output}")
                    if output.startswith(_TOOLS_READY):
                        is_ready.set()
            if not is_ready.is_set() or is_over.wait(_TOOLS_RESTART_SECONDS):
                return
            _print_line(f"[tool server] ended with status {status}: starting it again")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _TOOLS_READY_SECONDS
        while not is_ready.wait(_POLL_SECONDS):
            if not thread.is_alive() or time.monotonic() > deadline:
                raise LaunchError(
                    f"the tool server of --tool-server={file} did not start; the lines above"
                    " say why"
                )
        yield
    finally:
        is_over.set()
        for actor in actors:
            ray.kill(actor)


def _has_room(free: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Return whether these resources are free."""
    return all(free.get(name, 0) >= amount for name, amount in needs.items())


def _format_resources(resources: Mapping[str, float]) -> str:
    """Return CPUs and GPUs in words."""
    words = []
    for name in ("CPU", "GPU"):
        amount = resources.get(name, 0)
        if amount == 1:
            words.append(f"1 {name}")
        elif amount:
            words.append(f"{amount:g} {name}s")
    return ", ".join(words) or "nothing"


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
    """Run the job, or with ``--kill`` end a job's processes at once; return the exit status."""
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
        config = load_run(arguments.config, arguments.overrides)
        return Driver(arguments, config, stop).run()
    except JaxAgentRLError as error:
        print(f"error: {printable(str(error))}", flush=True)
        return 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
