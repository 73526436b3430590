"""Start and branches of sandboxed environments: cold or warm, replayed or forked.

    python benchmarks/sandboxes.py [--turns 16] [--command-seconds 0.8] [--setup-seconds 3]

The environment ``shell`` in its sandbox, without an engine. A start waits for the row's setup or
takes an instance that was prepared ahead. A branch after turn k runs its parent's k commands again
or begins with a snapshot of the working folder; both end with the same folder, which is checked.
Commands and setup wait for so many seconds, in place of compilers and tests, and write a file each.

The last line is one JSON object: ``cold_start_seconds`` and ``warm_start_seconds``, and by turn
``replay_seconds``, ``fork_seconds``, ``snapshot_seconds`` and ``snapshot_bytes``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.agents.command.shell import ShellEnvironment
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.environments import EnvironmentPools, LeasedEnvironment

START_TIMEOUT = 600.0


def command(number: int, seconds: float) -> Reply:
    """Return the reply of a turn: a command that takes its time and writes a file of 4 kB."""
    script = f"sleep {seconds}; head -c 4096 /dev/zero | tr '\\0' 'x' > file_{number}.txt; ls"
    return Reply(f"```bash\n{script}\n```")


async def measure_starts(kwargs: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds to a first observation, without and with an instance prepared ahead."""
    pools = EnvironmentPools(timeout=60.0, start_timeout=START_TIMEOUT, warm_instances=1)
    pool = pools.pool(ShellEnvironment.name)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        async with pool.lease(kwargs) as environment:
            await environment.reset(**kwargs)
            seconds.append(time.perf_counter() - began)
        await asyncio.sleep(2 * seconds[0])  # as other trajectories run, the next one starts
    await pools.close()
    cold_seconds, warm_seconds = seconds
    return cold_seconds, warm_seconds


async def replay(environment: LeasedEnvironment, turns: int, command_seconds: float) -> float:
    """Bring an instance into the state after so many turns by running them."""
    began = time.perf_counter()
    await environment.reset()
    for turn in range(turns):
        await environment.step(command(turn, command_seconds))
    return time.perf_counter() - began


async def fork(environment: LeasedEnvironment, snapshot: bytes) -> float:
    """Bring an instance into the state of a snapshot."""
    began = time.perf_counter()
    await environment.reset()
    await environment.restore(snapshot)
    return time.perf_counter() - began


async def measure_branches(turns: int, command_seconds: float) -> dict[str, dict[str, float]]:
    """Return the seconds of a replay and of a fork after 1, 2, 4 … turns."""
    pools = EnvironmentPools(timeout=60.0)
    pool = pools.pool(ShellEnvironment.name)
    measured: dict[str, dict[str, float]] = {}
    turn = 1
    while turn <= turns:
        async with pool.lease() as parent, pool.lease() as replayed, pool.lease() as forked:
            await replay(parent, turn, 0.0)
            began = time.perf_counter()
            snapshot = await parent.snapshot()
            snapshot_seconds = time.perf_counter() - began
            replay_seconds = await replay(replayed, turn, command_seconds)
            fork_seconds = await fork(forked, snapshot)
            if await forked.snapshot() != await replayed.snapshot():
                raise RuntimeError(f"after {turn} turns, fork and replay have other folders")
        measured[f"turn_{turn}"] = {
            "replay_seconds": round(replay_seconds, 3),
            "fork_seconds": round(fork_seconds, 4),
            "snapshot_seconds": round(snapshot_seconds, 4),
            "snapshot_bytes": len(snapshot),
        }
        print(
            f"turn {turn:3}: replay {replay_seconds:7.2f} s, fork {fork_seconds:7.4f} s,"
            f" snapshot {snapshot_seconds:7.4f} s of {len(snapshot)} bytes"
        )
        turn *= 2
    await pools.close()
    return measured


async def run(options: argparse.Namespace) -> dict[str, Any]:
    kwargs = {"setup": f"sleep {options.setup_seconds}; echo ready > ready.txt"}
    cold_seconds, warm_seconds = await measure_starts(kwargs)
    print(f"start: cold {cold_seconds:.2f} s, warm {warm_seconds:.4f} s")
    branches = await measure_branches(options.turns, options.command_seconds)
    return {
        "cold_start_seconds": round(cold_seconds, 3),
        "warm_start_seconds": round(warm_seconds, 4),
        **branches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--command-seconds", type=float, default=0.8)
    parser.add_argument("--setup-seconds", type=float, default=3.0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
