r"""Asynchronous against synchronous trajectory rollout, with slow tools.

    python benchmarks/agent_modes.py [--trajectories 64] [--turns 1 3] [--repeats 4] \
        [--step-ms 10] [--latency 1.0]

``server_tool_agent`` in both values of ``rollout_mode``, on the JAX engine, with a tool server in a
separate process. Every turn but the last is sent to the tool server. Turn lengths (median 100 ids,
at most 1024), tool latencies (median ``--latency`` seconds, at most ten times that) and the
engine's pace are those of ``benchmarks/paced.py``; both modes do the same work. The result depends
on the workload: on the time of a tool call relative to the time of a turn.

``ideal`` is the time of the drawn lengths and latencies alone: the sum over phases of the slowest
member for synchronous rollout, the slowest trajectory for asynchronous rollout.

The last line is one JSON object: per number of turns the seconds of both modes over all repeats,
``speedup``, ``published`` (verl-tool's, 1.5B parameters on four H100, whose synchronous mode calls
tools one after the other; ours side by side), ``ideal_speedup`` and the share of the time in which
the engine decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence

import numpy as np
from common import running
from paced import (
    LENGTHS,
    PROMPT,
    Draws,
    LetterCodec,
    PacedBackend,
    TurnLengths,
    agent_settings,
    max_context_len,
    paced_parser,
    serve,
    tool_seconds,
    tool_server,
    turn_length,
)

from jax_agent_rl.agents import AgentContext, EpisodeRequest, ServerToolAgent, derive_seed
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.types import SamplingParams

PUBLISHED = {1: 1.69, 3: 2.06}


def latencies_of(median: float) -> Draws:
    """Return the latencies of tool calls with this median, in seconds."""
    return Draws(median=median, most=10 * median)


async def rollout(context: AgentContext, names: Sequence[str]) -> float:
    """Return the seconds that the trajectories of these names take."""
    agent = ServerToolAgent(context)
    row = {"prompt": PROMPT}

    async def run_trajectory(name: str) -> None:
        sampling = SamplingParams(
            max_tokens=int(LENGTHS.most), seed=derive_seed("trajectory", name)
        )
        request = EpisodeRequest(row=row, trajectory_id=name, group_id="g", sampling=sampling)
        trajectory = await agent.play(request)
        assert trajectory.num_turns == context.limits.max_turns + 1, trajectory.finish_reason

    start = time.perf_counter()
    await asyncio.gather(*map(run_trajectory, names))
    seconds = time.perf_counter() - start
    await agent.close()
    return seconds


def ideal_seconds(
    names: Sequence[str], turns: int, *, step_seconds: float, latencies: Draws
) -> dict[str, float]:
    """Return the seconds of each mode if only the drawn lengths and latencies cost anything."""
    lengths = np.zeros((len(names), turns + 1))
    waiting = np.zeros((len(names), turns))
    for row, name in enumerate(names):
        for turn in range(turns + 1):
            lengths[row, turn] = turn_length(LENGTHS, name, turn)
        for turn in range(turns):
            waiting[row, turn] = tool_seconds(latencies, name, turn)

    decoding = lengths * step_seconds
    return {
        "sync": float(decoding.max(axis=0).sum() + waiting.max(axis=0).sum()),
        "async": float((decoding.sum(axis=1) + waiting.sum(axis=1)).max()),
    }


async def compare(
    backend: PacedBackend, url: str, turns: int, arguments: argparse.Namespace
) -> dict[str, float | None]:
    """Measure both modes, in turns, on the same draws; new draws for each repeat."""
    # Sums over all repeats, by mode.
    seconds = {"async": 0.0, "sync": 0.0}
    ideal = {"async": 0.0, "sync": 0.0}
    busy = {"async": 0.0, "sync": 0.0}
    for repeat in range(arguments.repeats):
        names = [f"{repeat}-{number}" for number in range(arguments.trajectories)]
        latencies = latencies_of(arguments.latency)
        repeat_ideal = ideal_seconds(
            names, turns, step_seconds=arguments.step_ms / 1000, latencies=latencies
        )
        for mode in seconds:
            settings = agent_settings(url, LENGTHS, turns, rollout_mode=mode)
            context = AgentContext(
                client=TurnLengths([AsyncServer(backend)], lengths=LENGTHS),
                codec=LetterCodec(),
                limits=AgentConfig.model_validate(settings),
                max_model_len=backend.capabilities.max_model_len,
            )
            previous_metrics = await backend.metrics()
            repeat_seconds = await rollout(context, names)
            metrics = await backend.metrics()
            print(
                f"{turns} turn(s), {mode}: {repeat_seconds:.1f} s"
                f" (ideal {repeat_ideal[mode]:.1f} s)",
                flush=True,
            )
            seconds[mode] += repeat_seconds
            ideal[mode] += repeat_ideal[mode]
            busy[mode] += metrics.busy_seconds - previous_metrics.busy_seconds

    return {
        "async_seconds": round(seconds["async"], 1),
        "sync_seconds": round(seconds["sync"], 1),
        "speedup": round(seconds["sync"] / seconds["async"], 2),
        "published": PUBLISHED.get(turns),
        "ideal_speedup": round(ideal["sync"] / ideal["async"], 2),
        "async_over_ideal": round(seconds["async"] / ideal["async"], 3),
        "sync_over_ideal": round(seconds["sync"] / ideal["sync"], 3),
        "engine_busy_async": round(busy["async"] / seconds["async"], 2),
        "engine_busy_sync": round(busy["sync"] / seconds["sync"], 2),
    }


async def measure(arguments: argparse.Namespace, url: str) -> dict:
    backend = PacedBackend(
        slots=arguments.trajectories,
        max_model_len=max_context_len(LENGTHS, max(arguments.turns)),
        step_seconds=arguments.step_ms / 1000,
    )
    results = {}
    async with running(backend):
        for turns in arguments.turns:
            results[f"turns_{turns}"] = await compare(backend, url, turns, arguments)
    return results


def main() -> None:
    parser = paced_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="milliseconds of a decode step, at least"
    )
    parser.add_argument("--latency", type=float, default=1.0, help="median seconds of a tool call")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(latencies_of(arguments.latency))
        return
    use_compilation_cache()
    with tool_server("--latency", arguments.latency) as url:
        result = asyncio.run(measure(arguments, url))
    workload = {
        "trajectories": arguments.trajectories,
        "tool_latency_median_s": arguments.latency,
        "step_ms": arguments.step_ms,
    }
    print(json.dumps({**workload, **result}))


if __name__ == "__main__":
    main()
