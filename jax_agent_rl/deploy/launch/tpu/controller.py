"""A run on preemptible slices, from creating them to its exit status.

::

    slices ready ─► copy ─► install ─► prepare ─► start on all hosts ─► follow all ─┬─► ended ─► delete
         ▲                                                                          │
         └── delete, recreate, --auto-resume ◄── preempted? ◄─── a host is lost ◄───┘

Rollout servers start first, and the learner once they serve; they end when the learner has. A secret, new at every
start, authenticates the learner.

Every stage happens on all hosts at the same time. Whatever fails, the state of the slices decides whether it counts as
a preemption, after which the run resumes a bounded number of times, or as a failure of the run. A launcher that has
lost sight of the run (the network here, an expired login) deletes nothing. Recreating and deleting a slice, which
nobody may be there to repeat, are tried for more than an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.runner import Connections, Interrupted, set_on_signal, watch
from jax_agent_rl.deploy.launch.tpu import job, remote
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud
from jax_agent_rl.deploy.launch.tpu.job import HostWorker, Job
from jax_agent_rl.deploy.launch.tpu.remote import Logs
from jax_agent_rl.deploy.launch.tpu.slices import Addresses, Fleet, Preempted, State, backoff, retry
from jax_agent_rl.errors import LaunchError

T = TypeVar("T")
_FIRST_TRIES = 4  # to reach a host for the first time
_FAILURE_POLLS = 5  # after a run has failed: the state of a preempted slice follows some seconds later
_OTHERS_SECONDS = 60.0  # for the other hosts to end by themselves once one has failed


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Limits of recovery from failures and preemptions.

    Attributes:
        keep: leave the slices when the run has ended.
        max_preemptions: limit after which the run is abandoned.
        poll: seconds between two polls of the slices' state.
    """

    keep: bool
    max_preemptions: int
    poll: float


class RunController:
    """Runs a job on slices.

    Args:
        task: the job.
        slices: the slices.
        cloud: calls gcloud.
        policy: limits of recovery.
        root: the project's folder.
        logs: the hosts' output.
        print_line: prints a line.
    """

    def __init__(
        self,
        task: Job,
        slices: Fleet,
        cloud: Gcloud,
        policy: RecoveryPolicy,
        *,
        root: Path,
        logs: Logs,
        print_line: Callable[[str], None],
    ) -> None:
        self._job, self._slices, self._cloud, self._policy = task, slices, cloud, policy
        self._root, self._logs, self._print_line = root, logs, print_line
        self._connections = Connections(root)
        self._interrupt = asyncio.Event()
        self._begun = False  # there may be checkpoints of this run
        self.preemptions = 0

    @contextlib.asynccontextmanager
    async def until_interrupted(self) -> AsyncIterator[None]:
        """Handle Ctrl-C and SIGTERM inside; on leaving, no process is left on this machine."""
        set_on_signal(self._interrupt)
        try:
            yield
        finally:
            await self._connections.stop()

    async def run(self, make_workers: Callable[[Addresses], list[HostWorker]], *, resume: bool) -> int:
        """Run through all preemptions; return the exit status.

        Args:
            make_workers: returns the workers at these addresses.
            resume: continue from the newest checkpoint.

        Raises:
            LaunchError: a slice cannot be created, a stage failed, or there were too many preemptions.
            Interrupted: before there was a run to interrupt.
        """
        try:
            status = await self._until_ended(make_workers, "--resume" if resume else None)
            await self._conclude(status)
        except LaunchError:
            if self._slices.may_exist:
                self._print_line("the slice stays and costs: --delete deletes it")
            raise
        return status

    async def _until_ended(self, make_workers: Callable[[Addresses], list[HostWorker]], how: str | None) -> int:
        while True:
            try:
                # The first time, the user is there to try again.
                made = self._retry(self._slices.ensure) if self.preemptions else self._slices.ensure()
                hosts = await self._watch(made)
                return await self._attempt(make_workers(hosts), how)
            except Preempted as event:
                if self._interrupt.is_set():
                    self._print_line(f"the slice was preempted ({event}), too; --delete deletes it")
                    raise Interrupted from None
                self.preemptions += 1
                limit = self._policy.max_preemptions
                if self.preemptions > limit:
                    raise LaunchError(
                        f"the slice was preempted {self.preemptions} time(s) (--max-preemptions {limit}); the last "
                        f"checkpoint is in {self._job.kept}: continue with --resume"
                    ) from None
                self._print_line(f"preemption {self.preemptions} of at most {limit} ({event}): recreating the slice")
                if self._job.kept is None:
                    raise LaunchError("the slice was preempted, and without --bucket the run is lost") from None
                await self._watch(self._retry(self._slices.delete_lost))
                how = "--auto-resume" if self._begun else how

    async def follow(self, workers: Sequence[HostWorker]) -> int:
        """Attach to the run under way, or print the last one's output; return its exit status.

        Raises:
            LaunchError: the slices were preempted.
        """
        self._logs.expect_run(found=True)
        try:
            return await self._follow(workers)
        except Preempted as event:
            raise LaunchError(
                f"the slice was preempted ({event}); the command that started the run, with --resume, recreates it"
            ) from None

    async def _attempt(self, workers: Sequence[HostWorker], how: str | None) -> int:
        try:
            if not await self._is_running(workers[0]):
                await self._set_up(workers, how)
        except LaunchError:
            await self._raise_if_preempted(polls=1)
            raise
        return await self._follow(workers)

    async def _is_running(self, leader: HostWorker) -> bool:
        """Return whether a run of this name is under way on slices that existed before."""
        if self._slices.created:
            return False
        answer = await self._watch(self._cloud.read(job.running(leader, self._job)))
        if answer.split()[-1:] != ["yes"]:
            return False
        self._print_line("a run is under way there: following it")
        self._begun = True
        self._logs.expect_run(found=True)
        return True

    async def _set_up(self, workers: Sequence[HostWorker], how: str | None) -> None:
        cloud, task = self._cloud, self._job
        config = {job.CONFIG: task.config.read_bytes()} if task.config else {}
        with tempfile.TemporaryDirectory(prefix="jax_agent_rl-") as folder:
            packed = Path(folder) / job.ARCHIVE
            large = await self._watch(asyncio.to_thread(job.pack, self._root, packed, extra=config))
            size = packed.stat().st_size
            self._print_line(f"copying the code to {len(workers)} host(s), {size / 1e6:.1f} MB each")
            if large:
                self._print_line(f"including {', '.join(large)}: list files in .gitignore that hosts do not need")
            # New hosts may not listen yet.
            await self._stage([job.copy(cloud, worker, packed) for worker in workers], tries=_FIRST_TRIES)
        what = "installing the environment (some minutes the first time)" if task.install else "unpacking"
        self._print_line(f"{what}; then: {task.preparation}" if task.preparation else what)
        await self._stage([job.set_up(cloud, worker, task) for worker in workers], task.secrets())
        self._logs.expect_run(found=False)
        await self._start_run(workers, how)

    async def _start_run(self, workers: Sequence[HostWorker], how: str | None) -> None:
        cloud, task = self._cloud, self._job
        serving = [worker for worker in workers if worker.serves]
        urls, secrets = job.server_urls(serving, task), task.secrets(token_hex(32) if serving else None)
        if serving:
            # Servers of an earlier start have newer weights than a checkpoint, and another secret.
            await self._watch(self._signal(workers, "KILL"))
            self._print_line(f"starting {len(serving)} rollout server(s)")
            await self._stage([job.start(cloud, w, task, resume=None, urls=urls) for w in serving], secrets)
            await self._stage([job.until_listening(cloud, worker, task) for worker in serving])
        self._print_line("starting on all hosts")
        self._begun = True
        learning = [worker for worker in workers if not worker.serves]
        await self._stage([job.start(cloud, worker, task, resume=how, urls=urls) for worker in learning], secrets)

    async def _stage(
        self, commands: Sequence[Command], secrets: Mapping[str, str] | None = None, *, tries: int = 1
    ) -> None:
        """Run a command on all hosts; all have to succeed within so many tries."""
        for pause in (*backoff(self._policy.poll, tries - 1), None):
            statuses = await self._watch(self._connections.run_all(commands, self._print_line, secrets))
            commands = [command for command, status in zip(commands, statuses, strict=True) if status]
            if not commands:
                return
            names = ", ".join(command.name for command in commands)
            if pause is None:
                brief = re.sub(r"\s+", " ", " ".join(commands[0].argv))[:300]
                raise LaunchError(f"{names}: {brief} failed, see above")
            await self._raise_if_preempted(polls=1)
            self._print_line(f"{names}: trying again in {pause:.0f} s")
            await self._watch(asyncio.sleep(pause))

    # --- while it runs -----------------------------------------------------------------------------------------

    async def _follow(self, workers: Sequence[HostWorker]) -> int:
        self._print_line(f"logs: {self._logs.folder}")
        learning = [worker for worker in workers if not worker.serves]
        watching = [asyncio.ensure_future(self._follow_host(worker)) for worker in workers]
        looking = asyncio.ensure_future(self._until_preempted())
        interrupt = asyncio.ensure_future(self._stop_when_interrupted(workers))
        try:
            statuses = await self._statuses(watching[: len(learning)], looking, interrupt)
            await self._end_servers(workers, watching[len(learning) :])
        except Preempted:
            await self._save(workers, watching[0])
            raise
        finally:
            tasks = [*watching, looking, interrupt]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = {worker.name: status for worker, status in zip(learning, statuses, strict=True) if status}
        if failed:
            self._print_line("ended with " + ", ".join(f"{status} on {name}" for name, status in failed.items()))
        if failed and not self._interrupt.is_set():
            answered = await self._raise_if_preempted(polls=1 if statuses[0] == job.REFUSED else _FAILURE_POLLS)
            if not answered:
                raise LaunchError("gcloud does not report whether the slice was preempted, so it is left as it is")
        # Hosts that still run would be in the way of the next start.
        stuck = [worker for worker, status in zip(learning, statuses, strict=True) if status == remote.LOST]
        await self._signal(stuck, "KILL")
        return statuses[0] or max(statuses)

    async def _signal(self, workers: Sequence[HostWorker], name: str) -> None:
        """Send a signal to runs; one that has ended is skipped."""
        await self._connections.run_all([job.send(self._cloud, w, self._job, name) for w in workers], self._print_line)

    async def _end_servers(self, workers: Sequence[HostWorker], watching: Sequence[asyncio.Future[int]]) -> None:
        """End the rollout servers, which have no clients any more."""
        if watching:
            await self._signal([worker for worker in workers if worker.serves], "INT")
            await asyncio.wait(watching, timeout=_OTHERS_SECONDS)

    async def _save(self, workers: Sequence[HostWorker], leader: asyncio.Future[int]) -> None:
        """Make a learner that has lost a sampling slice save a checkpoint."""
        if leader.done() or not any(worker.serves for worker in workers):
            return
        with contextlib.suppress(LaunchError):  # gcloud may fail, too: then the run resumes from an earlier one
            if await self._slices.learner_ready():
                self._print_line("the learner saves a checkpoint and ends")
                await self._signal(workers[:1], "INT")
                await asyncio.wait([leader], timeout=_OTHERS_SECONDS)

    async def _statuses(
        self, watching: Sequence[asyncio.Future[int]], looking: asyncio.Future, interrupt: asyncio.Future
    ) -> list[int]:
        """Return the learners' statuses; once one has failed, the others are waited for only a while."""
        left = set(watching)
        limit: float | None = None
        while left:
            waited = {*left, looking, interrupt}
            done, _ = await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for ended in done & {looking, interrupt}:
                ended.result()  # raises
            left -= done
            if not done:
                break
            if any(task.result() for task in watching if task.done()):
                limit = _OTHERS_SECONDS
        return [task.result() if task.done() else remote.LOST for task in watching]

    async def _follow_host(self, worker: HostWorker) -> int:
        """Print one host's output, over as many connections as needed; return the run's exit status.

        Raises:
            LaunchError: many connections in a row delivered nothing.
        """
        left = backoff(self._policy.poll)
        while True:
            reader = self._logs.reader(worker.name)
            await self._connections.run(job.follow(self._cloud, worker, self._job), reader)
            if reader.status is not None:
                return reader.status
            if reader.received:
                left = backoff(self._policy.poll)
            if (pause := next(left, None)) is None:
                raise LaunchError(
                    f"{worker.name}: lost sight of the run, which may go on: the same command finds it again, --delete "
                    "ends it"
                )
            self._print_line(f"{worker.name}: the connection broke, connecting again in {pause:.0f} s")
            await asyncio.sleep(pause)

    async def _until_preempted(self) -> None:
        while True:
            await asyncio.sleep(self._policy.poll)
            await self._raise_if_preempted(polls=1)

    async def _raise_if_preempted(self, *, polls: int) -> bool:
        """Poll the slices repeatedly; return False if gcloud failed every time, so that their state is unknown."""
        answered = False
        for number in range(polls):
            with contextlib.suppress(LaunchError):
                seen = await self._slices.query()
                answered = True
                if seen.state in (State.LOST, State.ABSENT):
                    raise Preempted(seen.word)
            if number + 1 < polls:
                await asyncio.sleep(self._policy.poll)
        return answered

    async def _stop_when_interrupted(self, workers: Sequence[HostWorker]) -> None:
        """Handle Ctrl-C: the first makes the run save and end, the second detaches this launcher.

        Raises:
            Interrupted: the second time.
        """
        await self._interrupt.wait()
        self._print_line("interrupted: the run saves a checkpoint and ends (once more: leave it running)")
        again = asyncio.Event()
        set_on_signal(again)
        ending = asyncio.ensure_future(self._end_run(workers[0]))
        try:
            await again.wait()
        finally:
            ending.cancel()
        self._print_line("detached; --logs shows its output, --delete ends it and its cost")
        raise Interrupted

    async def _end_run(self, leader: HostWorker) -> None:
        """Send the signal until it has arrived, or no run is left."""
        for pause in backoff(self._policy.poll):
            status = await self._connections.run(job.send(self._cloud, leader, self._job, "INT"), self._print_line)
            if status in (0, remote.NO_RUN):
                return
            self._print_line(f"the run could not be interrupted, trying again in {pause:.0f} s")
            await asyncio.sleep(pause)

    async def _retry(self, act: Callable[[], Awaitable[T]], **how: Callable[[float], Awaitable[object]]) -> T:
        return await retry(act, poll=self._policy.poll, print_line=self._print_line, **how)

    async def _watch(self, wanted: Awaitable[T]) -> T:
        """Await work, but not past an interruption."""
        try:
            return await watch(wanted, self._interrupt)
        except Interrupted:
            self._print_line("interrupted; the slice may exist: --delete deletes it")
            raise

    async def _conclude(self, status: int) -> None:
        if self._policy.keep or self._job.kept is None:
            why = "--keep" if self._policy.keep else "without --bucket the run is on its disk alone"
            self._print_line(f"the slice stays ({why}) and costs until you give --delete")
        else:
            self._interrupt = asyncio.Event()  # an earlier interruption was for the run
            set_on_signal(self._interrupt)
            between_tries = lambda seconds: self._watch(asyncio.sleep(seconds))  # noqa: E731
            await self._retry(self._slices.delete, sleep=between_tries)
            self._print_line(f"the run is in {self._job.kept}")
        if self.preemptions:
            self._print_line(f"preempted {self.preemptions} time(s)")
