"""Gain of routing a group's members to the engine that computed their prompt.

    python benchmarks/prefix_routing.py [--servers 8] [--prompt 4096]

Everything runs in virtual time, without an engine. Groups of 8 with a common prompt, 16 requests
per server in flight, log-normal response lengths; the real client and balancer over simulated
engines, which share prefixes in both runs. In one run the engines declare it, in the other the
client routes by load alone. The last line is one JSON object: ``prefill_ratio``, prompt ids
computed with prefix routing over those without, and ``speedup``, of the time to the last response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import Draws, EngineSpeed, VirtualLoop
from jax_agent_rl.types import SamplingParams

GROUP = 8
GROUPS = 400
PER_SERVER = 16
SPEED = EngineSpeed(
    slots=PER_SERVER, step_seconds=0.01, slot_seconds=0.0002, prefill_tokens_per_step=128
)
LENGTHS = Draws(median=200, sigma=1.0, least=1, most=2000)


async def measure(servers: int, prompt: int, *, routed: bool) -> tuple[int, float]:
    """Return prompt ids computed, and virtual seconds."""
    engines = [SimulatedEngine(SPEED, max_model_len=prompt + 2000) for _ in range(servers)]
    for engine in engines:
        engine.capabilities = replace(engine.capabilities, prefix_reuse=routed)
    client = LLMServerClient(
        [AsyncServer(engine, name=f"engine-{i}") for i, engine in enumerate(engines)]
    )

    def all_members() -> Iterator[tuple[int, int]]:
        for group in range(1, GROUPS + 1):
            for member in range(GROUP):
                yield group, member

    async def work(members: Iterator[tuple[int, int]]) -> None:
        for group, member in members:
            sampling = SamplingParams(max_tokens=round(LENGTHS.at(group, member)))
            await client.generate(
                f"{group}-{member}", prompt_ids=[group] * prompt, sampling_params=sampling
            )

    # The workers share one iterator: each takes the next member when it is free.
    members = all_members()
    await asyncio.gather(*(work(members) for _ in range(servers * PER_SERVER)))

    computed_ids = 0
    for engine in engines:
        metrics = await engine.metrics()
        computed_ids += metrics.prefill_tokens
    return computed_ids, asyncio.get_running_loop().time()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4096)
    arguments = parser.parse_args()
    results = {}
    for routed in (False, True):
        with closing(VirtualLoop()) as loop:
            measuring = measure(arguments.servers, arguments.prompt, routed=routed)
            results[routed] = loop.run_until_complete(measuring)
        computed_ids, seconds = results[routed]
        name = "by prefix" if routed else "by load"
        print(f"{name:9}: {computed_ids:>10} prompt ids computed, {seconds:8.1f} s")

    load_ids, load_seconds = results[False]
    prefix_ids, prefix_seconds = results[True]
    figures = {
        "prefill_ratio": round(prefix_ids / load_ids, 3),
        "speedup": round(load_seconds / prefix_seconds, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
