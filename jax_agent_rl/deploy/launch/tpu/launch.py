"""A run on one slice, from creating it to deleting it.

::

    slice ready ─► copy ─► install, prepare ─► start on all hosts ─► follow all
                                                                       ├─► ended ─► delete
                                                                       └─► preempted, or lost: error

Every stage happens on all hosts at the same time. A launcher that has lost sight of the run (the
network here, an expired login) deletes nothing. Deleting a slice, which costs and which nobody may
be there to repeat, is tried for more than an hour. What recovers from preemptions by itself is a
scheduler, see ``job``.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Gcloud
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError
from jax_agent_rl.utils.text import counted

T = TypeVar("T")

_TRIES = 21
_FIRST_TRIES = 4  # to reach a host for the first time
_MAX_FACTOR = 16  # of the pauses between tries
_OTHERS_SECONDS = 60.0  # for the other hosts to end by themselves once one has failed
_KILLED = 70  # exit statuses of launch/tpu_host.sh
_NO_RUN = 71
_GONE_STATES = (
    "NOT_FOUND",
    "PREEMPTED",
    "TERMINATED",
    "STOPPED",
    "STOPPING",
    "DELETING",
    "HIDING",
    "HIDDEN",
    "UNKNOWN",
)


@dataclass(frozen=True, kw_only=True)
class SliceLaunch:
    """A launch of a job."""

    cloud: Gcloud
    task: Job
    poll: float  # seconds between two polls of the slice
    logs: Path  # folder of a log per host
    print_line: Callable[[str], None]

    def run(self, root: Path, *, resume: bool, keep: bool) -> int:
        """Run the job; return its exit status.

        Args:
            root: the project's folder.
            resume: continue from the newest checkpoint.
            keep: leave the slice when the run has ended.

        Raises:
            LaunchError: the slice cannot be created, a stage failed, or the slice was preempted.
            KeyboardInterrupt: before there was a run to interrupt, or twice.
        """
        task = self.task
        job.require_keepable(task)
        was_created = self._create()
        try:
            if not was_created and self._is_running():
                self.print_line("a run is under way there: following it")
            else:
                self._set_up(root)
                self.print_line("starting on all hosts")
                starts = [job.start(task, host, resume=resume) for host in range(task.hosts)]
                self._stage(starts, stdin=task.exports())
            status = self.follow()
        except LaunchError:
            self.print_line("the slice stays and costs: --delete deletes it")
            raise

        if keep:
            self.print_line("the slice stays (--keep) and costs until you give --delete")
        elif task.bucket_folder is None:
            self.print_line(
                "the slice stays (without --bucket the run is on its disk alone) and costs until"
                " you give --delete"
            )
        else:
            self._retry(self.delete)
            self.print_line(f"the run is in {task.bucket_folder}")
        return status

    def _is_running(self) -> bool:
        """Return whether a run is under way on the slice."""
        call = job.on_host(self.task, 0, "running", "&& echo yes || echo no")
        return self.cloud.read(call).split()[-1:] == ["yes"]

    def _retry(
        self, act: Callable[[], T], *, tries: int = _TRIES, stop: threading.Event | None = None
    ) -> T:
        """Retry while nobody answers, for more than an hour with a ``poll`` of 15 s.

        Args:
            stop: ends the waiting when it is set.
        """
        stop = stop or threading.Event()
        for number in range(tries - 1):
            try:
                return act()
            except LaunchUnansweredError as error:
                pause = self.poll * min(2**number, _MAX_FACTOR)
                self.print_line(f"{error}\ntrying again in {pause:.0f} s")
                if stop.wait(pause):
                    raise
        return act()

    def query(self) -> str:
        """Return gcloud's name of the slice's state.

        Raises:
            LaunchError: a slice of this name exists, but of another kind.
        """
        name = self.task.name
        try:
            node = json.loads(self.cloud.read(("describe", name, "--format=json")))
        except LaunchTargetError:
            return "NOT_FOUND"

        wanted_type = self.task.topology.accelerator_type
        actual_type = node.get("acceleratorType", wanted_type)
        if actual_type != wanted_type:
            raise LaunchError(
                f"{name} is there already and is a {actual_type}, not a {wanted_type}; choose"
                " another --name, or delete that one with --delete"
            )
        return node.get("state", "STATE_UNSPECIFIED")

    def _create(self) -> bool:
        """Create the slice, or take an existing one; return whether it was created."""
        task = self.task
        state = self.query()
        if state == "READY":
            self.print_line(f"{task.name} is there already")
            return False
        if state not in _GONE_STATES:
            raise LaunchError(
                f"{task.name} is there already and {state}: start again once it is READY, or"
                " --delete"
            )
        if state != "NOT_FOUND":
            self.print_line(f"{task.name} is {state}")
            self.delete()

        self.print_line(f"creating {task.name}: {task}")
        call = [
            "create",
            task.name,
            f"--accelerator-type={task.topology.accelerator_type}",
            f"--version={task.runtime}",
        ]
        if task.spot:
            call.append("--spot")
        try:
            self.cloud.read(tuple(call))
        except LaunchUnansweredError as error:
            raise LaunchError(
                f"{error}\n{task.name} may have been created without an answer: --delete"
            ) from None
        return True

    def delete(self) -> bool:
        """Delete the slice; return False if there is none.

        Raises:
            LaunchError: it is left; :class:`LaunchUnansweredError` if that was not refused.
        """
        self.print_line(f"deleting {self.task.name}")
        try:
            self.cloud.read(("delete", self.task.name))
        except LaunchTargetError:
            return False
        except LaunchError as error:
            raise type(error)(
                f"{error}\n{self.task.name}: still there, and costs; try --delete again"
            ) from None
        return True

    def _require_slice(self, state: str) -> None:
        """Raise :class:`LaunchError` if the slice was preempted."""
        if state not in _GONE_STATES:
            return
        advice = "without --bucket all is lost"
        if self.task.bucket_folder is not None:
            advice = f"--resume continues from the last checkpoint in {self.task.bucket_folder}"
        raise LaunchError(
            f"the slice was preempted ({state}): {advice}; a job of --render sky recovers by itself"
        )

    def _set_up(self, root: Path) -> None:
        """Copy the project to all hosts, and install and prepare what the run needs there."""
        task = self.task
        hosts = range(task.hosts)
        self.print_line(f"copying the code to {counted(task.hosts, 'host')}")
        with tempfile.TemporaryDirectory(prefix="jax_agent_rl-") as folder:
            archive = Path(folder) / job.ARCHIVE
            extra = {}
            if task.config is not None:
                extra[job.CONFIG] = task.config.read_bytes()
            job.pack(root, archive, extra=extra)
            target = f"{task.name}:{job.ARCHIVE}"
            copies = [("scp", str(archive), target, f"--worker={host}") for host in hosts]
            # New hosts may not listen yet.
            self._retry(
                lambda: self._stage(copies, failure=LaunchUnansweredError), tries=_FIRST_TRIES
            )

        stage = "unpacking"
        if task.install:
            stage = "installing the environment (some minutes the first time)"
        if task.preparation:
            stage += f"; then: {task.preparation}"
        self.print_line(stage)
        self._stage([job.set_up(task, host) for host in hosts], stdin=task.exports())

    def _stage(
        self, calls: Sequence[Call], *, stdin: str = "", failure: type[LaunchError] = LaunchError
    ) -> None:
        """Make a call for each host concurrently; all have to succeed.

        Args:
            calls: by host.
            stdin: standard input of each call.
            failure: raised if a call fails.
        """

        def run(host: int) -> int:
            def print_line(line: str) -> None:
                self.print_line(f"[host-{host}] {line}")

            return self.cloud.stream(calls[host], print_line, stdin)

        with ThreadPoolExecutor(self.cloud.max_connections) as pool:
            try:
                statuses = list(pool.map(run, range(len(calls))))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.cloud.stop()
                raise

        failed = [host for host, status in enumerate(statuses) if status != 0]
        if failed:
            names = ", ".join(f"host-{host}" for host in failed)
            command = " ".join(self.cloud.argv(calls[failed[0]]))
            brief = " ".join(command.split())[:300]
            raise failure(f"{names}: {brief} failed, see above")

    def follow(self) -> int:
        """Print the output of the run under way, or of the last one; return its exit status.

        Ctrl-C makes the run save and end, a second one leaves it running.

        Raises:
            LaunchError: the slice was preempted, or many connections in a row delivered nothing.
            KeyboardInterrupt: the second time.
        """
        self.print_line(f"logs: {self.logs}")
        stop = threading.Event()  # nobody waits for the threads any more
        # One more for the interruption; a dry run makes its calls in order.
        workers = self.task.hosts + 1 if self.cloud.max_connections > 1 else 1
        pool = ThreadPoolExecutor(workers)
        hosts = [pool.submit(self._follow_host, host, stop) for host in range(self.task.hosts)]
        pending = set(hosts)
        interruptions: list[Future[Any]] = []
        deadline = math.inf
        try:
            while pending and time.monotonic() < deadline:
                try:
                    seconds = min(self.poll, deadline - time.monotonic())
                    done, pending = wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
                    if any(host.result() for host in done):
                        deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
                    if not done:
                        self._require_slice(self._query_or_ready())
                except KeyboardInterrupt:
                    if interruptions:
                        raise
                    self.print_line(
                        "interrupted: the run saves a checkpoint and ends (once more: leave it"
                        " running)"
                    )
                    interruption = pool.submit(self._retry, self._interrupt, stop=stop)
                    interruptions.append(interruption)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            futures: list[Future[Any]] = [*hosts, *interruptions]
            while wait(futures, timeout=0.1).not_done:
                self.cloud.stop()

        statuses = []
        failures = []
        for number, host in enumerate(hosts):
            status = _KILLED if host in pending else host.result()
            statuses.append(status)
            if status:
                failures.append(f"{status} on host-{number}")
        if failures:
            self.print_line(f"ended with {', '.join(failures)}")
            if not interruptions:
                self._require_slice(self.query())

        for number, host in enumerate(hosts):
            if host in pending:  # it would be in the way of the next start
                call = job.on_host(self.task, number, "signal", "KILL")
                self.cloud.stream(call, self.print_line)
        return statuses[0] or max(statuses)

    def _query_or_ready(self) -> str:
        """Return the slice's state; READY if it cannot be told, as the run goes on."""
        try:
            return self.query()
        except LaunchError:  # an expired login, for example
            return "READY"

    def _follow_host(self, host: int, stop: threading.Event) -> int:
        """Print and log one host's output, each line once; return its exit status.

        It takes as many connections as are needed.
        """
        name = f"host-{host}"
        log = self.logs / f"{name}.log"
        last_line = 0  # number of the last line that was printed
        status: int | None = None

        def on_line(line: str) -> None:
            nonlocal last_line, status
            numbered = re.fullmatch(r"(\d+):(.*)", line, re.DOTALL)
            if numbered is not None:
                number = int(numbered[1])
                if number <= last_line:  # of an earlier connection
                    return
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a" if last_line else "w", encoding="utf-8") as file:
                    file.write(numbered[2] + "\n")
                last_line = number
                self.print_line(f"[{name}] {numbered[2]}")
                return

            end = re.fullmatch(r"end\|(\d+)", line)
            if end is not None:
                status = int(end[1])
            else:
                self.print_line(f"[{name}] {line}")

        def connect() -> None:
            previous_line = last_line
            self.cloud.stream(job.on_host(self.task, host, "follow"), on_line)
            if status is not None:
                return
            if last_line == previous_line:
                raise LaunchUnansweredError(f"{name}: the connection broke")
            self.print_line(f"{name}: the connection broke, connecting again")

        while status is None:
            try:
                self._retry(connect, stop=stop)
            except LaunchUnansweredError:
                raise LaunchError(
                    f"{name}: lost sight of the run, which may go on: the same command finds it"
                    " again, --delete ends it"
                ) from None
        return status

    def _interrupt(self) -> None:
        """Let the run save and end.

        Raises:
            LaunchUnansweredError: it could not be told.
        """
        call = job.on_host(self.task, 0, "signal", "INT")
        if self.cloud.stream(call, self.print_line) not in (0, _NO_RUN):
            raise LaunchUnansweredError("the run could not be interrupted")
