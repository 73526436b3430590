"""One run of the stage for a given time, with faults or without, and what it leaves behind.

::

    start ─► trainer runs ........................................... cancelled ─► close ─► what is left?
                  │ faults strike ........ mended │ calm ... until a step is done, at least until seconds are over
                  0                       seconds - CALM
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.chaos.children import marked
from jax_agent_rl.chaos.faults import Injection, all_injections
from jax_agent_rl.chaos.footprint import Footprint
from jax_agent_rl.chaos.ledger import TRAINED
from jax_agent_rl.chaos.stage import Stage, open_stage

CALM_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 5.0
_RARER = 3.0
"""In a soak, which is about what piles up, not about how much can go wrong at once."""
_RECOVERY_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What should have been gone: processes, ports that are still bound, files, asyncio tasks."""

    processes: Sequence[str] = ()
    ports: Sequence[int] = ()
    files: Sequence[str] = ()
    tasks: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.processes) + len(self.ports) + len(self.files) + len(self.tasks)


@dataclass(kw_only=True)
class Played:
    """How a run went.

    Attributes:
        seconds: it lasted.
        trained_per_second: trajectories, from the end of the first step, when everything is warm.
        stop_seconds: from its cancellation until nothing of it ran any more.
        findings: :meth:`Ledger.summary`.
        complaints: in words.
        faults: how often each struck.
        network: requests spoilt, by fault.
        most_attempts: how often the most repeated rollout request was sent.
        mean_attempts: sent rollout requests per request.
        most_tool_attempts: how often the most repeated tool call was sent.
        steps_after: that were finished after the last fault was mended.
        crashed: why the trainer ended before its time; "" if it did not.
        leftovers: after everything was closed.
        servers_lost: how often the client lost a server.
        footprints: taken while it ran.
    """

    seconds: float
    trained_per_second: float = 0.0
    stop_seconds: float = 0.0
    findings: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    network: dict[str, int] = field(default_factory=dict)
    most_attempts: int = 0
    mean_attempts: float = 0.0
    most_tool_attempts: int = 0
    steps_after: int = 0
    crashed: str = ""
    servers_lost: int = 0
    leftovers: Leftovers = Leftovers()
    footprints: list[Footprint] = field(default_factory=list)


async def play(
    seconds: float,
    *,
    seed: int,
    faults: Collection[str],
    say: Callable[[str], None],
    soak: bool = False,
) -> Played:
    """Starts a stage, runs it for so long, closes it and looks for what is left.

    Args:
        seconds: from the first generation to the last.
        seed: of everything.
        faults: names of those that strike; none: an undisturbed run.
        say: takes a line of progress.
        soak: take footprints, and let faults be as rare as they are for a run that has to get far.

    Raises:
        LaunchError: a server does not start.
    """
    mark, before = secrets.token_hex(8), asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        scratch, ports = Path(name), ()
        async with open_stage(scratch, seed=seed, mark=mark) as stage:
            ports = stage.ports
            played = await _run(stage, seconds, seed, faults, say, soak)
        await asyncio.sleep(0)
        played.leftovers = Leftovers(
            processes=await _orphans(mark),
            ports=[port for port in ports if _is_bound(port)],
            files=[str(path.relative_to(scratch)) for path in (scratch / "tmp").rglob("*")],
            tasks=[task.get_name() for task in asyncio.all_tasks() - before],
        )
    return played


async def _run(
    stage: Stage, seconds: float, seed: int, faults: Collection[str], say: Callable[[str], None], soak: bool
) -> Played:
    injections = [injection for injection in all_injections(stage.victims) if injection.name in faults]
    played = Played(seconds=seconds)
    training = asyncio.create_task(stage.trainer.run(), name="trainer")
    watching = asyncio.create_task(_watch(stage, injections, played, say, soak), name="watch")
    striking = asyncio.create_task(
        _strike(injections, seed, seconds - CALM_SECONDS, rarer=_RARER if soak else 1.0), name="faults"
    )
    begin = time.monotonic()
    try:
        await asyncio.wait({training, striking}, return_when=asyncio.FIRST_COMPLETED)
        steps = stage.ledger.steps
        await asyncio.wait({training}, timeout=max(0.0, begin + seconds - time.monotonic()))
        played.seconds = time.monotonic() - begin
        played.trained_per_second = stage.ledger.rate(time.monotonic())
        await _recover(stage, training, steps)
        played.steps_after = stage.ledger.steps - steps
        played.crashed = _why_ended(training)
    finally:
        for task in (watching, striking, training):
            task.cancel()
        stopping = time.monotonic()
        _, stuck = await asyncio.wait({watching, striking, training}, timeout=_STOP_SECONDS)
        played.stop_seconds = time.monotonic() - stopping
        played.crashed = played.crashed or ", ".join(f"{t.get_name()} did not end when cancelled" for t in stuck)
    if striking.done() and not striking.cancelled() and (error := striking.exception()):
        raise error
    _conclude(stage, injections, played)
    return played


async def _recover(stage: Stage, training: asyncio.Task[None], steps: int) -> None:
    """Waits for a step after ``steps``: servers that were lost often are tried again after a while only."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    while stage.ledger.steps <= steps and not training.done() and time.monotonic() < deadline:
        await asyncio.wait({training}, timeout=0.2)


async def _strike(injections: Sequence[Injection], seed: int, seconds: float, *, rarer: float) -> None:
    async with asyncio.TaskGroup() as group:
        for injection in injections:
            group.create_task(injection.run(seed, seconds, rarer=rarer), name=injection.name)
        group.create_task(asyncio.sleep(seconds), name="calm begins")


async def _watch(
    stage: Stage, injections: Sequence[Injection], played: Played, say: Callable[[str], None], soak: bool
) -> None:
    """A line of progress, and in a soak a footprint, now and then."""
    begin = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if soak:
            played.footprints.append(Footprint.now())
        struck = ", ".join(f"{injection.name} {injection.strikes}" for injection in injections if injection.strikes)
        done = f"step {stage.ledger.steps}, {stage.ledger.count(TRAINED)} trained"
        say(f"  {time.monotonic() - begin:4.0f} s: {done}; {struck or 'no faults'}")


def _conclude(stage: Stage, injections: Sequence[Injection], played: Played) -> None:
    proxies = (*stage.victims.engine_proxies, stage.victims.tool_proxy)
    attempts: Counter[str] = sum((proxy.attempts for proxy in stage.victims.engine_proxies), Counter())
    tool_attempts = stage.victims.tool_proxy.attempts
    played.servers_lost = stage.trainer.runtime.client.stats().servers_lost
    played.findings, played.complaints = stage.ledger.summary(), stage.ledger.complaints
    played.faults = {injection.name: injection.strikes for injection in injections}
    played.network = {str(fault): n for fault, n in sorted(sum((proxy.hits for proxy in proxies), Counter()).items())}
    played.most_attempts = max(attempts.values(), default=0)
    played.most_tool_attempts = max(tool_attempts.values(), default=0)
    played.mean_attempts = attempts.total() / max(1, len(attempts))


def _why_ended(training: asyncio.Task[None]) -> str:
    if not training.done():
        return ""
    error = None if training.cancelled() else training.exception()
    return f"{type(error).__name__}: {error}" if error else "the trainer ended by itself"


async def _orphans(mark: str) -> list[str]:
    """Processes of the run that outlived it, each killed now; a worker is given a moment to notice its parent's end."""
    for _ in range(40):
        if not marked(mark):
            return []
        await asyncio.sleep(0.05)
    found = marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in found.items()]


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
