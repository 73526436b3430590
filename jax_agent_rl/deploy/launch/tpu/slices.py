"""The life of the slices: created or found, awaited, polled, deleted; one request, or all of a run together."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Gcloud, SliceRequest
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

T = TypeVar("T")
Addresses = tuple[tuple[str, ...], ...]
"""Address of every host of every slice, in the zone's network."""

_TRIES = 20
_MAX_FACTOR = 16
_PROGRESS_SECONDS = 30.0


def backoff(poll: float, tries: int = _TRIES) -> Iterator[float]:
    """Yield the growing seconds before each retry: more than an hour in all for a ``poll`` of 15 s."""
    for number in range(tries):
        yield poll * min(2**number, _MAX_FACTOR)


async def retry(
    act: Callable[[], Awaitable[T]],
    *,
    poll: float,
    print_line: Callable[[str], None],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Retry through failures of the network and of gcloud, as nobody may be there to start again.

    Args:
        act: the action, which may be repeated.
        poll: seconds before the first retry; later ones wait longer.
        print_line: prints a line.
        sleep: waits between two tries.

    Raises:
        LaunchError: gcloud refuses, or has failed many times in a row.
    """
    left = backoff(poll)
    while True:
        try:
            return await act()
        except LaunchUnansweredError as error:
            if (pause := next(left, None)) is None:
                raise
            print_line(f"{error}\ntrying again in {pause:.0f} s")
            await sleep(pause)


class Preempted(Exception):
    """The slices were preempted."""


class State(Enum):
    """Meaning of gcloud's states for a run, worst first."""

    LOST = "preempted; it has to be deleted and recreated"
    ABSENT = "there is none"
    FAILED = "refused"
    WAITING = "not ready yet"
    READY = "ready"


_NODE_STATES = {
    "READY": State.READY,
    **dict.fromkeys(
        ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN", "UNKNOWN"), State.LOST
    ),
}
_QUEUE_STATES = {
    "ACTIVE": State.READY,
    "FAILED": State.FAILED,
    **dict.fromkeys(("SUSPENDING", "SUSPENDED", "DELETING"), State.LOST),
}


@dataclass(frozen=True, kw_only=True)
class SliceStatus:
    """Result of one poll of the slices.

    Attributes:
        state: state of the worst slice.
        word: gcloud's name of the state, for messages.
        hosts: addresses in each slice, once they are ready.
        why: gcloud's message on a failure.
    """

    state: State
    word: str
    hosts: Addresses = ()
    why: str = ""


class Slices:
    """The slices of a request.

    Args:
        request: what to create.
        cloud: calls gcloud.
        print_line: prints a line.
        poll: seconds between two polls.

    Attributes:
        created: this launcher created them.
        may_exist: they may exist, as far as this launcher knows.
    """

    def __init__(self, request: SliceRequest, cloud: Gcloud, *, print_line: Callable[[str], None], poll: float) -> None:
        self.request, self._cloud, self._print_line, self._poll = request, cloud, print_line, poll
        self.created = self.may_exist = False

    async def query(self) -> SliceStatus:
        """Query the state once.

        Raises:
            LaunchError: a slice of this name exists, but of another kind.
        """
        request = self.request
        first, *node_calls = gcloud.poll(request)
        try:
            answer = await self._cloud.read_json(first)
        except LaunchTargetError:
            return SliceStatus(state=State.ABSENT, word="NOT_FOUND")
        if not request.by_queue:
            return self._judge_nodes([answer])
        word = answer.get("state", {}).get("state", "STATE_UNSPECIFIED")
        state = _QUEUE_STATES.get(word, State.WAITING)
        if state is not State.READY:
            error = answer.get("state", {}).get("failedData", {}).get("error", {})
            return SliceStatus(state=state, word=word, why=str(error.get("message", "")))
        try:
            nodes = [await self._cloud.read_json(call) for call in node_calls]
        except LaunchTargetError:
            return SliceStatus(state=State.LOST, word="NOT_FOUND")
        return self._judge_nodes(nodes)

    def _judge_nodes(self, nodes: list[dict[str, Any]]) -> SliceStatus:
        wanted = self.request.topology.accelerator_type
        for node in nodes:
            if node.get("acceleratorType", wanted) != wanted:
                raise LaunchError(
                    f"{self.request.name} is there already and is a {node['acceleratorType']}, not a {wanted}; "
                    "choose another --name, or delete that one with --delete"
                )
        words = [node.get("state", "STATE_UNSPECIFIED") for node in nodes]
        states = [_NODE_STATES.get(word, State.WAITING) for word in words]
        worst = next((s for s in (State.LOST, State.WAITING) if s in states), State.READY)
        word = words[states.index(worst)]
        if worst is not State.READY:
            return SliceStatus(state=worst, word=word)
        endpoints = (node.get("networkEndpoints", []) for node in nodes)
        hosts = tuple(tuple(endpoint["ipAddress"] for endpoint in each) for each in endpoints)
        return SliceStatus(state=worst, word=word, hosts=hosts)

    async def ensure(self) -> Addresses:
        """Create the slices, or take existing ones, and wait until they are ready.

        Returns:
            The hosts of each slice.

        Raises:
            LaunchError: there is no quota, no capacity, no such chip in the zone, or the name is taken.
            Preempted: they were preempted before they were ready.
        """
        request = self.request
        seen = await self.query()
        if seen.state in (State.LOST, State.FAILED):
            self._print_line(f"{request.name} is {seen.word}: {seen.state.value}")
            await self.delete()
            seen = SliceStatus(state=State.ABSENT, word="NOT_FOUND")
        if seen.state is State.ABSENT:
            await self._require_kind()
            self._print_line(f"creating {request.name}: {request}")
            await self._create()
        else:
            self.may_exist = True
            self._print_line(f"{request.name} is there already ({seen.word})")
        return await self._until_ready()

    async def _create(self) -> None:
        self.may_exist = True
        try:
            await self._run(gcloud.create(self.request), f"creating {self.request.name}")
        except LaunchError as error:
            self.may_exist = isinstance(error, LaunchUnansweredError)  # it may be created without an answer
            raise
        self.created = True

    async def _require_kind(self) -> None:
        """Raise :class:`LaunchError` if the zone has no such chips."""
        wanted = self.request.topology.accelerator_type
        listed = await self._cloud.read_json(gcloud.LIST_ACCELERATOR_TYPES)
        found = {entry.get("type") or entry["name"].rpartition("/")[2] for entry in listed}
        if wanted not in found:
            prefix = wanted.rpartition("-")[0] + "-"
            same = sorted((t for t in found if t.startswith(prefix)), key=lambda t: int(t.rpartition("-")[2]))
            has = f"of that kind it has {', '.join(same)}" if same else "it has none of that kind"
            raise LaunchError(
                f"{self.request.topology.name} is {wanted}, which this zone does not have ({has}); choose another "
                "--zone: https://cloud.google.com/tpu/docs/regions-zones lists what each has"
            )

    async def _until_ready(self) -> Addresses:
        begin = report = time.monotonic()
        word = ""
        while (seen := await retry(self.query, poll=self._poll, print_line=self._print_line)).state is not State.READY:
            if seen.state is State.LOST:
                raise Preempted(f"{seen.word} before it was ready")
            if seen.state is State.FAILED:
                fix = gcloud.advise(seen.why) or "delete it with --delete and ask again"
                raise LaunchError(f"{self.request.name}: the request failed: {seen.why or seen.word}\n{fix}")
            if seen.state is not State.WAITING:
                raise LaunchError(
                    f"{self.request.name} went from {word or 'creation'} to {seen.word} before it was ready: "
                    "start again, with --queued if the zone is short of capacity"
                )
            now = time.monotonic()
            if seen.word != word or now - report > _PROGRESS_SECONDS:
                word, report = seen.word, now
                self._print_line(f"{self.request.name} is {word} ({now - begin:.0f} s)")
            await asyncio.sleep(self._poll)
        self._print_line(
            f"{self.request.name} is ready: {sum(map(len, seen.hosts))} host(s) ({time.monotonic() - begin:.0f} s)"
        )
        return seen.hosts

    async def delete(self) -> None:
        """Delete the slices, if there are any."""
        self._print_line(f"deleting {self.request.name}")
        try:
            await self._run(gcloud.delete(self.request), f"deleting {self.request.name}")
        except LaunchTargetError:
            pass
        self.may_exist = False

    async def _run(self, call: Call, what: str) -> None:
        """Run a call, and print its progress."""
        begin, task = time.monotonic(), asyncio.ensure_future(self._cloud.read(call))
        try:
            while not (await asyncio.wait([task], timeout=_PROGRESS_SECONDS))[0]:
                self._print_line(f"{what}: {time.monotonic() - begin:.0f} s")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        task.result()


class Fleet:
    """Several slice requests, the learner's first, created, polled and deleted together."""

    def __init__(self, groups: Sequence[Slices]) -> None:
        self._groups = groups

    @property
    def created(self) -> bool:
        """Whether this launcher created the learner's slices, so that no run can be under way there."""
        return self._groups[0].created

    @property
    def may_exist(self) -> bool:
        """Whether there may be slices that cost, as far as this launcher knows."""
        return any(group.may_exist for group in self._groups)

    async def query(self) -> SliceStatus:
        """Return the worst state of all requests, and the hosts of all."""
        seen = await _gather(group.query() for group in self._groups)
        worst = min(seen, key=lambda one: list(State).index(one.state))
        hosts = tuple(slice for one in seen for slice in one.hosts) if worst.state is State.READY else ()
        return replace(worst, hosts=hosts)

    async def learner_ready(self) -> bool:
        """Return whether the learner's own slices are ready."""
        return (await self._groups[0].query()).state is State.READY

    async def ensure(self) -> Addresses:
        """Ensure all concurrently; see :meth:`Slices.ensure`.

        Raises:
            LaunchError: one of them cannot be created; those that were created stay.
            Preempted: one of them was preempted before all were ready.
        """
        found = await _gather(group.ensure() for group in self._groups)
        return tuple(slice for hosts in found for slice in hosts)

    async def delete_lost(self) -> None:
        """Delete preempted slices; the others are used again."""
        for group in self._groups:
            if (await group.query()).state in (State.LOST, State.FAILED):
                await group.delete()

    async def delete(self) -> None:
        """Delete all slices.

        Raises:
            LaunchError: some are left.
        """
        await delete_all({group.request.name: group.delete() for group in self._groups})


async def _gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all concurrently; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def delete_by_name(name: str, cloud: Gcloud, *, print_line: Callable[[str], None]) -> list[str]:
    """Delete all resources with a run's name; return their names.

    Args:
        name: name of the run.
        cloud: calls gcloud.
        print_line: prints a line.

    Raises:
        LaunchError: some are left.
    """
    own = re.compile(rf"{re.escape(name)}(-rollout-\d+)?")

    async def delete(call: Call) -> None:
        with contextlib.suppress(LaunchTargetError):  # deleted meanwhile
            await cloud.read(call)

    deleted: list[str] = []
    # Queued resources first: deleting one deletes its slices.
    for listing, make_call in ((gcloud.LIST_QUEUED, gcloud.delete_queued), (gcloud.LIST_NODES, gcloud.delete_node)):
        names = (entry["name"].rpartition("/")[2] for entry in await cloud.read_json(listing))
        if found := sorted(filter(own.fullmatch, names)):
            print_line(f"deleting {', '.join(found)}")
            await delete_all({each: delete(make_call(each)) for each in found})
            deleted += found
    return deleted


async def delete_all(deletions: Mapping[str, Awaitable[Any]]) -> None:
    """Run deletions concurrently, each to its end, even if others fail.

    Raises:
        LaunchError: some failed; names them and their reasons. :class:`LaunchUnansweredError` if none was refused.
    """
    results = await asyncio.gather(*deletions.values(), return_exceptions=True)
    failed = {name: each for name, each in zip(deletions, results, strict=True) if isinstance(each, BaseException)}
    for error in failed.values():
        if not isinstance(error, LaunchError):
            raise error
    if failed:
        why = "\n".join(str(error) for error in failed.values())
        unanswered = all(isinstance(error, LaunchUnansweredError) for error in failed.values())
        kind = LaunchUnansweredError if unanswered else LaunchError
        raise kind(f"{why}\n{', '.join(failed)}: still there, and costs; try --delete again")
