"""Fit, time of a step and cost of a million trained tokens, for well-known models on TPU slices.

    python benchmarks/tpu_plans.py [--only 8b/v5p] [--price v5p=4.2 ...] [--set KEY=VALUE ...]

Plans ``configs/tpu_8b.yaml`` for other models and slices, as ``jax-agent-rl plan`` does: all
programs are compiled and their times predicted; no TPU is needed. A step has 64 trajectories per
chip, as that recipe on its slice. What does not fit with the changes of ``CASES`` and of ``--set``
is planned again with the changes that the plan advises, up to five times. Trained tokens are the
sampled ones; their cost includes the rollout. Prices are dollars per chip-hour, on demand, as
Google listed them for US regions; ``--price`` sets others. Extra: plan. A row takes minutes and is
printed when it is ready, in Markdown.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from common import argument_parser
from tpu_programs import RECIPE, Case

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.architectures import architecture_folder
from jax_agent_rl.deploy.plan.command import PlanTask, plan_in_subprocess
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import CompilerError, ConfigError

PRICES = {"v5e": 1.2, "v5p": 4.2, "v6e": 2.7}
MAX_CHANGES = 5
COLUMNS = (
    "model",
    "slice",
    "chips",
    "fullest chip",
    "step",
    "rollout",
    "learner",
    "trained tokens/s",
    "cost of 1M",
)
TRAJECTORIES = 64
"""Of a step, per chip."""
SAVE_MEMORY = "rollout.sleep_during_update=true learner.remat=full"
CASES = (  # with changes without which they would not fit
    (
        Case("qwen2.5-1.5b", "v5e:2x2", "tensor=1", "fsdp=4"),
        f"{SAVE_MEMORY} rollout.jetstream.kv_cache_tokens=131072",
    ),
    (Case("qwen2.5-1.5b", "v6e:2x2", "tensor=1", "fsdp=4"), ""),
    (
        Case("qwen3-8b", "v5e:4x8", "tensor=4", "fsdp=32"),
        f"{SAVE_MEMORY} rollout.jetstream.quantize=int8 rollout.jetstream.kv_cache_tokens=98304",
    ),
    (Case("qwen3-8b", "v5p:2x2x1", "tensor=4", "fsdp=4"), ""),
    (
        Case("qwen3-8b", "v6e:2x4", "tensor=4", "fsdp=8"),
        f"{SAVE_MEMORY} rollout.jetstream.kv_cache_tokens=262144",
    ),
    (
        Case("qwen3-32b", "v5p:2x2x4", "tensor=4", "fsdp=16"),
        "rollout.sleep_during_update=true rollout.jetstream.kv_cache_tokens=393216",
    ),
    (
        Case("llama-3.3-70b", "v5p:2x4x4", "tensor=4", "fsdp=32"),
        f"{SAVE_MEMORY} rollout.jetstream.quantize=int8 rollout.jetstream.kv_cache_tokens=196608",
    ),
    (Case("qwen3-30b-a3b", "v5p:2x2x4", "expert=4", "fsdp=8 expert=2"), ""),
    (Case("qwen3.5-9b", "v5p:2x2x1", "tensor=4", "fsdp=4"), ""),
    (
        Case("qwen3.5-9b", "v6e:2x4", "tensor=4", "fsdp=8"),
        f"{SAVE_MEMORY} rollout.jetstream.kv_cache_tokens=262144",
    ),
    (
        Case("qwen3.5-35b-a3b", "v5p:2x2x4", "expert=4", "fsdp=8 expert=2"),
        "rollout.sleep_during_update=true",
    ),
    (
        Case("gemma-4-31b", "v5p:2x2x4", "tensor=4", "fsdp=16"),
        f"{SAVE_MEMORY} rollout.jetstream.kv_cache_tokens=131072",
    ),
    (
        Case("glm-4.5-air", "v5p:4x4x8", "expert=4", "fsdp=32 expert=4"),
        f"{SAVE_MEMORY} rollout.jetstream.quantize=int8 rollout.jetstream.kv_cache_tokens=131072",
    ),
)


def scale_batch(case: Case) -> list[str]:
    """Return overrides that give each chip as many trajectories as the recipe does on its slice."""
    chips = Slice.parse(case.topology).chips
    group_size = load(RECIPE, case.overrides).rollout.group_size
    return [
        f"rollout.prompts_per_step={TRAJECTORIES * chips // group_size}",
        f"rollout.max_in_flight={TRAJECTORIES * chips}",
    ]


def make_plan(case: Case, price: float, changes: dict[str, str]) -> dict[str, Any]:
    """Return a plan as JSON (``jax_agent_rl.deploy.plan.report.as_json``).

    Raises:
        CompilerError: libtpu fails.
        ConfigError: the case, or a change, does not go with the slice.
    """
    with architecture_folder(case.model) as folder:
        task = PlanTask(
            recipe=str(RECIPE),
            overrides=[
                f"model.path={folder}",
                *case.overrides,
                *scale_batch(case),
                *as_words(changes),
            ],
            topology=case.topology,
            utilization=0.4,
            price=price,
            width=100,
            colours=False,
        )

        def print_progress(text: str) -> None:
            print(f"  {text}", file=sys.stderr, flush=True)

        return plan_in_subprocess(task, print_progress).json


def advised_changes(plan: dict[str, Any]) -> dict[str, str]:
    """Return the first changes that a plan advises.

    There are none if it fits or advises something else, such as a larger slice.
    """
    for program in plan["programs"]:
        if program["fits"]:
            continue
        for hint in program["change"]:
            words = hint.split()
            if all(re.fullmatch(r"[\w.]+=\S+", word) for word in words):
                return as_changes(words)
    return {}


def as_changes(words: Iterable[str]) -> dict[str, str]:
    """Return words ``key=value`` by key."""
    return dict(word.split("=", 1) for word in words)


def as_words(changes: dict[str, str]) -> list[str]:
    """Invert :func:`as_changes`."""
    return [f"{key}={value}" for key, value in changes.items()]


def row(plan: dict[str, Any]) -> list[str]:
    """Return a plan's cells, from the chips on."""
    chips = str(plan["chips"])
    fullest = max(program["total"] for program in plan["programs"])
    fit = f"{fullest / 2**30:.1f} of {plan['capacity'] / 2**30:.1f} GiB"
    if not plan["fits"]:
        return [chips, f"{fit}: does not fit", "-", "-", "-", "-", "-"]

    step = plan["step"]
    return [
        chips,
        fit,
        f"{step['seconds']:.0f} s",
        f"{step['rollout']:.0f} s",
        f"{step['learner']:.0f} s",
        f"{step['sampled'] / step['seconds']:,.0f}",
        f"{plan['cost_of_million_trained_tokens']:.2f}",
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of model/slice")
    parser.add_argument(
        "--price", nargs="*", default=[], metavar="GENERATION=PRICE", help="of a chip-hour"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of configs/tpu_8b.yaml"
    )
    args = parser.parse_args()

    prices = dict(PRICES)
    for generation, price in as_changes(args.price).items():
        prices[generation] = float(price)

    for cells in (COLUMNS, ["---"] * len(COLUMNS)):
        print(f"| {' | '.join(cells)} |", flush=True)
    for case, case_changes in CASES:
        if not any(part in f"{case.model}/{case.topology}" for part in args.only):
            continue

        generation, _, _ = case.topology.partition(":")
        price = prices[generation]
        changes = as_changes([*case_changes.split(), *args.set])
        try:
            plan = make_plan(case, price, changes)
            for _ in range(MAX_CHANGES):
                new_changes = advised_changes(plan)
                if not new_changes:
                    break
                changes |= new_changes
                plan = make_plan(case, price, changes)
            cells = row(plan)
        except (CompilerError, ConfigError) as error:
            cells = ["", textwrap.shorten(str(error), 200)]
        name = ", ".join([case.model, *(f"`{change}`" for change in as_words(changes))])
        print(f"| {' | '.join([name, case.topology, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
