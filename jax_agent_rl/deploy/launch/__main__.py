"""The launcher of ``./launch/gpu.sh``: its command line, its cluster, and the job that it submits and follows.

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
from jax_agent_rl.deploy.launch import (
    ROOT,
    TimedPrinter,
    comma_separated,
    count,
    positive,
    render_template,
    script_parser,
)
from jax_agent_rl.deploy.launch.ray_driver import add_run_options, load_run
from jax_agent_rl.errors import JaxAgentRLError, LaunchError
from jax_agent_rl.runtime.ray_cluster import RAY_FIX, secure_own_cluster
from jax_agent_rl.utils.config_words import split_config
from jax_agent_rl.utils.process import EXIT_CODE
from jax_agent_rl.utils.services import start_service_blocking
from jax_agent_rl.utils.text import printable

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
DRIVER = "jax_agent_rl.deploy.launch.ray_driver"
STOP_SECONDS = 600
"""Time from SIGTERM to SIGKILL: Ray's three seconds would not do to save a checkpoint."""
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


_PASSED = ("device", "start_timeout", "max_restarts")  # to the driver, as they are


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _launch(arguments)
    except JaxAgentRLError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def _launch(arguments: argparse.Namespace) -> int:
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
    passed = [f"--{name.replace('_', '-')}={vars(arguments)[name]}" for name in _PASSED]
    if arguments.tool_server:
        load_tree(ToolServerSettings, arguments.tool_server)
        passed.append(f"--tool-server={Path(arguments.tool_server).absolute()}")
    passed += [*(["--resume"] if arguments.resume else []), *arguments.overrides]
    if arguments.render == "kuberay":
        print(_ray_job_manifest(arguments, config, passed), end="")
        return 0
    passed = [f"--config={file}", *passed]
    if arguments.dry_run:
        print(f"cluster: {cluster or 'a new one on this machine'}")
        print(f"job: {submission(str(ROOT), sys.executable, 'JOB', passed)['entrypoint']}")
        return 0
    if not cluster and (nodes := config.learner.multihost.num_processes or 1) > 1:
        raise LaunchError(
            f"learner.multihost.num_processes={nodes} needs {nodes} nodes of a Ray cluster: name"
            " one by RAY_ADDRESS, or leave the key out to train on this machine"
        )
    # CPUs for the learner's actor, the learner, and each engine.
    with connected(cpus=2 + config.rollout.num_engines) as client:
        return asyncio.run(RayJob(client, passed, TimedPrinter()).follow())


def _certify(arguments: argparse.Namespace, cluster: str | None) -> int:
    """Run ``jax-agent-rl certify`` in place of this process; with ``--dry-run``, print the command."""
    if arguments.render or arguments.resume or arguments.tool_server or cluster:
        raise LaunchError(
            "--certify measures this machine: leave out --render, --resume and --tool-server, unset"
            " RAY_ADDRESS, and run it on each node of a cluster"
        )
    config = [f"--config={arguments.config.absolute()}"] if arguments.config else []
    command = [sys.executable, "-m", "jax_agent_rl.cli", "certify", *config, *arguments.overrides]
    # A GPU that cannot be opened fails the launch; without this, the processor would be measured
    # instead.
    environment = {"JAX_PLATFORMS": arguments.device}
    if arguments.dry_run:
        print(
            shlex.join(
                ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
            )
        )
        return 0
    os.execve(command[0], command, os.environ | environment)


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


def _ray_job_manifest(arguments: argparse.Namespace, config: Config, passed: Sequence[str]) -> str:
    """Return a ConfigMap with the configuration's file and a RayJob that runs it, for ``kubectl apply``."""
    if not config.run_dir.startswith("/runs/"):
        raise LaunchError(
            f"run_dir={config.run_dir} ends with its pod; set it to a folder of /runs, e.g."
            " /runs/my"
        )
    python, job = "/opt/venv/bin/python", "jax-agent-rl"  # of docker/gpu.Dockerfile, as /app is
    return render_template(
        "kuberay.yaml.j2",
        options=arguments,
        config=arguments.config.read_text(),
        ray_version=version("ray"),
        **submission("/app", python, job, ["--config=/config/run.yaml", *passed]),
    )


def submission(root: str, python: str, job: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a job as Ray takes it: its shell command, with which actors find the project, and its variables.

    Args:
        root: the project's folder, on every node.
        python: the environment's interpreter, on every node.
        job: the job's name.
        arguments: of the driver.
    """
    command, folder = (
        shlex.join([python, "-m", DRIVER, "--job", job, *arguments]),
        shlex.quote(root),
    )
    variables = {"PYTHONPATH": root, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    return {
        "entrypoint": f"cd {folder} && PYTHONPATH={folder} exec {command}",
        "runtime_env": {"env_vars": variables},
    }


@contextlib.contextmanager
def connected(*, cpus: int) -> Iterator[JobSubmissionClient]:
    """Connect to the cluster of ``RAY_ADDRESS``; without it, start one on this machine while the context lasts.

    Its processes end with this one, even if it is killed.

    Args:
        cpus: places in a cluster started here, regardless of the number of cores.

    Raises:
        LaunchError: there is no cluster at the address, it does not answer, or refuses what is
            asked in the context.
    """
    own = not (os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_API_SERVER_ADDRESS"))
    if own:
        secure_own_cluster()
    import ray
    from ray.job_submission import JobSubmissionClient

    address = None  # of RAY_ADDRESS
    ended = threading.Event()
    if own:
        cpus, level = max(cpus, os.cpu_count() or 1), logging.WARNING
        context = start_service_blocking(
            lambda: ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=True,
                log_to_driver=False,
                logging_level=level,
            ),
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
        raise LaunchError(f"{'Ray' if own else 'the cluster of RAY_ADDRESS'}: {error}") from error
    finally:
        ray.shutdown()
        ended.set()


class RayJob:
    """A submitted run.

    Args:
        client: the cluster.
        arguments: of the driver.
        print_line: prints a line of the launcher.
    """

    def __init__(
        self, client: JobSubmissionClient, arguments: Sequence[str], print_line: TimedPrinter
    ) -> None:
        self._client, self._print_line = client, print_line
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
        interrupted = False
        while not printing.done():
            waiting = asyncio.create_task(interrupt.wait())
            await asyncio.wait([printing, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not interrupt.is_set():
                continue
            interrupt.clear()
            if not interrupted:
                self._print_line(
                    "interrupted: the run saves a checkpoint (once more to end it at once)"
                )
                await asyncio.to_thread(self._client.stop_job, self.name)
            else:
                self._print_line("interrupted again: the run is killed")
                await asyncio.to_thread(
                    self._submit, ["--kill"], f"{self.name}-kill-{secrets.token_hex(4)}"
                )
            interrupted = True
        await printing
        info = await asyncio.to_thread(self._client.get_job_info, self.name)
        if interrupted or info.status == "STOPPED":
            return EXIT_CODE
        if info.status == "FAILED" and info.driver_exit_code is None:
            raise LaunchError(f"job {self.name}: {info.message}")
        return info.driver_exit_code or 0

    async def _print_logs(self) -> None:
        """Print the output, once, over any number of connections."""
        printed = 0
        while True:
            seen = 0
            with contextlib.suppress(OSError, RuntimeError):
                async for text in self._client.tail_job_logs(self.name):
                    sys.stdout.write(text[max(printed - seen, 0) :])
                    sys.stdout.flush()
                    seen += len(text)
                    printed = max(printed, seen)
            status = await asyncio.to_thread(self._client.get_job_status, self.name)
            if status.is_terminal():
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _submit(self, arguments: Sequence[str], name: str) -> None:
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
