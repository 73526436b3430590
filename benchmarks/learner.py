"""One learner step against a transformers AdamW step: same model, batch and machine.

    python benchmarks/learner.py

Both run in one process. SmolLM2-135M in float32, 8 sequences of 256 tokens without common prefixes,
trained on all tokens (a policy gradient of advantage +-1, the same work as a weighted
language-model loss). Needs torch (the test environment has it). The last line is one JSON object:
``ratio_vs_transformers``, and ``share_of_sgemm``, the rate of the operations in our step relative
to a large matrix product.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from common import (
    argument_parser,
    best_seconds,
    cpu,
    make_learner,
    make_trajectory,
    random_ids,
    sgemm_flops,
)

from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.types import Group

ROWS = 8
LENGTH = 256
REPEATS = 3


def sequences() -> np.ndarray:
    """Return int64 [ROWS, LENGTH], random ids without a common prefix."""
    return random_ids(ROWS, LENGTH)


def learner_and_group(ids: np.ndarray, **settings: Any) -> tuple[Learner, Group]:
    """Return a learner of two micro-batches per update, and a group to learn from."""
    learner = make_learner(
        pack_length=LENGTH,
        micro_batch_size=ROWS // 2,
        share_prefixes=False,
        learning_rate=1e-6,
        **settings,
    )
    members = []
    for i, row in enumerate(ids.tolist()):
        members.append(make_trajectory(row[:1], row[1:], group="g", index=i))
    return learner, Group(group_id="g", trajectories=tuple(members))


def measure(ids: np.ndarray) -> tuple[float, int, float]:
    """Measure our update.

    Returns:
        Its seconds, the programs compiled after the first one, and its operations.
    """
    learner, group = learner_and_group(ids)
    learner.update([group])
    first_compiled = learner.programs_compiled
    seconds = best_seconds(lambda: learner.update([group]), REPEATS)
    recompilations = learner.programs_compiled - first_compiled
    return seconds, recompilations, counted_flops(learner.model.parameter_shapes())


def transformers_seconds(ids: np.ndarray) -> float:
    """Time forward, backward, clip and AdamW on the same batch.

    The faster one of a whole batch and of two halves counts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        fetch_quickstart_model(), dtype=torch.float32, trust_remote_code=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = torch.tensor(ids)
    sign = torch.tensor([1.0, -1.0] * (ROWS // 2))[:, None]

    def step(parts: int) -> None:
        for part, weight in zip(batch.chunk(parts), sign.chunk(parts), strict=True):
            scores = model(part).logits[:, :-1].log_softmax(-1)
            chosen = scores.gather(-1, part[:, 1:, None])[..., 0]
            (-(weight * chosen).sum() / (ROWS * (LENGTH - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return min(best_seconds(functools.partial(step, parts), 2) for parts in (1, 2))


def counted_flops(shapes: dict) -> float:
    """Count the operations of a step.

    They are 6 per weight and token (the head only where a token is scored), and attention.
    """
    num_layer_weights = sum(int(np.prod(shape)) for shape in shapes["layers"].values())
    num_head_weights = int(np.prod(shapes["embed"]))
    _, hidden_size = shapes["embed"]
    num_layers = shapes["layers"]["q"][0]

    products = 6 * ROWS * (LENGTH * num_layer_weights + (LENGTH - 1) * num_head_weights)
    visible_pairs = LENGTH * (LENGTH + 1) / 2
    attention = 3 * 4 * ROWS * visible_pairs * hidden_size * num_layers
    return products + attention


def main() -> None:
    argument_parser(__doc__).parse_args()
    ids = sequences()
    peak = sgemm_flops()
    peer_seconds = transformers_seconds(ids)
    print(f"transformers: {ids.size / peer_seconds:.0f} tokens/s", flush=True)
    seconds, recompilations, flops = measure(ids)
    result = {
        "tokens_per_second": round(ids.size / seconds, 1),
        "transformers_tokens_per_second": round(ids.size / peer_seconds, 1),
        "ratio_vs_transformers": round(peer_seconds / seconds, 2),
        "share_of_sgemm": round(flops / seconds / peak, 3),
        "sgemm_gflop_s": round(peak / 1e9, 1),
        "recompilations": recompilations,
        "cpu": cpu(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
