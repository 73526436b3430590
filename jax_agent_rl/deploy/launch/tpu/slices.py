"""The life of the slices: created or found, awaited, watched, deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, SliceRequest
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

T = TypeVar("T")
_TRIES = 20
_LONGEST = 16


def pauses(poll: float, tries: int = _TRIES) -> Iterator[float]:
    """Yield the growing seconds before each retry: an hour and more in all for a ``poll`` of 15 s."""
    for number in range(tries):
        yield poll * min(2**number, _LONGEST)


async def patiently(
    act: Callable[[], Awaitable[T]],
    *,
    poll: float,
    print_line: Callable[[str], None],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Retry through failures of the network and of gcloud, as nobody may be there to start again.

    Args:
        act: may be done twice.
        poll: seconds before the first retry; later ones wait longer.
        print_line: prints a line.
        sleep: between two tries.

    Raises:
        LaunchError: gcloud refuses, or has failed many times in a row.
    """
    left = pauses(poll)
    while True:
        try:
            return await act()
        except LaunchUnansweredError as error:
            if (pause := next(left, None)) is None:
                raise
            print_line(f"{error}\ntrying again in {pause:.0f} s")
            await sleep(pause)


_PROGRESS_SECONDS = 30.0


Addresses = tuple[tuple[str, ...], ...]
"""Of every host of every slice, in the network of the zone."""


class Preempted(Exception):
    """The slices were preempted."""


class State(Enum):
    """What gcloud's states mean for a run."""

    ABSENT = "there is none"
    WAITING = "not ready yet"
    READY = "ready"
    LOST = "taken back; only deleting and making it anew helps"
    FAILED = "refused"


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
        state: what it means; with several slices, of the worst.
        word: gcloud's own, for messages.
        hosts: addresses in each slice, once they are ready.
        why: what gcloud says of a failure.
    """

    state: State
    word: str
    hosts: Addresses = ()
    why: str = ""


class Slices:
    """The slices of a request.

    Args:
        print_line: takes a line for the screen.
        poll: seconds between two looks.
    """

    def __init__(self, request: SliceRequest, cloud: Gcloud, *, print_line: Callable[[str], None], poll: float) -> None:
        self._request, self._cloud, self._print_line, self._poll = request, cloud, print_line, poll
        self.created = False  # by this launcher
        self.there = False  # perhaps, as far as this launcher knows

    @property
    def name(self) -> str:
        """Gcloud's name of the slice or the queued resource."""
        return self._request.name

    async def look(self) -> SliceStatus:
        """Query the state once.

        Raises:
            LaunchError: something of this name is there, but it is not what was asked for.
        """
        request = self._request
        first, *of_nodes = gcloud.look(request)
        try:
            answer = await self._cloud.read_json(first)
        except LaunchTargetError:
            return SliceStatus(state=State.ABSENT, word="NOT_FOUND")
        if not request.by_queue:
            return self._seen_nodes([answer])
        word = answer.get("state", {}).get("state", "STATE_UNSPECIFIED")
        state = _QUEUE_STATES.get(word, State.WAITING)
        if state is not State.READY:
            return SliceStatus(state=state, word=word, why=_why(answer))
        try:
            nodes = [await self._cloud.read_json(question) for question in of_nodes]
        except LaunchTargetError:
            return SliceStatus(state=State.LOST, word="NOT_FOUND")
        return self._seen_nodes(nodes)

    def _seen_nodes(self, nodes: list[dict[str, Any]]) -> SliceStatus:
        wanted = self._request.topology.accelerator_type
        for node in nodes:
            if node.get("acceleratorType", wanted) != wanted:
                raise LaunchError(
                    f"{self._request.name} is there already and is a {node['acceleratorType']}, not a {wanted}; "
                    "choose another --name, or take that one away with --delete"
                )
        words = [node.get("state", "STATE_UNSPECIFIED") for node in nodes]
        states = [_NODE_STATES.get(word, State.WAITING) for word in words]
        worst = next((s for s in (State.LOST, State.WAITING) if s in states), State.READY)
        word = words[states.index(worst)]
        hosts = tuple(map(_addresses, nodes)) if worst is State.READY else ()
        return SliceStatus(state=worst, word=word, hosts=hosts)

    async def ensure(self) -> Addresses:
        """Create the slices, or take existing ones, and wait until they are ready.

        Returns:
            the hosts of each slice.

        Raises:
            LaunchError: there is no quota, no capacity, no such chip in the zone, or the name is taken.
            Preempted: they were taken back before they were ready.
        """
        request = self._request
        seen = await self.look()
        if seen.state in (State.LOST, State.FAILED):
            self._print_line(f"{request.name} is {seen.word}: {seen.state.value}")
            await self.delete()
            seen = SliceStatus(state=State.ABSENT, word="NOT_FOUND")
        if seen.state is State.ABSENT:
            await self._require_kind()
            self._print_line(f"creating {request.name}: {request}")
            await self._create()
        else:
            self.there = True
            self._print_line(f"{request.name} is there already ({seen.word})")
        return await self._until_ready()

    async def _create(self) -> None:
        self.there = True
        try:
            work = self._cloud.read(gcloud.create(self._request))
            await self._with_progress(work, f"creating {self._request.name}")
        except LaunchError as error:
            self.there = isinstance(error, LaunchUnansweredError)  # it may come into being without an answer
            raise
        self.created = True

    async def _require_kind(self) -> None:
        """Raise :class:`LaunchError` if the zone has no such chips."""
        wanted = self._request.topology.accelerator_type
        listed = await self._cloud.read_json(gcloud.accelerator_types())
        found = {entry.get("type") or entry["name"].rpartition("/")[2] for entry in listed}
        if wanted not in found:
            prefix = wanted.rpartition("-")[0] + "-"
            same = sorted((t for t in found if t.startswith(prefix)), key=lambda t: int(t.rpartition("-")[2]))
            has = f"of that kind it has {', '.join(same)}" if same else "it has none of that kind"
            raise LaunchError(
                f"{self._request.topology.name} is {wanted}, which this zone does not have ({has}); choose another "
                "--zone: https://cloud.google.com/tpu/docs/regions-zones lists what each has"
            )

    async def _until_ready(self) -> Addresses:
        begin = report = time.monotonic()
        word = ""
        while (
            seen := await patiently(self.look, poll=self._poll, print_line=self._print_line)
        ).state is not State.READY:
            if seen.state is State.LOST:
                raise Preempted(f"{seen.word} before it was ready")
            if seen.state is State.FAILED:
                fix = gcloud.fix_of(seen.why) or "delete it with --delete and ask again"
                raise LaunchError(f"{self._request.name}: the request failed: {seen.why or seen.word}\n{fix}")
            if seen.state is not State.WAITING:
                raise LaunchError(
                    f"{self._request.name} went from {word or 'creation'} to {seen.word} before it was ready: "
                    "start again, with --queued if the zone is short of capacity"
                )
            now = time.monotonic()
            if seen.word != word or now - report > _PROGRESS_SECONDS:
                word, report = seen.word, now
                self._print_line(f"{self._request.name} is {word} ({now - begin:.0f} s)")
            await asyncio.sleep(self._poll)
        self._print_line(
            f"{self._request.name} is ready: {sum(map(len, seen.hosts))} host(s) ({time.monotonic() - begin:.0f} s)"
        )
        return seen.hosts

    async def delete(self) -> bool:
        """Delete the slices; return False if there are none."""
        self._print_line(f"deleting {self._request.name}")
        try:
            work = self._cloud.read(gcloud.delete(self._request))
            await self._with_progress(work, f"deleting {self._request.name}")
        except LaunchTargetError:
            self.there = False
            return False
        self.there = False
        return True

    async def _with_progress(self, work: Any, what: str) -> None:
        begin = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_PROGRESS_SECONDS))[0]:
                self._print_line(f"{what}: {time.monotonic() - begin:.0f} s")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        task.result()


def _addresses(node: dict[str, Any]) -> tuple[str, ...]:
    return tuple(endpoint["ipAddress"] for endpoint in node.get("networkEndpoints", []))


def _why(answer: dict[str, Any]) -> str:
    state = answer.get("state", {})
    return str(state.get("failedData", {}).get("error", {}).get("message", ""))
