r"""Scaling of each trainer from 1 to 4,096 simulated engines: where more stop helping, and why.

    python benchmarks/scaling.py [--engines 1 4 16 64 256 1024 4096] [--trajectories 2048] \
        [--turns 3]

The batch stays the same while engines are added, and the learner grows with them: it could always
train on what they could sample. ``jax-agent-rl simulate`` runs the trainers, collector, buffer and
routing themselves; engines, tools and learner take the time that is assumed of them. Every engine
has 64 slots and decodes a step in 10 ms; turns have 200 tokens in the median and at most 2,048,
tools answer after a second in the median and at most 10; publishing weights takes 0.5 s and loading
them another 0.5 s.

``stops at`` is the number of engines from which four times as many give less than 1.5 times the
throughput, and ``limited by`` what a step waits for there: ``engines`` or ``learner`` if they work
at least 80 % of the time, else the ``longest trajectories``: neither has enough to do, since a step
lasts as long as the longest of its trajectories. In asynchronous modes ``max_staleness`` bounds how
many batches may be in flight, and so how many slots can be full. Each size takes minutes on a CPU;
the last line is one JSON object.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import argument_parser, cpu

from jax_agent_rl.config import load
from jax_agent_rl.testing.simulate.run import POLICIES, SimulationResult, simulate
from jax_agent_rl.testing.simulate.workload import load_assumptions

RECIPE = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
GROUP = 16
LEARNER_TOKENS_PER_SECOND = 10_000
"""Per engine: more than its 64 slots sample, prompts and tool results included."""
BUSY = 0.8
"""Share of its time from which an engine or a learner counts as busy."""
HELPS = 1.5
"""Speed-up by four times as many engines from which they count as a help."""


def limit(result: SimulationResult) -> str:
    """Return what a step waits for."""
    if result.slots_used >= BUSY:
        return "engines"
    if result.learner_busy >= BUSY:
        return "learner"
    return "longest trajectories"


def last_helpful_count(rates: dict[int, float]) -> int | None:
    """Return the number of engines from which the next larger one gives too little.

    Args:
        rates: trajectories per second by number of engines.

    Returns:
        None if even the largest number helps.
    """
    counts = sorted(rates)
    for count, next_count in zip(counts, counts[1:], strict=False):
        min_speedup = 1 + (HELPS - 1) * (next_count / count - 1) / 3  # 1.5 for four times as many
        if rates[next_count] < min_speedup * rates[count]:
            return count
    return None


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--trajectories", type=int, default=2048, help="of a step, in groups of 16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=3, help="measured, after those that fill the pipeline"
    )
    parser.add_argument(
        "--modes", nargs="+", default=["sync", "one_step_off", "fully_async 1", "fully_async 4"]
    )
    args = parser.parse_args()
    config = load(
        RECIPE,
        [
            f"rollout.prompts_per_step={args.trajectories // GROUP}",
            f"rollout.group_size={GROUP}",
            "rollout.max_in_flight=1000000",
        ],
    )
    figures: dict[str, Any] = {
        "cpu": cpu(),
        "trajectories": args.trajectories,
        "turns": args.turns,
    }
    for count in args.engines:
        figures[f"{count} engines"] = {}
    for mode in args.modes:
        results: dict[int, SimulationResult] = {}
        for count in args.engines:
            overrides = [
                f"engines.count={count}",
                f"learner.tokens_per_second={LEARNER_TOKENS_PER_SECOND * count}",
                f"agent.turns={args.turns}",
                f"steps={args.steps}",
            ]
            assumptions = load_assumptions(None, overrides)
            result = simulate(config, assumptions, mode, POLICIES[mode])
            results[count] = result
            rate = result.samples_per_second
            figures[f"{count} engines"][f"{mode}, trajectories/s"] = rate
            print(
                f"{mode}, {count} engines: {rate:.1f} trajectories/s,"
                f" a step {result.step_seconds:.1f} s, slots {result.slots_used:.0%},"
                f" learner {result.learner_busy:.0%}: {limit(result)}",
                flush=True,
            )

        rates = {count: result.samples_per_second for count, result in results.items()}
        stop = last_helpful_count(rates)
        result_at_stop = results[max(args.engines) if stop is None else stop]
        figures[mode] = {
            "stops at": "-" if stop is None else stop,
            "slots used": result_at_stop.slots_used,
            "learner busy": result_at_stop.learner_busy,
            "step seconds": result_at_stop.step_seconds,
            "limited by": limit(result_at_stop),
            "shortest step seconds": min(result.step_seconds for result in results.values()),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
