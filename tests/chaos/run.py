"""``python -m tests.chaos``: the testbed without and with faults, and which invariants held.

::

    start ─► trainer runs ................................... cancelled ─► close ─► find leaks
                  │ faults strike ........ repaired │ calm .....│
                  0                seconds - CALM_SECONDS    seconds, or later: until something
                                                             is trained after the last fault
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
from tests.chaos.faults import FAULTS, Injection, all_injections
from tests.chaos.invariants import TRAINED
from tests.chaos.leaks import Leaks, ResourceUsage, find_leaks, growth
from tests.chaos.proxy import Fault
from tests.chaos.testbed import TOOL_RETRIES, Testbed, open_testbed

CALM_SECONDS = 5.0
_STOP_SECONDS = 30.0
_REPORT_SECONDS = 5.0
_RARER = 3.0
"""Factor on the time between faults in a soak, which measures what accumulates."""
_RECOVERY_SECONDS = 90.0
"""How long to wait after the end for something to be trained.

Servers that were lost often are retried only after a while.
"""
UNDISTURBED_SHARE = 0.25
"""Share of the time for the undisturbed run: enough to measure throughput."""
MAX_ATTEMPTS = 20
"""Attempts at one rollout request: each fault costs one, so more indicates a retry loop."""
MAX_RSS_GROWTH = 0.05
_MAX_BASELINE_SECONDS = 60.0
_MIN_SECONDS = 2 * CALM_SECONDS


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """The result of a run.

    Attributes:
        seconds: its duration.
        trained_per_second: trajectories trained per second after the first step.
        stop_seconds: time from its cancellation until everything had stopped.
        findings: :meth:`Ledger.summary`.
        complaints: descriptions of failures.
        faults: numbers of strikes, by fault.
        requests_spoilt: numbers of requests hit by network faults, by fault.
        servers_lost: number of times the client lost a server.
        max_attempts: how often the most repeated rollout request was sent.
        max_tool_attempts: how often the most repeated tool call was sent.
        mean_attempts: how often a rollout request was sent on average.
        trained_after: number of trajectories trained after the last fault was repaired.
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
        soak: whether to measure resource usage, with rarer faults.
        print_line: reports progress.

    Raises:
        LaunchError: a server does not start.
    """
    mark = secrets.token_hex(8)
    tasks_before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        async with open_testbed(Path(scratch), seed=seed, mark=mark) as testbed:
            result = await _run(testbed, seconds, seed, faults, soak, print_line)
        leaks = await find_leaks(
            mark=mark, ports=testbed.ports, folder=testbed.temporary, tasks_before=tasks_before
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
    ledger = testbed.ledger
    usage: list[ResourceUsage] = []
    injections = []
    for injection in all_injections(testbed.engines, testbed.tools, testbed.proxies):
        if injection.name in faults:
            injections.append(injection)
    rarer = _RARER if soak else 1.0

    training = asyncio.create_task(testbed.trainer.run(), name="trainer")
    watch = asyncio.create_task(_watch(testbed, injections, usage, print_line), name="watch")
    strikes = asyncio.create_task(
        _strike(injections, seed, seconds - CALM_SECONDS, rarer=rarer), name="faults"
    )
    start = time.monotonic()
    crashed = ""
    try:
        await asyncio.wait({training, strikes}, return_when=asyncio.FIRST_COMPLETED)
        trained_under_faults = ledger.count(TRAINED)
        await asyncio.wait({training}, timeout=max(0.0, start + seconds - time.monotonic()))
        end = time.monotonic()
        trained_per_second = ledger.rate(end)

        # Something has to be trained after the last fault.
        while (
            ledger.count(TRAINED) <= trained_under_faults
            and not training.done()
            and time.monotonic() < end + _RECOVERY_SECONDS
        ):
            await asyncio.wait({training}, timeout=0.2)
        trained_after = ledger.count(TRAINED) - trained_under_faults
        if training.done():
            crashed = _describe_end(training)
    finally:
        tasks = {watch, strikes, training}
        for task in (watch, strikes, training):
            task.cancel()
        cancelled = time.monotonic()
        _, stuck = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        stop_seconds = time.monotonic() - cancelled

    if strikes.done() and not strikes.cancelled():
        error = strikes.exception()
        if isinstance(error, ExceptionGroup):  # a server did not start again
            raise error.exceptions[0]
        if error is not None:
            raise error
    if not crashed:
        crashed = ", ".join(f"{task.get_name()} did not end when cancelled" for task in stuck)

    attempts: Counter[str] = Counter()
    for proxy in testbed.engine_proxies:
        attempts.update(proxy.attempts)
    hits: Counter[Fault] = Counter()
    for proxy in testbed.proxies:
        hits.update(proxy.hits)
    return ChaosResult(
        seconds=end - start,
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
        crashed=crashed,
        usage=usage if soak else (),
    )


def _describe_end(training: asyncio.Task[Any]) -> str:
    """Describe why a trainer ended, which should run until it is cancelled."""
    error = None
    if not training.cancelled():
        error = training.exception()
    if error is None:
        return "the trainer ended by itself"
    return f"{type(error).__name__}: {error}"


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
    start = time.monotonic()
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        usage.append(ResourceUsage.now())

        strikes = []
        for injection in injections:
            if injection.strikes:
                strikes.append(f"{injection.name} {injection.strikes}")
        strikes_text = ", ".join(strikes) or "no faults"
        progress = f"step {testbed.ledger.steps}, {testbed.ledger.count(TRAINED)} trained"
        print_line(f"  {time.monotonic() - start:4.0f} s: {progress}; {strikes_text}")


def run_command(
    seconds: float, seed: int, only: Sequence[str], *, soak: bool, console: Console
) -> dict[str, Any]:
    """Run both schedules, print progress and failures, and return the results.

    Args:
        seconds: duration of both runs together.
        seed: seeds faults, rows and sampling.
        only: names of the faults that strike; empty for all.
        soak: whether to measure memory, descriptors and tasks; faults are three times rarer then.
        console: where progress is printed.

    Returns:
        Numbers of both runs, ready for JSON; ``failures`` lists the invariants that did not hold.

    Raises:
        asyncio.CancelledError: SIGTERM arrived; everything was closed.
        ConfigError: unknown fault, or too little time.
    """
    unknown = sorted(set(only) - FAULTS.keys())
    if unknown:
        raise ConfigError(
            f"--only {unknown}: there is no such fault; there are {', '.join(FAULTS)}"
        )
    if seconds * (1 - UNDISTURBED_SHARE) < _MIN_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} leaves no time for faults; give at least 20")
    return asyncio.run(_both(seconds, seed, only or list(FAULTS), soak, console))


async def _both(
    seconds: float, seed: int, faults: Sequence[str], soak: bool, console: Console
) -> dict[str, Any]:
    # On SIGTERM the servers are stopped: they must not outlive this process.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    print_line = functools.partial(console.print, highlight=False, soft_wrap=True)
    print_line(f"undisturbed, seed {seed}")
    baseline_seconds = min(_MAX_BASELINE_SECONDS, seconds * UNDISTURBED_SHARE)
    baseline = await run_chaos(baseline_seconds, seed, (), soak=False, print_line=print_line)
    print_line(f"with faults: {', '.join(faults)}")
    faulty = await run_chaos(
        seconds - baseline.seconds, seed, faults, soak=soak, print_line=print_line
    )

    all_failures = [f"undisturbed: {failure}" for failure in failures(baseline)]
    all_failures += failures(faulty)
    throughput_share = faulty.trained_per_second / max(1e-9, baseline.trained_per_second)
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
        "throughput_share": round(throughput_share, 3),
        "stop_seconds": round(faulty.stop_seconds, 2),
        "trained_after_last_fault": faulty.trained_after,
        "failures": all_failures,
    }
    if soak:
        report["soak"] = growth(faulty.usage)

    for text in (*baseline.complaints, *faulty.complaints, *all_failures):
        print_line(text)
    if not all_failures:
        print_line(
            f"all held: {faulty.trained_per_second:.1f} trajectories a second were trained under"
            " faults"
        )
    return report


def failures(result: ChaosResult) -> list[str]:
    """Describe every invariant that did not hold."""
    messages = []
    for name in ("lost", "duplicated", "inexact", "stale_served", "unbalanced_steps"):
        count = result.findings[name]
        if count:
            messages.append(f"{name} is {count}, must be 0")

    for kind, names in asdict(result.leaks).items():
        if names:
            messages.append(f"left behind: {kind} {names}")

    if result.crashed:
        messages.append(f"the run ended early: {result.crashed}")
    elif not result.trained_after:
        messages.append("nothing was trained after the last fault")

    if result.max_attempts > MAX_ATTEMPTS:
        messages.append(f"a request was sent {result.max_attempts} times, more than {MAX_ATTEMPTS}")
    if result.max_tool_attempts > 1 + TOOL_RETRIES:
        messages.append(
            f"a tool call was sent {result.max_tool_attempts} times, may be repeated {TOOL_RETRIES}"
            " times"
        )

    resource_growth = growth(result.usage)
    if resource_growth:
        for kind in ("descriptors", "tasks"):
            first, last = resource_growth[kind]
            if last > 1.1 * first + 5:
                messages.append(f"{kind} grew from {first:g} to {last:g}")
        rss_growth = resource_growth["rss_growth"]
        if rss_growth > MAX_RSS_GROWTH:
            messages.append(
                f"memory grew by {rss_growth:.1%}, from {resource_growth['rss_mib']} MiB"
            )
    return messages
