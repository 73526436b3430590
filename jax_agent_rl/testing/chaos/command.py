"""``jax-agent-rl chaos``: the same schedule without faults and with them, and what held."""

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
"""Of the time: enough to know the throughput."""
MAX_ATTEMPTS = 20
"""Sendings of one rollout request; each fault that hits it costs one, so more means that something sends in circles."""
MAX_RSS_GROWTH = 0.05
_LONGEST_CALM = 60.0
_SHORTEST = 2 * CALM_SECONDS


def run_command(seconds: float, seed: int, only: Sequence[str], *, soak: bool, console: Console) -> bool:
    """Runs, prints what happens, and one JSON object as the last line.

    Args:
        seconds: of both runs together.
        seed: of faults, rows and sampling.
        only: names of the faults that strike; none: all.
        soak: measure memory, descriptors and tasks, too; faults are three times rarer.

    Returns:
        Whether everything held.

    Raises:
        asyncio.CancelledError: SIGTERM; everything was closed.
        ConfigError: a fault there is not, or too little time.
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
    calm = await run_chaos(ChaosPlan(seconds=min(_LONGEST_CALM, seconds * UNDISTURBED_SHARE), seed=seed), say)
    say(f"with faults: {', '.join(faults)}")
    rough = await run_chaos(ChaosPlan(seconds=seconds - calm.seconds, seed=seed, faults=faults, soak=soak), say)
    broken = [*(f"undisturbed: {what}" for what in failures(calm)), *failures(rough)]
    report = _report(seed, calm, rough) | {"failures": broken}
    if soak:
        report["soak"] = growth(rough.footprints)
    for text in (*calm.complaints, *rough.complaints, *broken):
        say(text)
    print(json.dumps(report))
    return not broken


def failures(played: ChaosResult) -> list[str]:
    """Every invariant that did not hold, in words."""
    findings, left = played.findings, played.leftovers
    broken = [
        f"{name} is {findings[name]}, must be 0"
        for name in ("lost", "duplicated", "inexact", "stale_served", "unbalanced_steps")
        if findings[name]
    ]
    for what, names in asdict(left).items():
        if names:
            broken.append(f"left behind: {what} {names}")
    if played.crashed:
        broken.append(f"the run ended early: {played.crashed}")
    elif not played.trained_after:
        broken.append("nothing was trained after the last fault")
    if played.most_attempts > MAX_ATTEMPTS:
        broken.append(f"a request was sent {played.most_attempts} times, more than {MAX_ATTEMPTS}")
    if played.most_tool_attempts > 1 + TOOL_RETRIES:
        broken.append(f"a tool call was sent {played.most_tool_attempts} times, may be repeated {TOOL_RETRIES} times")
    return broken + _growing(played)


def _growing(played: ChaosResult) -> list[str]:
    grown = growth(played.footprints)
    if not grown:
        return []
    broken = [f"{what} grew from {grown[what][0]:g} to {grown[what][1]:g}" for what in ("descriptors", "tasks")
              if grown[what][1] > 1.1 * grown[what][0] + 5]  # fmt: skip
    if grown["rss_growth"] > MAX_RSS_GROWTH:
        broken.append(f"memory grew by {grown['rss_growth']:.1%}, from {grown['rss_mib']} MiB")
    return broken


def _report(seed: int, calm: ChaosResult, rough: ChaosResult) -> dict[str, Any]:
    return {
        "seed": seed,
        **rough.findings,
        "orphans": rough.leftovers.count + calm.leftovers.count,
        "faults": rough.faults,
        "requests_spoilt": rough.network,
        "servers_lost": rough.servers_lost,
        "most_attempts": rough.most_attempts,
        "most_tool_attempts": rough.most_tool_attempts,
        "mean_attempts": round(rough.mean_attempts, 3),
        "trained_per_second": round(rough.trained_per_second, 2),
        "undisturbed_per_second": round(calm.trained_per_second, 2),
        "throughput_share": round(rough.trained_per_second / max(1e-9, calm.trained_per_second), 3),
        "stop_seconds": round(rough.stop_seconds, 2),
        "trained_after_last_fault": rough.trained_after,
    }
