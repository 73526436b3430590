"""Gain of routing a group's members to the engine that computed their prompt, in virtual time
without an engine.

    python benchmarks/prefix_routing.py [--servers 8] [--prompt 4096]

Groups of 8 with a common prompt, 16 requests per server in flight, log-normal response lengths; the
real client and balancer over simulated engines, which share prefixes in both runs. In one run the
engines declare it, in the other the client routes by load alone. The last line is one JSON object:
``prefill_ratio``, prompt ids computed with prefix routing over those without, and ``speedup``, of
the time to the last response.
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

GROUP, GROUPS, PER_SERVER = 8, 400, 16
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

    async def work(members: Iterator[tuple[int, int]]) -> None:
        for group, member in members:
            sampling = SamplingParams(max_tokens=round(LENGTHS.at(group, member)))
            await client.generate(
                f"{group}-{member}", prompt_ids=[group] * prompt, sampling_params=sampling
            )

    members = ((group, member) for group in range(1, GROUPS + 1) for member in range(GROUP))
    await asyncio.gather(*(work(members) for _ in range(servers * PER_SERVER)))
    prefilled = [(await engine.metrics()).prefill_tokens for engine in engines]
    return sum(prefilled), asyncio.get_running_loop().time()


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
        computed, seconds = results[routed]
        print(
            f"{'by prefix' if routed else 'by load  '}: {computed:>10} prompt ids computed,"
            f" {seconds:8.1f} s"
        )
    (without, slow), (with_routing, fast) = results[False], results[True]
    print(
        json.dumps(
            {"prefill_ratio": round(with_routing / without, 3), "speedup": round(slow / fast, 3)}
        )
    )


if __name__ == "__main__":
    main()
