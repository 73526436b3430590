"""A run on one slice, from creating it to deleting it.

::

    slice ready ─► copy ─► install, prepare ─► start on all hosts ─► follow all ─┬─► ended ─► delete
                                                                                 └─► preempted, or out of sight: error

Every stage happens on all hosts at the same time. A launcher that has lost sight of the run (the
network here, an expired login) deletes nothing. Deleting a slice, which costs and which nobody may
be there to repeat, is tried for more than an hour. What recovers from preemptions by itself is a
scheduler, see ``job``.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Gcloud
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

T = TypeVar("T")

_TRIES, _FIRST_TRIES = 21, 4  # the latter to reach a host for the first time
_MAX_FACTOR = 16
_OTHERS_SECONDS = 60.0  # for the other hosts to end by themselves once one has failed
_KILLED, _NO_RUN = 70, 71  # exit statuses of launch/tpu_host.sh
_GONE = (
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
        created = self._create()
        running = job.on_host(task, 0, "running", "&& echo yes || echo no")
        try:
            if not created and self.cloud.read(running).split()[-1:] == ["yes"]:
                self.print_line("a run is under way there: following it")
            else:
                self._set_up(root)
                self.print_line("starting on all hosts")
                self._stage(
                    [job.start(task, host, resume=resume) for host in range(task.hosts)],
                    given=task.exports(),
                )
            status = self.follow()
        except LaunchError:
            self.print_line("the slice stays and costs: --delete deletes it")
            raise
        if keep or task.kept is None:
            why = "--keep" if keep else "without --bucket the run is on its disk alone"
            self.print_line(f"the slice stays ({why}) and costs until you give --delete")
        else:
            self._retry(self.delete)
            self.print_line(f"the run is in {task.kept}")
        return status

    def _retry(
        self, act: Callable[[], T], *, tries: int = _TRIES, left: threading.Event | None = None
    ) -> T:
        """Retry while nobody answers, for more than an hour with a ``poll`` of 15 s, or until ``left`` is set."""
        left = left or threading.Event()
        for number in range(tries - 1):
            try:
                return act()
            except LaunchUnansweredError as error:
                pause = self.poll * min(2**number, _MAX_FACTOR)
                self.print_line(f"{error}\ntrying again in {pause:.0f} s")
                if left.wait(pause):
                    raise
        return act()

    def query(self) -> str:
        """Return gcloud's name of the slice's state.

        Raises:
            LaunchError: a slice of this name exists, but of another kind.
        """
        name, wanted = self.task.name, self.task.topology.accelerator_type
        try:
            node = json.loads(self.cloud.read(("describe", name, "--format=json")))
        except LaunchTargetError:
            return "NOT_FOUND"
        if (found := node.get("acceleratorType", wanted)) != wanted:
            raise LaunchError(
                f"{name} is there already and is a {found}, not a {wanted}; choose another --name,"
                " or delete that one with --delete"
            )
        return node.get("state", "STATE_UNSPECIFIED")

    def _create(self) -> bool:
        """Create the slice, or take an existing one; return whether it was created."""
        task, state = self.task, self.query()
        if state == "READY":
            self.print_line(f"{task.name} is there already")
            return False
        if state not in _GONE:
            raise LaunchError(
                f"{task.name} is there already and {state}: start again once it is READY, or"
                " --delete"
            )
        if state != "NOT_FOUND":
            self.print_line(f"{task.name} is {state}")
            self.delete()
        self.print_line(f"creating {task.name}: {task}")
        kind, version = (
            f"--accelerator-type={task.topology.accelerator_type}",
            f"--version={task.runtime}",
        )
        try:
            self.cloud.read(
                ("create", task.name, kind, version, *(["--spot"] if task.spot else []))
            )
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
        if state in _GONE:
            kept = self.task.kept
            left = (
                f"--resume continues from the last checkpoint in {kept}"
                if kept
                else "without --bucket all is lost"
            )
            raise LaunchError(
                f"the slice was preempted ({state}): {left}; a job of --render sky recovers by"
                " itself"
            )

    def _set_up(self, root: Path) -> None:
        task = self.task
        self.print_line(f"copying the code to {task.hosts} host(s)")
        with tempfile.TemporaryDirectory(prefix="jax_agent_rl-") as folder:
            archive = Path(folder) / job.ARCHIVE
            job.pack(
                root, archive, extra={job.CONFIG: task.config.read_bytes()} if task.config else {}
            )
            target = f"{task.name}:{job.ARCHIVE}"
            copying = [
                ("scp", str(archive), target, f"--worker={host}") for host in range(task.hosts)
            ]
            # New hosts may not listen yet.
            self._retry(
                lambda: self._stage(copying, failure=LaunchUnansweredError), tries=_FIRST_TRIES
            )
        what = (
            "installing the environment (some minutes the first time)"
            if task.install
            else "unpacking"
        )
        self.print_line(f"{what}; then: {task.preparation}" if task.preparation else what)
        self._stage([job.set_up(task, host) for host in range(task.hosts)], given=task.exports())

    def _stage(
        self, calls: Sequence[Call], *, given: str = "", failure: type[LaunchError] = LaunchError
    ) -> None:
        """Make a call for each host concurrently, with this input; all have to succeed."""

        def fails(host: int) -> bool:
            return (
                self.cloud.stream(
                    calls[host], lambda line: self.print_line(f"[host-{host}] {line}"), given
                )
                != 0
            )

        with ThreadPoolExecutor(self.cloud.max_connections) as pool:
            try:
                failed = [
                    host
                    for host, it_does in enumerate(pool.map(fails, range(len(calls))))
                    if it_does
                ]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.cloud.stop()
                raise
        if failed:
            names = ", ".join(f"host-{host}" for host in failed)
            brief = " ".join(" ".join(self.cloud.argv(calls[failed[0]])).split())[:300]
            raise failure(f"{names}: {brief} failed, see above")

    def follow(self) -> int:
        """Print the output of the run under way, or of the last one; return its exit status.

        Ctrl-C makes the run save and end, a second one leaves it running.

        Raises:
            LaunchError: the slice was preempted, or many connections in a row delivered nothing.
            KeyboardInterrupt: the second time.
        """
        self.print_line(f"logs: {self.logs}")
        left = threading.Event()  # nobody waits for the threads any more
        pool = ThreadPoolExecutor(self.task.hosts + 1 if self.cloud.max_connections > 1 else 1)
        following = [pool.submit(self._follow_host, host, left) for host in range(self.task.hosts)]
        pending, interrupting, end = set(following), [], math.inf
        try:
            while pending and time.monotonic() < end:
                try:
                    seconds = min(self.poll, end - time.monotonic())
                    done, pending = wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
                    if any(host.result() for host in done):
                        end = min(end, time.monotonic() + _OTHERS_SECONDS)
                    if not done:
                        state = "READY"
                        with contextlib.suppress(
                            LaunchError
                        ):  # an expired login, for example: the run goes on
                            state = self.query()
                        self._require_slice(state)
                except KeyboardInterrupt:
                    if interrupting:
                        raise
                    self.print_line(
                        "interrupted: the run saves a checkpoint and ends (once more: leave it"
                        " running)"
                    )
                    interrupting.append(pool.submit(self._retry, self._interrupt, left=left))
        finally:
            left.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while wait([*following, *interrupting], timeout=0.1).not_done:
                self.cloud.stop()
        statuses = [_KILLED if host in pending else host.result() for host in following]
        if failed := [f"{status} on host-{host}" for host, status in enumerate(statuses) if status]:
            self.print_line(f"ended with {', '.join(failed)}")
            if not interrupting:
                self._require_slice(self.query())
        for host, each in enumerate(following):
            if each in pending:  # it would be in the way of the next start
                self.cloud.stream(job.on_host(self.task, host, "signal", "KILL"), self.print_line)
        return statuses[0] or max(statuses)

    def _follow_host(self, host: int, left: threading.Event) -> int:
        """Print and log one host's output, each line once, over as many connections as needed; return its status."""
        name, seen, status = f"host-{host}", 0, None
        log = self.logs / f"{name}.log"

        def on_line(line: str) -> None:
            nonlocal seen, status
            if match := re.fullmatch(r"(\d+):(.*)", line, re.DOTALL):
                if int(match[1]) > seen:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    with log.open("a" if seen else "w", encoding="utf-8") as file:
                        file.write(match[2] + "\n")
                    seen = int(match[1])
                    self.print_line(f"[{name}] {match[2]}")
            elif match := re.fullmatch(r"end\|(\d+)", line):
                status = int(match[1])
            else:
                self.print_line(f"[{name}] {line}")

        def connect() -> None:
            before = seen
            self.cloud.stream(job.on_host(self.task, host, "follow"), on_line)
            if status is None and seen == before:
                raise LaunchUnansweredError(f"{name}: the connection broke")
            if status is None:
                self.print_line(f"{name}: the connection broke, connecting again")

        while status is None:
            try:
                self._retry(connect, left=left)
            except LaunchUnansweredError:
                raise LaunchError(
                    f"{name}: lost sight of the run, which may go on: the same command finds it"
                    " again, --delete ends it"
                ) from None
        return status

    def _interrupt(self) -> None:
        call = job.on_host(self.task, 0, "signal", "INT")
        if self.cloud.stream(call, self.print_line) not in (0, _NO_RUN):
            raise LaunchUnansweredError("the run could not be interrupted")
