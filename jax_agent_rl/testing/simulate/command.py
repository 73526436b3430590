"""``jax-agent-rl simulate``: compare trainers for a recipe under given assumptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jax_agent_rl.config import load
from jax_agent_rl.observe.progress import duration
from jax_agent_rl.testing.simulate.run import POLICIES, SimulationResult, simulate
from jax_agent_rl.testing.simulate.workload import load_assumptions

ASSUME = "assume."
COLUMNS = {
    "trainer": "trainer.mode, trainer.max_staleness, trainer.stragglers",
    "traj/s": "trajectories trained on in a second",
    "×": "that, over the first line's",
    "ideal": "that, over the rate of engines or learner, whoever is slower, if they never waited",
    "engines": "share of the time in which an engine decodes",
    "slots": "share of what the engines could sample with all slots full",
    "learner": "share of the time in which the learner computes",
    "step": "time from one optimizer step to the next",
    "stale": "how many versions old the tokens are, on average/at most",
    "lost": "trajectories given up, of all that ended",
}


def run_command(
    recipe: Path, overrides: Sequence[str], assume: Path | None, *, as_json: bool, console: Console
) -> list[SimulationResult]:
    """Simulate every policy and print the comparison.

    Args:
        recipe: configuration file of a run.
        overrides: overrides of the configuration and, prefixed with ``assume.``, of the assumptions.
        assume: file of assumptions, if any.
        as_json: print one JSON object as the last line.
        console: where the comparison is printed.

    Raises:
        ConfigError: a file or an override is invalid.
    """
    config = load(recipe, [item for item in overrides if not item.startswith(ASSUME)])
    assumptions = load_assumptions(assume, [item.removeprefix(ASSUME) for item in overrides if item.startswith(ASSUME)])
    rollout = config.rollout
    console.print(
        f"{rollout.prompts_per_step} x {rollout.group_size} trajectories a step, {assumptions.engines.count} engines "
        f"of {assumptions.engines.slots} slots; {assumptions.steps} steps of each trainer",
        highlight=False,
    )
    outcomes = []
    for policy in POLICIES:
        console.print(f"  {policy.name}", highlight=False)
        outcomes.append(simulate(config, assumptions, policy))
    console.print(table(outcomes))
    for name, meaning in COLUMNS.items():
        console.print(f"  [bold]{name}[/bold]: {meaning}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"assumptions": assumptions.model_dump(), "outcomes": [asdict(o) for o in outcomes]}))
    return outcomes


def table(outcomes: Sequence[SimulationResult]) -> Table:
    """Tabulate each policy's throughput, utilization, staleness and losses."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in COLUMNS:
        made.add_column(heading, justify="left" if heading == "trainer" else "right", no_wrap=True)
    for outcome in outcomes:
        made.add_row(
            outcome.policy,
            f"{outcome.samples_per_second:.2f}",
            f"{outcome.samples_per_second / outcomes[0].samples_per_second:.2f}",
            f"{outcome.share_of_ideal:.0%}",
            f"{outcome.engines_busy:.0%}",
            f"{outcome.slots_used:.0%}",
            f"{outcome.learner_busy:.0%}",
            duration(outcome.step_seconds),
            f"{outcome.staleness_mean:.1f}/{outcome.staleness_max}",
            f"{outcome.dropped:.1%}",
        )
    return made
