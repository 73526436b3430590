"""``jax-agent-rl chaos``: the testbed without and with faults, what it leaves behind, and which invariants held.

::

    start ─► trainer runs ......................................... cancelled ─► close ─► find leaks
                  │ faults strike ...... repaired │ calm ... until more are trained, at least until seconds are over
                  0                       seconds - CALM
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.chaos.faults import FAULTS, Injection, all_injections
from jax_agent_rl.testing.chaos.ledger import TRAINED
from jax_agent_rl.testing.chaos.testbed import TOOL_RETRIES, Testbed, open_testbed
from jax_agent_rl.testing.leaks import Leaks, ResourceUsage, find_leaks, growth

CALM_SECONDS = 5.0
_STOP_SECONDS = 30.0
_REPORT_SECONDS = 5.0
_RARER = 3.0
"""Factor on the time between faults in a soak, which measures what accumulates."""
_RECOVERY_SECONDS = 90.0
UNDISTURBED_SHARE = 0.25
"""Share of the time for the undisturbed run: enough to measure throughput."""
MAX_ATTEMPTS = 20
"""Attempts at one rollout request: each fault that hits it costs one, so more indicates a retry
loop."""
MAX_RSS_GROWTH = 0.05
_MAX_BASELINE_SECONDS = 60.0
_MIN_SECONDS = 2 * CALM_SECONDS


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """The result of a run.

    Attributes:
        seconds: its duration.
        trained_per_second: trajectories per second after the first step.
        stop_seconds: time from its cancellation until everything had stopped.
        findings: :meth:`Ledger.summary`.
        complaints: descriptions of failures.
        faults: strikes by fault.
        requests_spoilt: requests hit by network faults, by fault.
        servers_lost: number of times the client lost a server.
        max_attempts: times that the most repeated rollout request was sent.
        max_tool_attempts: times that the most repeated tool call was sent.
        mean_attempts: mean times that a rollout request was sent.
        trained_after: trajectories trained after the last fault was repaired.
        crashed: why the trainer ended early; empty if it did not.
        usage: resource usage at intervals of a soak.
        leaks: what was left after everything was closed.
    """

    seconds: float
    trained_per_second: float
    stop_seconds: float
    findings: Mapping[str, Any]
    complaints: Sequence[str]
    faults: Mapping[str, int]
    requests_spoilt: Mapping[str, int]
    servers_lost: int
    max_attempts: int
    max_tool_attempts: int
    mean_attempts: float
    trained_after: int
    crashed: str
    usage: Sequence[ResourceUsage]
    leaks: Leaks = Leaks()


async def run_chaos(
    seconds: float,
    seed: int,
    faults: Collection[str],
    *,
    soak: bool,
    print_line: Callable[[str], None],
) -> ChaosResult:
    """Start a testbed, run the schedule, close it and look for leaks.

    Args:
        seconds: duration; extended only if nothing was trained after the last fault.
        seed: seeds everything.
        faults: names of the faults that strike; empty for an undisturbed run.
        soak: measure resource usage, with rarer faults.
        print_line: reports progress.

    Raises:
        LaunchError: a server does not start.
    """
    mark, before = secrets.token_hex(8), asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        async with open_testbed(Path(name), seed=seed, mark=mark) as testbed:
            result = await _run(testbed, seconds, seed, faults, soak, print_line)
        leaks = await find_leaks(
            mark=mark, ports=testbed.ports, folder=testbed.temporary, tasks_before=before
        )
    return replace(result, leaks=leaks)


async def _run(
    testbed: Testbed,
    seconds: float,
    seed: int,
    faults: Collection[str],
    soak: bool,
    print_line: Callable[[str], None],
) -> ChaosResult:
    ledger, usage, crashed = testbed.ledger, [], ""
    injections = [
        i
        for i in all_injections(testbed.engines, testbed.tools, testbed.proxies)
        if i.name in faults
    ]
    training = asyncio.create_task(testbed.trainer.run(), name="trainer")
    watching = asyncio.create_task(_watch(testbed, injections, usage, print_line), name="watch")
    strikes = _strike(injections, seed, seconds - CALM_SECONDS, rarer=_RARER if soak else 1.0)
    striking = asyncio.create_task(strikes, name="faults")
    begin = time.monotonic()
    try:
        await asyncio.wait({training, striking}, return_when=asyncio.FIRST_COMPLETED)
        trained = ledger.count(TRAINED)
        await asyncio.wait({training}, timeout=max(0.0, begin + seconds - time.monotonic()))
        seconds, trained_per_second = time.monotonic() - begin, ledger.rate(time.monotonic())
        deadline = (
            time.monotonic() + _RECOVERY_SECONDS
        )  # servers that were lost often are retried only after a while
        while (
            ledger.count(TRAINED) <= trained and not training.done() and time.monotonic() < deadline
        ):
            await asyncio.wait({training}, timeout=0.2)
        trained_after = ledger.count(TRAINED) - trained
        if training.done():
            error = None if training.cancelled() else training.exception()
            crashed = f"{type(error).__name__}: {error}" if error else "the trainer ended by itself"
    finally:
        for task in (watching, striking, training):
            task.cancel()
        stopping = time.monotonic()
        _, stuck = await asyncio.wait({watching, striking, training}, timeout=_STOP_SECONDS)
        stop_seconds = time.monotonic() - stopping
    if striking.done() and not striking.cancelled() and (error := striking.exception()):
        raise (
            error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        )  # a server did not start again
    attempts: Counter[str] = sum((proxy.attempts for proxy in testbed.engine_proxies), Counter())
    hits = sum((proxy.hits for proxy in testbed.proxies), Counter())
    return ChaosResult(
        seconds=seconds,
        trained_per_second=trained_per_second,
        stop_seconds=stop_seconds,
        findings=ledger.summary(),
        complaints=ledger.complaints,
        faults={injection.name: injection.strikes for injection in injections},
        requests_spoilt={str(fault): count for fault, count in sorted(hits.items())},
        servers_lost=testbed.trainer.runtime.client.stats().servers_lost,
        max_attempts=max(attempts.values(), default=0),
        max_tool_attempts=max(testbed.tool_proxy.attempts.values(), default=0),
        mean_attempts=attempts.total() / max(1, len(attempts)),
        trained_after=trained_after,
        crashed=crashed
        or ", ".join(f"{task.get_name()} did not end when cancelled" for task in stuck),
        usage=usage if soak else (),
    )


async def _strike(
    injections: Sequence[Injection], seed: int, seconds: float, *, rarer: float
) -> None:
    async with asyncio.TaskGroup() as group:
        for injection in injections:
            group.create_task(injection.run(seed, seconds, rarer=rarer), name=injection.name)
        group.create_task(asyncio.sleep(seconds), name="until the calm")


async def _watch(
    testbed: Testbed,
    injections: Sequence[Injection],
    usage: list[ResourceUsage],
    print_line: Callable[[str], None],
) -> None:
    """Report progress and add the resource usage to ``usage`` at intervals."""
    begin = time.monotonic()
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        usage.append(ResourceUsage.now())
        struck = ", ".join(
            f"{injection.name} {injection.strikes}" for injection in injections if injection.strikes
        )
        done = f"step {testbed.ledger.steps}, {testbed.ledger.count(TRAINED)} trained"
        print_line(f"  {time.monotonic() - begin:4.0f} s: {done}; {struck or 'no faults'}")


def run_command(
    seconds: float, seed: int, only: Sequence[str], *, soak: bool, console: Console
) -> dict[str, Any]:
    """Run both schedules, print progress and failures, and return the results.

    Args:
        seconds: duration of both runs together.
        seed: seeds faults, rows and sampling.
        only: names of the faults that strike; empty for all.
        soak: also measure memory, descriptors and tasks; faults are three times rarer.
        console: where progress is printed.

    Returns:
        Numbers of both, ready for JSON; ``failures`` lists the invariants that did not hold.

    Raises:
        asyncio.CancelledError: SIGTERM arrived; everything was closed.
        ConfigError: unknown fault, or too little time.
    """
    if unknown := sorted(set(only) - FAULTS.keys()):
        raise ConfigError(
            f"--only {unknown}: there is no such fault; there are {', '.join(FAULTS)}"
        )
    if seconds * (1 - UNDISTURBED_SHARE) < _MIN_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} leaves no time for faults; give at least 20")
    return asyncio.run(_both(seconds, seed, only or list(FAULTS), soak, console))


async def _both(
    seconds: float, seed: int, faults: Sequence[str], soak: bool, console: Console
) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, task.cancel
    )  # its servers must not outlive it

    print_line = functools.partial(console.print, highlight=False, soft_wrap=True)
    print_line(f"undisturbed, seed {seed}")
    undisturbed = min(_MAX_BASELINE_SECONDS, seconds * UNDISTURBED_SHARE)
    baseline = await run_chaos(undisturbed, seed, (), soak=False, print_line=print_line)
    print_line(f"with faults: {', '.join(faults)}")
    faulty = await run_chaos(
        seconds - baseline.seconds, seed, faults, soak=soak, print_line=print_line
    )
    broken = [*(f"undisturbed: {what}" for what in failures(baseline)), *failures(faulty)]
    report = {
        "seed": seed,
        **faulty.findings,
        "orphans": faulty.leaks.count + baseline.leaks.count,
        "faults": faulty.faults,
        "requests_spoilt": faulty.requests_spoilt,
        "servers_lost": faulty.servers_lost,
        "max_attempts": faulty.max_attempts,
        "max_tool_attempts": faulty.max_tool_attempts,
        "mean_attempts": round(faulty.mean_attempts, 3),
        "trained_per_second": round(faulty.trained_per_second, 2),
        "undisturbed_per_second": round(baseline.trained_per_second, 2),
        "throughput_share": round(
            faulty.trained_per_second / max(1e-9, baseline.trained_per_second), 3
        ),
        "stop_seconds": round(faulty.stop_seconds, 2),
        "trained_after_last_fault": faulty.trained_after,
        "failures": broken,
    }
    if soak:
        report["soak"] = growth(faulty.usage)
    for text in (*baseline.complaints, *faulty.complaints, *broken):
        print_line(text)
    if not broken:
        print_line(
            f"all held: {faulty.trained_per_second:.1f} trajectories a second were trained under"
            " faults"
        )
    return report


def failures(result: ChaosResult) -> list[str]:
    """Describe every invariant that did not hold."""
    findings = result.findings
    broken = [
        f"{name} is {findings[name]}, must be 0"
        for name in ("lost", "duplicated", "inexact", "stale_served", "unbalanced_steps")
        if findings[name]
    ]
    for what, names in asdict(result.leaks).items():
        if names:
            broken.append(f"left behind: {what} {names}")
    if result.crashed:
        broken.append(f"the run ended early: {result.crashed}")
    elif not result.trained_after:
        broken.append("nothing was trained after the last fault")
    if result.max_attempts > MAX_ATTEMPTS:
        broken.append(f"a request was sent {result.max_attempts} times, more than {MAX_ATTEMPTS}")
    if result.max_tool_attempts > 1 + TOOL_RETRIES:
        broken.append(
            f"a tool call was sent {result.max_tool_attempts} times, may be repeated {TOOL_RETRIES}"
            " times"
        )
    if grown := growth(result.usage):
        for what in ("descriptors", "tasks"):
            first, last = grown[what]
            if last > 1.1 * first + 5:
                broken.append(f"{what} grew from {first:g} to {last:g}")
        if grown["rss_growth"] > MAX_RSS_GROWTH:
            broken.append(f"memory grew by {grown['rss_growth']:.1%}, from {grown['rss_mib']} MiB")
    return broken
