"""The launcher of ``./launch/gpu.sh``: its command line, its cluster, and the job that it follows.

A job belongs to its cluster, not to the launcher: on an existing cluster it goes on when the
launcher is killed (``ray job logs --follow`` and ``ray job stop`` work on it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.config import Config
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.config.loading import load_tree
from jax_agent_rl.deploy.launch.arguments import (
    ROOT,
    comma_separated,
    count,
    positive,
    script_parser,
)
from jax_agent_rl.deploy.launch.printer import TimedPrinter
from jax_agent_rl.deploy.launch.ray_driver import add_run_options, load_run
from jax_agent_rl.deploy.launch.templates import render_template
from jax_agent_rl.errors import JaxAgentRLError, LaunchError
from jax_agent_rl.runtime.ray_cluster import RAY_FIX, secure_own_cluster
from jax_agent_rl.utils.config_words import split_config
from jax_agent_rl.utils.services import start_service_blocking
from jax_agent_rl.utils.shutdown import EXIT_CODE
from jax_agent_rl.utils.text import printable

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
DRIVER = "jax_agent_rl.deploy.launch.ray_driver"
STOP_SECONDS = 600
"""Time from SIGTERM to SIGKILL, as Ray's three seconds would not do to save a checkpoint."""
_POLL_SECONDS = 0.5
_AGENT_SECONDS = 120.0  # until a node of a new cluster takes jobs


def parser() -> argparse.ArgumentParser:
    """Return the parser; ``--help`` documents all options."""
    result = script_parser("gpu.sh")
    add = result.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="CONFIG as an option; default the quickstart, with model and data",
    )
    add_run_options(add)
    add(
        "--certify",
        action="store_true",
        help="measure this machine with jax-agent-rl certify instead of training",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the configuration, print the job, and run nothing",
    )
    add("--no-install", action="store_true", help="the environment exists already")
    add(
        "--render",
        choices=["ray", "kuberay"],
        help="print a cluster file for ray up, or a RayJob, and run nothing",
    )
    add(
        "--hosts",
        type=comma_separated,
        default=[],
        metavar="H1,H2",
        help="--render ray: [user@]hosts, head first",
    )
    add(
        "--image",
        default="jax_agent_rl:gpu",
        help="--render kuberay: of docker/gpu.Dockerfile (jax_agent_rl:gpu)",
    )
    add(
        "--nodes",
        type=positive,
        default=1,
        metavar="N",
        help="--render kuberay: pods with GPUs (1)",
    )
    add(
        "--gpus-per-node",
        type=count,
        default=8,
        metavar="N",
        help="--render kuberay: GPUs of each pod (8)",
    )
    add(
        "--claim",
        default="jax-agent-rl",
        help="--render kuberay: volume claim for /runs (jax-agent-rl)",
    )
    return result


_DRIVER_OPTIONS = ("device", "start_timeout", "max_restarts")  # passed on as they are


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _launch(arguments)
    except JaxAgentRLError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def _launch(arguments: argparse.Namespace) -> int:
    """Submit and follow a job, or print what it would be; return the exit status."""
    arguments.config, arguments.overrides = split_config(arguments.overrides, arguments.config)
    cluster = os.environ.get("RAY_ADDRESS")
    if arguments.certify:
        return _certify(arguments, cluster)
    if arguments.render == "ray":
        print(_cluster_file(arguments), end="")
        return 0
    if arguments.config is None and (arguments.render or cluster):
        raise LaunchError(
            "give a configuration, by CONFIG or --config FILE: the quickstart, whose model and data"
            " are fetched, is for this machine"
        )

    file = (arguments.config or QUICKSTART).absolute()
    config = load_run(str(file), arguments.overrides)
    driver_arguments = _driver_arguments(arguments)
    if arguments.render == "kuberay":
        print(_ray_job_manifest(arguments, config, driver_arguments), end="")
        return 0
    driver_arguments = [f"--config={file}", *driver_arguments]
    if arguments.dry_run:
        job = submission(str(ROOT), sys.executable, "JOB", driver_arguments)
        print(f"cluster: {cluster or 'a new one on this machine'}")
        print(f"job: {job['entrypoint']}")
        return 0

    nodes = config.learner.multihost.num_processes or 1
    if nodes > 1 and not cluster:
        raise LaunchError(
            f"learner.multihost.num_processes={nodes} needs {nodes} nodes of a Ray cluster: name"
            " one by RAY_ADDRESS, or leave the key out to train on this machine"
        )
    # CPUs for the learner's actor, the learner, and each engine.
    with connected(cpus=2 + config.rollout.num_engines) as client:
        return asyncio.run(RayJob(client, driver_arguments, TimedPrinter()).follow())


def _driver_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the driver's command line, without the configuration.

    Raises:
        ConfigError: the tool server's settings are wrong.
    """
    result = []
    for name in _DRIVER_OPTIONS:
        option = name.replace("_", "-")
        result.append(f"--{option}={vars(arguments)[name]}")
    if arguments.tool_server:
        load_tree(ToolServerSettings, arguments.tool_server)
        result.append(f"--tool-server={Path(arguments.tool_server).absolute()}")
    if arguments.resume:
        result.append("--resume")
    return [*result, *arguments.overrides]


def _certify(arguments: argparse.Namespace, cluster: str | None) -> int:
    """Run ``jax-agent-rl certify`` in place of this process.

    With ``--dry-run``, the command is printed.
    """
    if arguments.render or arguments.resume or arguments.tool_server or cluster:
        raise LaunchError(
            "--certify measures this machine: leave out --render, --resume and --tool-server, unset"
            " RAY_ADDRESS, and run it on each node of a cluster"
        )
    command = [sys.executable, "-m", "jax_agent_rl.cli", "certify"]
    if arguments.config:
        command.append(f"--config={arguments.config.absolute()}")
    command += arguments.overrides
    # A GPU that cannot be opened fails the launch; without this, the processor would be measured
    # instead.
    platforms = arguments.device
    if arguments.dry_run:
        print(shlex.join(["env", f"JAX_PLATFORMS={platforms}", *command]))
        return 0
    os.execve(command[0], command, os.environ | {"JAX_PLATFORMS": platforms})


def _cluster_file(arguments: argparse.Namespace) -> str:
    """Return a cluster file for ``ray up`` over hosts with ssh."""
    users = {host.rpartition("@")[0] for host in arguments.hosts}
    if len(users) != 1:
        hosts = ",".join(arguments.hosts)
        raise LaunchError(
            f"--hosts={hosts}: name [user@]hosts with one user for all, e.g."
            " me@10.0.0.1,me@10.0.0.2"
        )
    return render_template(
        "ray_cluster.yaml.j2",
        hosts=[host.rpartition("@")[2] for host in arguments.hosts],
        user=users.pop(),
        root=str(ROOT),
        venv=os.environ.get("JAX_AGENT_RL_VENV", str(ROOT / ".venv-gpu")),
        device=arguments.device,
    )


def _ray_job_manifest(
    arguments: argparse.Namespace, config: Config, driver_arguments: Sequence[str]
) -> str:
    """Return a RayJob and a ConfigMap with the configuration's file, for ``kubectl apply``."""
    if not config.run_dir.startswith("/runs/"):
        raise LaunchError(
            f"run_dir={config.run_dir} ends with its pod; set it to a folder of /runs, e.g."
            " /runs/my"
        )
    # docker/gpu.Dockerfile makes these folders.
    job = submission(
        "/app",
        "/opt/venv/bin/python",
        "jax-agent-rl",
        ["--config=/config/run.yaml", *driver_arguments],
    )
    return render_template(
        "kuberay.yaml.j2",
        options=arguments,
        config=arguments.config.read_text(),
        ray_version=version("ray"),
        **job,
    )


def submission(root: str, python: str, job: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a job as Ray takes it: its shell command and its variables.

    Both name the project's folder, so that actors find it.

    Args:
        root: the project's folder, on every node.
        python: the environment's interpreter, on every node.
        job: the job's name.
        arguments: command line of the driver.
    """
    command = shlex.join([python, "-m", DRIVER, "--job", job, *arguments])
    folder = shlex.quote(root)
    variables = {"PYTHONPATH": root, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    return {
        "entrypoint": f"cd {folder} && PYTHONPATH={folder} exec {command}",
        "runtime_env": {"env_vars": variables},
    }


@contextlib.contextmanager
def connected(*, cpus: int) -> Iterator[JobSubmissionClient]:
    """Connect to the cluster of ``RAY_ADDRESS``, or to a new one on this machine.

    A new cluster lasts as long as the context. Its processes end with this one, even if it is
    killed.

    Args:
        cpus: least number of places in a new cluster, regardless of the number of cores.

    Raises:
        LaunchError: there is no cluster at the address, it does not answer, or refuses what is
            asked in the context.
    """
    is_new = not (os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_API_SERVER_ADDRESS"))
    if is_new:
        secure_own_cluster()
    import ray
    from ray.job_submission import JobSubmissionClient

    def start_cluster() -> Any:
        return ray.init(
            "local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=True,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )

    address = None  # the client takes RAY_ADDRESS then
    ended = threading.Event()
    if is_new:
        context = start_service_blocking(
            start_cluster,
            name="a Ray cluster of this machine",
            fix=RAY_FIX,
            undo=lambda _: ray.shutdown(),
            ended=ended,
            error=LaunchError,
        )
        address = f"http://{context.dashboard_url}"  # there may be other clusters on this machine
    try:
        yield start_service_blocking(
            lambda: JobSubmissionClient(address),
            name=f"the job server of Ray at {address or 'RAY_ADDRESS'}",
            fix="check the address, and that nothing on the way drops its packets",
            error=LaunchError,
        )
    except (ConnectionError, RuntimeError) as error:
        cluster = "Ray" if is_new else "the cluster of RAY_ADDRESS"
        raise LaunchError(f"{cluster}: {error}") from error
    finally:
        ray.shutdown()
        ended.set()


class RayJob:
    """A submitted run.

    Args:
        client: connection to the cluster.
        arguments: command line of the driver.
        print_line: prints a line of the launcher.
    """

    def __init__(
        self, client: JobSubmissionClient, arguments: Sequence[str], print_line: TimedPrinter
    ) -> None:
        self._client = client
        self._print_line = print_line
        self.name = f"jax-agent-rl-{secrets.token_hex(4)}"
        self._submit(arguments, self.name)
        print_line(f"job {self.name} on {client.get_address()}")

    async def follow(self) -> int:
        """Print the job's output until it ends; return its exit status.

        The first SIGINT, SIGTERM or SIGHUP lets the run save and end, the second one kills it.
        """
        interrupt = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt.set)

        printing = asyncio.create_task(self._print_logs())
        was_interrupted = False
        while not printing.done():
            waiting = asyncio.create_task(interrupt.wait())
            await asyncio.wait([printing, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not interrupt.is_set():
                continue
            interrupt.clear()
            if not was_interrupted:
                self._print_line(
                    "interrupted: the run saves a checkpoint (once more to end it at once)"
                )
                await asyncio.to_thread(self._client.stop_job, self.name)
            else:
                self._print_line("interrupted again: the run is killed")
                kill_job = f"{self.name}-kill-{secrets.token_hex(4)}"
                await asyncio.to_thread(self._submit, ["--kill"], kill_job)
            was_interrupted = True
        await printing

        info = await asyncio.to_thread(self._client.get_job_info, self.name)
        if was_interrupted or info.status == "STOPPED":
            return EXIT_CODE
        if info.status == "FAILED" and info.driver_exit_code is None:
            raise LaunchError(f"job {self.name}: {info.message}")
        return info.driver_exit_code or 0

    async def _print_logs(self) -> None:
        """Print the output, once, over any number of connections."""
        printed = 0  # characters
        while True:
            received = 0  # characters of this connection, which begins at the first one
            with contextlib.suppress(OSError, RuntimeError):
                async for text in self._client.tail_job_logs(self.name):
                    new_text = text[max(printed - received, 0) :]
                    sys.stdout.write(new_text)
                    sys.stdout.flush()
                    received += len(text)
                    printed = max(printed, received)
            status = await asyncio.to_thread(self._client.get_job_status, self.name)
            if status.is_terminal():
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _submit(self, arguments: Sequence[str], name: str) -> None:
        """Submit a job of the driver, as soon as a node takes jobs."""
        job = submission(str(ROOT), sys.executable, self.name, arguments)
        deadline = time.monotonic() + _AGENT_SECONDS
        while True:
            try:
                self._client.submit_job(submission_id=name, **job)
                return
            except RuntimeError as error:
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
