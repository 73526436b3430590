r"""Soak test of the tool server: many trajectories at once, some hostile, and nothing left behind.

    python benchmarks/tool_server.py [--seconds 600] [--trajectories 256] [--workers 2] \
        [--kill-every 0]

Every trajectory takes a few actions in a Python session or a shell; some exit, hang, flood, fork,
disconnect during an action or are never finished. At the end every environment must have been
closed exactly once (finished, aborted, idle, or lost with a worker that ``--kill-every`` killed),
no process may be left, and descriptors and memory of the server must be what they were after
warming up. Otherwise the problem is printed and the exit status is 1. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from jax_agent_rl.tool_server.server import ToolServer

PYTHON = "<python>{}</python>"
BASH = "<bash>{}</bash>"
ACTIONS = [  # with their weights
    (30, PYTHON.format("total = globals().get('total', 0) + 1\ntotal")),
    (20, BASH.format("echo $((count += 1))")),
    (10, PYTHON.format("import math\n[math.sqrt(n) for n in range(10)]")),
    (4, PYTHON.format("1 / 0")),
    (4, "no tool accepts this"),
    (2, PYTHON.format("import os; os._exit(1)")),
    (2, BASH.format("exit 1")),
    (2, BASH.format("sleep 600 & disown; echo started")),
    (1, PYTHON.format("import time; time.sleep(600)")),
    (1, PYTHON.format("while True: print('x' * 1000)")),
    (1, BASH.format("for i in $(seq 100); do sleep 600 & done 2>/dev/null")),
]


@dataclass(kw_only=True)
class Report:
    """The outcome of a soak test.

    Attributes:
        trajectories: how many were begun.
        actions: how many were sent.
        seconds: from the first trajectory to the end of the last one.
        errors: why trajectories ended early, by kind.
        environments: opened, closed, lost with a worker, and still open.
        processes_left: that belong to no worker.
        descriptors: the workers' open files, after the warm-up and in the end.
        memory_mb: the workers' memory, after the warm-up and in the end.
    """

    trajectories: int = 0
    actions: int = 0
    seconds: float = 0.0
    errors: Counter = field(default_factory=Counter)
    environments: dict[str, float] = field(default_factory=dict)
    processes_left: int = 0
    descriptors: tuple[int, int] = (0, 0)
    memory_mb: tuple[int, int] = (0, 0)

    @property
    def problems(self) -> list[str]:
        """Descriptions of what is wrong; empty if nothing is."""
        problems = []
        environments = self.environments
        if environments["opened"] != environments["closed"] + environments["lost"]:
            problems.append(f"environments were not closed exactly once: {environments}")
        if environments["open"] or self.processes_left:
            problems.append(
                f"{environments['open']} environments and {self.processes_left} processes are left"
            )
        descriptors_at_start, descriptors_at_end = self.descriptors
        if descriptors_at_end > descriptors_at_start:
            problems.append(
                f"open descriptors grew from {descriptors_at_start} to {descriptors_at_end}"
            )
        return problems


async def soak(
    *,
    seconds: float,
    trajectories: int,
    workers: int = 2,
    kill_every: float = 0.0,
    idle_seconds: float = 10.0,
    seed: int = 0,
) -> Report:
    """Run the soak test.

    Args:
        seconds: for how long trajectories are begun.
        trajectories: how many run at the same time.
        workers: processes of the server.
        kill_every: seconds between the deaths of workers; 0 kills none.
        idle_seconds: after which the server closes an environment that is left open.
        seed: of everything that is random.
    """
    settings = ToolServerSettings.model_validate(
        {
            "tools": ["stateful_python", "bash"],
            "port": 0,
            "workers": workers,
            "idle_seconds": idle_seconds,
            "limits": {"wall_seconds": 3.0, "memory_mb": 512, "processes": 32},
            "step_seconds": 300.0,
        }
    )
    report = Report()
    processes_at_start = set(process_tree(os.getpid()))
    async with ToolServer(settings) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            await _warm_up(session, workers)
            descriptors_at_start = _descriptors(server)
            memory_at_start = _memory_mb(server)

            start = time.monotonic()
            killing = None
            if kill_every:
                killing = asyncio.create_task(_kill(server, kill_every))
            clients = []
            for n in range(trajectories):
                rng = random.Random(seed * 100_003 + n)
                clients.append(_client(session, report, rng, start + seconds, f"c{n}"))
            await asyncio.gather(*clients)
            report.seconds = time.monotonic() - start
            if killing is not None:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

            await _wait_until_closed(session)
            report.environments = await _environments(session)
            expected_processes = processes_at_start | set(server.worker_pids)
            report.processes_left = len(set(process_tree(os.getpid())) - expected_processes)
            report.descriptors = (descriptors_at_start, _descriptors(server))
            report.memory_mb = (memory_at_start, _memory_mb(server))
    return report


async def _client(
    session: aiohttp.ClientSession, report: Report, rng: random.Random, until: float, name: str
) -> None:
    """Run one trajectory after another."""
    weights, actions = zip(*ACTIONS, strict=True)
    count = 0
    while time.monotonic() < until or count < 2:
        count += 1
        trajectory = f"{name}-{count}"
        report.trajectories += 1
        for _ in range(rng.randint(1, 5)):
            action = rng.choices(actions, weights)[0]
            max_seconds = None
            if rng.random() < 0.02:  # it disconnects
                max_seconds = rng.uniform(0, 1)
            answer = await _post(session, trajectory, action, seconds=max_seconds)
            report.actions += 1
            if answer is None:
                report.errors["disconnected"] += 1
                break
            if answer["dones"][0]:
                report.errors[answer["errors"][0]] += 1
                break
        if rng.random() < 0.95:  # the others are left to become idle
            await _post(session, trajectory, "", finish=True)


async def _post(
    session: aiohttp.ClientSession,
    trajectory: str,
    action: str,
    *,
    finish: bool = False,
    seconds: float | None = None,
) -> dict | None:
    """Return the answer; None when the client gave up after ``seconds``."""
    body = {"trajectory_ids": [trajectory], "actions": [action], "finish": [finish]}
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with session.post("/get_observation", json=body, timeout=timeout) as response:
            response.raise_for_status()
            return await response.json()
    except TimeoutError:
        return None


async def _warm_up(session: aiohttp.ClientSession, workers: int) -> None:
    """Run and finish both tools in every worker."""
    for n in range(8 * workers):
        for _, action in ACTIONS[:2]:
            await _post(session, f"warm-{n}", action)
        await _post(session, f"warm-{n}", "", finish=True)


async def _kill(server: ToolServer, every: float) -> None:
    """Kill one worker after another."""
    for turn in itertools.count():
        await asyncio.sleep(every)
        pid = server.worker_pids[turn % len(server.worker_pids)]
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


async def _wait_until_closed(session: aiohttp.ClientSession) -> None:
    """Wait until every environment is closed and every worker is back, for at most a minute."""
    for _ in range(600):
        async with session.get("/health") as response:
            if response.status == 200 and not (await response.json())["open_environments"]:
                return
        await asyncio.sleep(0.1)


async def _environments(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return how many environments the server opened, closed, lost and has open."""
    counts = dict.fromkeys(("opened", "closed", "lost"), 0.0)
    async with session.get("/metrics") as response:
        metrics = await response.text()
    for line in metrics.splitlines():
        for event in counts:
            if line.startswith(f"toolserver_environments_{event}_total"):
                _, _, value = line.rpartition(" ")
                counts[event] += float(value)

    async with session.get("/health") as response:
        health = await response.json()
    return counts | {"open": health["open_environments"]}


def _descriptors(server: ToolServer) -> int:
    """Count the workers' open descriptors.

    Sockets are left out: connections are kept alive, and vary in number.
    """
    count = 0
    for pid in server.worker_pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if not os.readlink(descriptor).startswith("socket:"):
                count += 1
    return count


def _memory_mb(server: ToolServer) -> int:
    """Return the workers' resident memory in MiB."""
    num_pages = 0
    for pid in server.worker_pids:
        _, resident, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        num_pages += int(resident)
    return num_pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--kill-every",
        type=float,
        default=0.0,
        help="seconds between deaths of workers; 0 is never",
    )
    options = parser.parse_args()
    report = asyncio.run(
        soak(
            seconds=options.seconds,
            trajectories=options.trajectories,
            workers=options.workers,
            kill_every=options.kill_every,
        )
    )
    rate = report.actions / report.seconds
    print(
        f"{report.trajectories} trajectories, {report.actions} actions in {report.seconds:.0f} s:"
        f" {rate:.1f} a second"
    )
    print(f"ended early: {dict(report.errors)}")
    print(f"environments: {report.environments}; processes left: {report.processes_left}")
    print(
        f"workers' descriptors {report.descriptors}, memory in MiB {report.memory_mb} (before,"
        " after)"
    )
    figures = {
        "trajectories": report.trajectories,
        "ended_early": sum(report.errors.values()),
        "actions_per_second": round(rate, 1),
        "processes_left": report.processes_left,
    }
    print(json.dumps(figures))
    if report.problems:
        sys.exit("FAILED: " + "; ".join(report.problems))


if __name__ == "__main__":
    main()
