"""``jax-agent-rl chaos``: the same schedule without and with faults, and which invariants held."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.chaos.faults import NAMES
from jax_agent_rl.testing.chaos.run import CALM_SECONDS, ChaosPlan, ChaosResult, run_chaos
from jax_agent_rl.testing.chaos.testbed import TOOL_RETRIES
from jax_agent_rl.testing.leaks import growth

UNDISTURBED_SHARE = 0.25
"""Share of the time for the undisturbed run: enough to measure throughput."""
MAX_ATTEMPTS = 20
"""Most attempts at one rollout request: each fault that hits it costs one, so more indicates a retry loop."""
MAX_RSS_GROWTH = 0.05
_LONGEST_BASELINE = 60.0
_SHORTEST = 2 * CALM_SECONDS


def run_command(seconds: float, seed: int, only: Sequence[str], *, soak: bool, console: Console) -> bool:
    """Run both schedules and print progress, failures and, as the last line, one JSON object.

    Args:
        seconds: duration of both runs together.
        seed: seeds faults, rows and sampling.
        only: names of the faults that strike; empty for all.
        soak: also measure memory, descriptors and tasks; faults are three times rarer.
        console: where progress is printed.

    Returns:
        Whether all invariants held.

    Raises:
        asyncio.CancelledError: SIGTERM arrived; everything was closed.
        ConfigError: unknown fault, or too little time.
    """
    if unknown := sorted(set(only) - set(NAMES)):
        raise ConfigError(f"--only {unknown}: there is no such fault; there are {', '.join(NAMES)}")
    if seconds * (1 - UNDISTURBED_SHARE) < _SHORTEST:
        raise ConfigError(f"--seconds {seconds:g} leaves no time for faults; give at least 20")
    return asyncio.run(_both(seconds, seed, only or NAMES, soak, console))


async def _both(seconds: float, seed: int, faults: Sequence[str], soak: bool, console: Console) -> bool:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # its servers must not outlive it

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"undisturbed, seed {seed}")
    baseline = await run_chaos(ChaosPlan(seconds=min(_LONGEST_BASELINE, seconds * UNDISTURBED_SHARE), seed=seed), say)
    say(f"with faults: {', '.join(faults)}")
    faulty = await run_chaos(ChaosPlan(seconds=seconds - baseline.seconds, seed=seed, faults=faults, soak=soak), say)
    broken = [*(f"undisturbed: {what}" for what in failures(baseline)), *failures(faulty)]
    report = _report(seed, baseline, faulty) | {"failures": broken}
    if soak:
        report["soak"] = growth(faulty.usage)
    for text in (*baseline.complaints, *faulty.complaints, *broken):
        say(text)
    print(json.dumps(report))
    return not broken


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
    if result.most_attempts > MAX_ATTEMPTS:
        broken.append(f"a request was sent {result.most_attempts} times, more than {MAX_ATTEMPTS}")
    if result.most_tool_attempts > 1 + TOOL_RETRIES:
        broken.append(f"a tool call was sent {result.most_tool_attempts} times, may be repeated {TOOL_RETRIES} times")
    return broken + _growing(result)


def _growing(result: ChaosResult) -> list[str]:
    grown = growth(result.usage)
    if not grown:
        return []
    broken = [f"{what} grew from {grown[what][0]:g} to {grown[what][1]:g}" for what in ("descriptors", "tasks")
              if grown[what][1] > 1.1 * grown[what][0] + 5]  # fmt: skip
    if grown["rss_growth"] > MAX_RSS_GROWTH:
        broken.append(f"memory grew by {grown['rss_growth']:.1%}, from {grown['rss_mib']} MiB")
    return broken


def _report(seed: int, baseline: ChaosResult, faulty: ChaosResult) -> dict[str, Any]:
    return {
        "seed": seed,
        **faulty.findings,
        "orphans": faulty.leaks.count + baseline.leaks.count,
        "faults": faulty.faults,
        "requests_spoilt": faulty.network,
        "servers_lost": faulty.servers_lost,
        "most_attempts": faulty.most_attempts,
        "most_tool_attempts": faulty.most_tool_attempts,
        "mean_attempts": round(faulty.mean_attempts, 3),
        "trained_per_second": round(faulty.trained_per_second, 2),
        "undisturbed_per_second": round(baseline.trained_per_second, 2),
        "throughput_share": round(faulty.trained_per_second / max(1e-9, baseline.trained_per_second), 3),
        "stop_seconds": round(faulty.stop_seconds, 2),
        "trained_after_last_fault": faulty.trained_after,
    }
