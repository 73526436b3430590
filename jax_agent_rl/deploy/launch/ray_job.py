"""A run as a Ray job: submitted to a cluster, followed, and stopped.

A job belongs to its cluster, not to the launcher: on an existing cluster it goes on when the launcher is killed
(``ray job logs --follow`` and ``ray job stop`` work on it).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_agent_rl.deploy.launch.command_line import TimedPrinter
from jax_agent_rl.errors import LaunchError
from jax_agent_rl.runtime.ray_cluster import secure_own_cluster
from jax_agent_rl.utils.interrupt import EXIT_CODE

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DRIVER = "jax_agent_rl.deploy.launch.ray_driver"
STOP_SECONDS = 600
"""From SIGTERM to SIGKILL: Ray's three seconds would not do to save a checkpoint."""
_POLL_SECONDS = 0.5
_AGENT_SECONDS = 120.0  # until a node of a new cluster takes jobs


def entrypoint(root: str, python: str, job: str, arguments: Sequence[str]) -> str:
    """Return the shell command of a job.

    Args:
        root: the project's folder, on every node.
        python: the environment's interpreter, on every node.
        job: the job's name.
        arguments: of the driver.
    """
    command = shlex.join([python, "-m", DRIVER, "--job", job, *arguments])
    return f"cd {shlex.quote(root)} && PYTHONPATH={shlex.quote(root)} exec {command}"


def runtime_env(root: str) -> dict[str, dict[str, str]]:
    """Return the variables of a job: actors find the project, and a job that is stopped has time to save."""
    return {"env_vars": {"PYTHONPATH": root, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}}


@contextlib.contextmanager
def connected(*, cpus: int) -> Iterator[JobSubmissionClient]:
    """Connect to the cluster of ``RAY_ADDRESS``; without it, start one on this machine while the context lasts.

    Its processes end with this one, even if it is killed.

    Args:
        cpus: places in a cluster started here, regardless of the number of cores.

    Raises:
        LaunchError: there is no cluster at the address, or it refuses what is asked in the context.
    """
    own = not (os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_API_SERVER_ADDRESS"))
    if own:
        secure_own_cluster()
    import ray
    from ray.job_submission import JobSubmissionClient

    address = None  # of RAY_ADDRESS
    if own:
        context = ray.init(
            "local",
            include_dashboard=True,
            log_to_driver=False,
            logging_level=logging.WARNING,
            num_cpus=max(cpus, os.cpu_count() or 1),
        )
        address = f"http://{context.dashboard_url}"  # there may be other clusters on this machine
    try:
        yield JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(f"{'Ray' if own else 'the cluster of RAY_ADDRESS'}: {error}") from error
    finally:
        if own:
            ray.shutdown()


class RayJob:
    """A submitted run.

    Args:
        client: the cluster.
        root: the project's folder, on every node.
        arguments: of the driver.
        print_line: prints a line of the launcher.
    """

    def __init__(
        self, client: JobSubmissionClient, root: str, arguments: Sequence[str], print_line: TimedPrinter
    ) -> None:
        self._client, self._root, self._print_line = client, root, print_line
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
                self._print_line("interrupted: the run saves a checkpoint (once more to end it at once)")
                await asyncio.to_thread(self._client.stop_job, self.name)
            else:
                self._print_line("interrupted again: the run is killed")
                await asyncio.to_thread(self._submit, ["--kill"], f"{self.name}-kill-{secrets.token_hex(4)}")
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
        command = entrypoint(self._root, sys.executable, self.name, arguments)
        deadline = time.monotonic() + _AGENT_SECONDS
        while True:
            try:
                self._client.submit_job(entrypoint=command, submission_id=name, runtime_env=runtime_env(self._root))
                return
            except RuntimeError as error:
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)
