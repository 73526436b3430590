"""Cost of ``rollout.deterministic``: rollout and old log-probs by one program, against the fast
engine.

    python benchmarks/deterministic.py [--batch 8]

SmolLM2-135M in float32; every request has 96 prompt ids of its own and samples 48. Each engine's
wall time is from the first request to the last log-prob; the deterministic one scores the contexts
once more, as its learner does before an update, while the fast one's learner needs no such pass
(the log-probs of a single update are its own). The last line is one JSON object: ``rollout_ratio``
(deterministic over fast), ``ratio`` (with scoring), and how far each engine's log-probs are from
the scorer's: ``deterministic_gap`` must be 0.
"""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
from common import argument_parser, load_quickstart, random_ids, rollout, running

from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.deterministic import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.programs import ProgramTable

PROMPT, NEW = 96, 48


async def measure(batch: int) -> dict[str, float]:
    model, params = load_quickstart()
    shapes = EngineShapes(
        max_model_len=160,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * 160,
        decode_steps=16,
        prefill_buckets=(32, 128),
    )
    table = ProgramTable()
    score = DeterministicScorer(model, shapes, dtype="float32", table=table, temperature=1.0)
    prompts = random_ids(batch, PROMPT)
    seconds: dict[str, float] = {}
    gaps: dict[str, float] = {}
    scoring = 0.0
    for name, own_table in (("deterministic", table), ("fast", None)):
        async with running(
            JetStreamBackend(model, params, shapes, deterministic=own_table)
        ) as backend:
            outputs, seconds[name] = await rollout(backend, prompts, NEW)
        contexts = [[*p, *o.token_ids] for p, o in zip(prompts.tolist(), outputs, strict=True)]
        begin = time.perf_counter()
        scores = score(params, contexts)
        scoring = scoring or time.perf_counter() - begin
        pairs = zip(outputs, scores, strict=True)
        gaps[name] = max(
            float(np.abs(np.asarray(o.log_probs, np.float32) - s[PROMPT - 1 :]).max())
            for o, s in pairs
        )
    return {
        "batch": batch,
        "fast_seconds": seconds["fast"],
        "deterministic_seconds": seconds["deterministic"],
        "scoring_seconds": scoring,
        "rollout_ratio": seconds["deterministic"] / seconds["fast"],
        "ratio": (seconds["deterministic"] + scoring) / seconds["fast"],
        "fast_gap": gaps["fast"],
        "deterministic_gap": gaps["deterministic"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batch", type=int, default=8, help="Requests, and slots of the engine.")
    print(json.dumps(asyncio.run(measure(parser.parse_args().batch))))


if __name__ == "__main__":
    main()
