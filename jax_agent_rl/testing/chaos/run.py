"""One run of the stage for a given time, with faults or without, and what it leaves behind.

::

    start ─► trainer runs ........................................... cancelled ─► close ─► what is left?
                  │ faults strike ........ mended │ calm ... until more are trained, at least until seconds are over
                  0                       seconds - CALM
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.testing.chaos.faults import Injection, all_injections
from jax_agent_rl.testing.chaos.ledger import TRAINED
from jax_agent_rl.testing.chaos.testbed import Testbed, open_testbed
from jax_agent_rl.testing.leaks import Leaks, ResourceUsage, find_leaks

CALM_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 5.0
_RARER = 3.0
"""In a soak, which is about what piles up, not about how much can go wrong at once."""
_RECOVERY_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """What to play.

    Attributes:
        seconds: from the first generation on; longer only if nothing was trained after the last fault.
        seed: of everything.
        faults: names of those that strike; none: an undisturbed run.
        soak: take footprints, and let faults be as rare as they are for a run that has to get far.
    """

    seconds: float
    seed: int
    faults: Collection[str] = ()
    soak: bool = False


@dataclass(kw_only=True)
class ChaosResult:
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
        trained_after: trajectories trained after the last fault was mended.
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
    trained_after: int = 0
    crashed: str = ""
    servers_lost: int = 0
    leftovers: Leaks = Leaks()
    footprints: list[ResourceUsage] = field(default_factory=list)


async def run_chaos(plan: ChaosPlan, say: Callable[[str], None]) -> ChaosResult:
    """Starts a stage, runs it, closes it and looks for what is left.

    Args:
        plan: how long, and what strikes.
        say: takes a line of progress.

    Raises:
        LaunchError: a server does not start.
    """
    mark, before = secrets.token_hex(8), asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        async with open_testbed(Path(name), seed=plan.seed, mark=mark) as stage:
            played = await _run(stage, plan, say)
        played.leftovers = await find_leaks(mark=mark, ports=stage.ports, folder=stage.temporary, tasks_before=before)
    return played


async def _run(stage: Testbed, plan: ChaosPlan, say: Callable[[str], None]) -> ChaosResult:
    injections = [injection for injection in all_injections(stage.victims) if injection.name in plan.faults]
    played = ChaosResult(seconds=plan.seconds)
    training = asyncio.create_task(stage.trainer.run(), name="trainer")
    watching = asyncio.create_task(_watch(stage, injections, played if plan.soak else None, say), name="watch")
    striking = asyncio.create_task(_strike(injections, plan), name="faults")
    begin = time.monotonic()
    try:
        await asyncio.wait({training, striking}, return_when=asyncio.FIRST_COMPLETED)
        trained = stage.ledger.count(TRAINED)
        await asyncio.wait({training}, timeout=max(0.0, begin + plan.seconds - time.monotonic()))
        played.seconds = time.monotonic() - begin
        played.trained_per_second = stage.ledger.rate(time.monotonic())
        await _recover(stage, training, trained)
        played.trained_after = stage.ledger.count(TRAINED) - trained
        played.crashed = _why_ended(training)
    finally:
        for task in (watching, striking, training):
            task.cancel()
        stopping = time.monotonic()
        _, stuck = await asyncio.wait({watching, striking, training}, timeout=_STOP_SECONDS)
        played.stop_seconds = time.monotonic() - stopping
        played.crashed = played.crashed or ", ".join(f"{t.get_name()} did not end when cancelled" for t in stuck)
    if striking.done() and not striking.cancelled() and (error := striking.exception()):
        raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error  # a server did not start again
    _conclude(stage, injections, played)
    return played


async def _recover(stage: Testbed, training: asyncio.Task[None], trained: int) -> None:
    """Waits until more are trained: servers that were lost often are tried again after a while only."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    while stage.ledger.count(TRAINED) <= trained and not training.done() and time.monotonic() < deadline:
        await asyncio.wait({training}, timeout=0.2)


async def _strike(injections: Sequence[Injection], plan: ChaosPlan) -> None:
    seconds, rarer = plan.seconds - CALM_SECONDS, _RARER if plan.soak else 1.0
    async with asyncio.TaskGroup() as group:
        for injection in injections:
            group.create_task(injection.run(plan.seed, seconds, rarer=rarer), name=injection.name)
        group.create_task(asyncio.sleep(seconds), name="until the calm")


async def _watch(
    stage: Testbed, injections: Sequence[Injection], played: ChaosResult | None, say: Callable[[str], None]
) -> None:
    """A line of progress now and then, and a footprint for ``played``, if given."""
    begin = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if played is not None:
            played.footprints.append(ResourceUsage.now())
        struck = ", ".join(f"{injection.name} {injection.strikes}" for injection in injections if injection.strikes)
        done = f"step {stage.ledger.steps}, {stage.ledger.count(TRAINED)} trained"
        say(f"  {time.monotonic() - begin:4.0f} s: {done}; {struck or 'no faults'}")


def _conclude(stage: Testbed, injections: Sequence[Injection], played: ChaosResult) -> None:
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
