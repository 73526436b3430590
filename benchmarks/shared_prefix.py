"""Prefix sharing in the learner against the same group without sharing, in one process.

    python benchmarks/shared_prefix.py [--groups 1]

SmolLM2-135M in float32; groups of 8 samples with 256 shared prompt tokens and 40 sampled tokens each. Both sides are
the project's learner: ``share_prefixes`` off, with a row per sample, and on, with a group in one row. The last line is
one JSON object: ``ratio`` of samples per second, and ``max_grad_diff``, the largest difference between the two
gradients of the first update (read from AdamW's first moment), relative to the largest gradient."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import numpy as np
import optax
from machine import best_seconds
from samples import sample

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.fetch import fetch_quickstart_model
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.runtime import use_compilation_cache
from jax_agent_rl.types import Group

SAMPLES, SHARED, OWN, REPEATS = 8, 256, 40, 4
SIDES = {
    "naive": {"share_prefixes": False, "pack_length": SHARED + OWN, "micro_batch_size": SAMPLES // 2},
    "shared": {"share_prefixes": True, "pack_length": SHARED + SAMPLES * OWN},
}


def groups(count: int) -> list[Group]:
    """Groups of random ids; half of each group's samples are rewarded."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        prompt = rng.integers(3, 49000, SHARED).tolist()
        own = [rng.integers(3, 49000, OWN).tolist() for _ in range(SAMPLES)]
        members = tuple(sample(prompt, ids, group=f"g{number}", index=i) for i, ids in enumerate(own))
        made.append(Group(group_id=f"g{number}", trajectories=members))
    return made


def measure(side: dict[str, Any], batch: list[Group]) -> tuple[float, list[np.ndarray], float]:
    """Seconds of one update, the first update's gradient, and tokens computed per update."""
    config, params = load_hf(fetch_quickstart_model())
    settings = LearnerConfig(**side, learning_rate=1e-9, max_grad_norm=1e9)  # nothing moves, nothing is clipped
    learner = Learner(config, params, algorithm=AlgorithmConfig(), config=settings, temperature=1.0)
    computed = learner.update(batch).metrics["computed_tokens"]
    moment = optax.tree_utils.tree_get(learner.state.policy.opt_state, "mu")
    gradient = [np.asarray(leaf) / (1 - settings.adam_b1) for leaf in jax.tree.leaves(moment)]
    return best_seconds(lambda: learner.update(batch), REPEATS), gradient, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1, help="groups in one update")
    arguments = parser.parse_args()
    use_compilation_cache()
    batch = groups(arguments.groups)
    samples = arguments.groups * SAMPLES
    seconds, gradients = {}, {}
    for name, side in SIDES.items():
        seconds[name], gradients[name], computed = measure(side, batch)
        print(f"{name}: {samples / seconds[name]:.2f} samples/s, {computed:.0f} tokens computed", flush=True)
    largest = max(float(np.abs(leaf).max()) for leaf in gradients["naive"])
    pairs = zip(gradients["naive"], gradients["shared"], strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    result = {
        "ratio": round(seconds["naive"] / seconds["shared"], 2),
        "max_grad_diff": difference / largest,
        "naive_samples_per_second": round(samples / seconds["naive"], 2),
        "shared_samples_per_second": round(samples / seconds["shared"], 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
