"""One run of the testbed for a given time, with or without faults, and what it leaves behind.

::

    start ─► trainer runs ......................................... cancelled ─► close ─► find leaks
                  │ faults strike ...... repaired │ calm ... until more are trained, at least until seconds are over
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
_REPORT_SECONDS = 5.0
_RARER = 3.0
"""Factor on the time between faults in a soak, which measures what accumulates."""
_RECOVERY_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """The schedule of a run.

    Attributes:
        seconds: duration; extended only if nothing was trained after the last fault.
        seed: seeds everything.
        faults: names of the faults that strike; empty for an undisturbed run.
        soak: measure resource usage, with rarer faults.
    """

    seconds: float
    seed: int
    faults: Collection[str] = ()
    soak: bool = False


@dataclass(kw_only=True)
class ChaosResult:
    """The result of a run.

    Attributes:
        seconds: its duration.
        trained_per_second: trajectories per second after the first step.
        stop_seconds: time from its cancellation until everything had stopped.
        findings: :meth:`Ledger.summary`.
        complaints: descriptions of failures.
        faults: strikes by fault.
        network: requests hit by network faults, by fault.
        most_attempts: times that the most repeated rollout request was sent.
        mean_attempts: mean times that a rollout request was sent.
        most_tool_attempts: times that the most repeated tool call was sent.
        trained_after: trajectories trained after the last fault was repaired.
        crashed: why the trainer ended early; empty if it did not.
        servers_lost: number of times the client lost a server.
        leaks: what was left after everything was closed.
        usage: resource usage during a soak.
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
    leaks: Leaks = Leaks()
    usage: list[ResourceUsage] = field(default_factory=list)


async def run_chaos(plan: ChaosPlan, say: Callable[[str], None]) -> ChaosResult:
    """Start a testbed, run it, close it and look for leaks.

    Args:
        plan: the schedule.
        say: prints a line of progress.

    Raises:
        LaunchError: a server does not start.
    """
    mark, before = secrets.token_hex(8), asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        async with open_testbed(Path(name), seed=plan.seed, mark=mark) as testbed:
            result = await _run(testbed, plan, say)
        result.leaks = await find_leaks(mark=mark, ports=testbed.ports, folder=testbed.temporary, tasks_before=before)
    return result


async def _run(testbed: Testbed, plan: ChaosPlan, say: Callable[[str], None]) -> ChaosResult:
    injections = [injection for injection in all_injections(testbed.victims) if injection.name in plan.faults]
    result = ChaosResult(seconds=plan.seconds)
    training = asyncio.create_task(testbed.trainer.run(), name="trainer")
    watching = asyncio.create_task(_watch(testbed, injections, result if plan.soak else None, say), name="watch")
    striking = asyncio.create_task(_strike(injections, plan), name="faults")
    begin = time.monotonic()
    try:
        await asyncio.wait({training, striking}, return_when=asyncio.FIRST_COMPLETED)
        trained = testbed.ledger.count(TRAINED)
        await asyncio.wait({training}, timeout=max(0.0, begin + plan.seconds - time.monotonic()))
        result.seconds = time.monotonic() - begin
        result.trained_per_second = testbed.ledger.rate(time.monotonic())
        await _recover(testbed, training, trained)
        result.trained_after = testbed.ledger.count(TRAINED) - trained
        result.crashed = _why_ended(training)
    finally:
        for task in (watching, striking, training):
            task.cancel()
        stopping = time.monotonic()
        _, stuck = await asyncio.wait({watching, striking, training}, timeout=_STOP_SECONDS)
        result.stop_seconds = time.monotonic() - stopping
        result.crashed = result.crashed or ", ".join(f"{t.get_name()} did not end when cancelled" for t in stuck)
    if striking.done() and not striking.cancelled() and (error := striking.exception()):
        raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error  # a server did not start again
    _conclude(testbed, injections, result)
    return result


async def _recover(testbed: Testbed, training: asyncio.Task[None], trained: int) -> None:
    """Wait until more trajectories are trained: servers that were lost often are retried only after a while."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    while testbed.ledger.count(TRAINED) <= trained and not training.done() and time.monotonic() < deadline:
        await asyncio.wait({training}, timeout=0.2)


async def _strike(injections: Sequence[Injection], plan: ChaosPlan) -> None:
    seconds, rarer = plan.seconds - CALM_SECONDS, _RARER if plan.soak else 1.0
    async with asyncio.TaskGroup() as group:
        for injection in injections:
            group.create_task(injection.run(plan.seed, seconds, rarer=rarer), name=injection.name)
        group.create_task(asyncio.sleep(seconds), name="until the calm")


async def _watch(
    testbed: Testbed, injections: Sequence[Injection], result: ChaosResult | None, say: Callable[[str], None]
) -> None:
    """Report progress at intervals, and add resource usage to ``result``, if given."""
    begin = time.monotonic()
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        if result is not None:
            result.usage.append(ResourceUsage.now())
        struck = ", ".join(f"{injection.name} {injection.strikes}" for injection in injections if injection.strikes)
        done = f"step {testbed.ledger.steps}, {testbed.ledger.count(TRAINED)} trained"
        say(f"  {time.monotonic() - begin:4.0f} s: {done}; {struck or 'no faults'}")


def _conclude(testbed: Testbed, injections: Sequence[Injection], result: ChaosResult) -> None:
    proxies = (*testbed.victims.engine_proxies, testbed.victims.tool_proxy)
    attempts: Counter[str] = sum((proxy.attempts for proxy in testbed.victims.engine_proxies), Counter())
    tool_attempts = testbed.victims.tool_proxy.attempts
    result.servers_lost = testbed.trainer.runtime.client.stats().servers_lost
    result.findings, result.complaints = testbed.ledger.summary(), testbed.ledger.complaints
    result.faults = {injection.name: injection.strikes for injection in injections}
    result.network = {str(fault): n for fault, n in sorted(sum((proxy.hits for proxy in proxies), Counter()).items())}
    result.most_attempts = max(attempts.values(), default=0)
    result.most_tool_attempts = max(tool_attempts.values(), default=0)
    result.mean_attempts = attempts.total() / max(1, len(attempts))


def _why_ended(training: asyncio.Task[None]) -> str:
    if not training.done():
        return ""
    error = None if training.cancelled() else training.exception()
    return f"{type(error).__name__}: {error}" if error else "the trainer ended by itself"
