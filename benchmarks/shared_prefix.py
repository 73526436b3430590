"""Prefix sharing in the learner against the same group without sharing, in one process.

    python benchmarks/shared_prefix.py [--groups 1]

SmolLM2-135M in float32; groups of 8 samples with 256 shared prompt tokens and 40 sampled tokens
each. Both sides are the project's learner: ``share_prefixes`` off, with a row per sample, and on,
with a group in one row. The last line is one JSON object: ``ratio`` of samples per second, and
``max_grad_diff``, the largest difference between the two gradients of the first update (read from
AdamW's first moment), relative to the largest gradient.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from common import (
    argument_parser,
    best_seconds,
    first_gradient,
    make_learner,
    make_trajectory,
    random_ids,
)

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.types import Group

SAMPLES = 8
SHARED = 256  # ids
OWN = 40
REPEATS = 4
SIDES = {
    "naive": {
        "share_prefixes": False,
        "pack_length": SHARED + OWN,
        "micro_batch_size": SAMPLES // 2,
    },
    "shared": {"share_prefixes": True, "pack_length": SHARED + SAMPLES * OWN},
}


def groups(count: int) -> list[Group]:
    """Make groups of random ids; half of each group's samples are rewarded."""
    prompts = random_ids(count, SHARED).tolist()
    completions = random_ids(count, SAMPLES, OWN, seed=1).tolist()
    result = []
    for number in range(count):
        name = str(number)
        members = []
        for i, ids in enumerate(completions[number]):
            members.append(make_trajectory(prompts[number], ids, group=name, index=i))
        result.append(Group(group_id=name, trajectories=tuple(members)))
    return result


def measure(side: dict[str, Any], batch: list[Group]) -> tuple[float, list[np.ndarray], float]:
    """Return seconds of one update, the first update's gradient, and tokens computed per update."""
    # Nothing moves, and nothing is clipped.
    learner = make_learner(**side, learning_rate=1e-9, max_grad_norm=1e9)
    computed_tokens = learner.update(batch).metrics["computed_tokens"]
    gradient = jax.tree.leaves(first_gradient(learner, LearnerConfig().adam_b1))
    seconds = best_seconds(lambda: learner.update(batch), REPEATS)
    return seconds, gradient, computed_tokens


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--groups", type=int, default=1, help="groups in one update")
    arguments = parser.parse_args()
    batch = groups(arguments.groups)
    samples = arguments.groups * SAMPLES
    seconds = {}
    gradients = {}
    for name, side in SIDES.items():
        seconds[name], gradients[name], computed_tokens = measure(side, batch)
        print(
            f"{name}: {samples / seconds[name]:.2f} samples/s,"
            f" {computed_tokens:.0f} tokens computed",
            flush=True,
        )

    largest_elements = []
    largest_differences = []
    for naive, shared in zip(gradients["naive"], gradients["shared"], strict=True):
        largest_elements.append(float(np.abs(naive).max()))
        largest_differences.append(float(np.abs(naive - shared).max()))
    result = {
        "ratio": round(seconds["naive"] / seconds["shared"], 2),
        "max_grad_diff": max(largest_differences) / max(largest_elements),
        "naive_samples_per_second": round(samples / seconds["naive"], 2),
        "shared_samples_per_second": round(samples / seconds["shared"], 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
