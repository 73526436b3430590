"""Cost of ``rollout.deterministic``, rollout and old log-probs by one program.

    python benchmarks/deterministic.py [--batch 8]

SmolLM2-135M in float32; every request has 96 prompt ids of its own and samples 48. The
deterministic engine is compared with the fast one. Each engine's wall time is from the first
request to the last log-prob; the deterministic one scores the contexts once more, as its learner
does before an update, while the fast one's learner needs no such pass (the log-probs of a single
update are its own). The last line is one JSON object: ``rollout_ratio`` (deterministic over fast),
``ratio`` (with scoring), and how far each engine's log-probs are from the scorer's:
``deterministic_gap`` must be 0.
"""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
from common import argument_parser, load_quickstart, random_ids, rollout, running

from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.programs import ProgramTable

PROMPT = 96  # ids
NEW = 48


async def measure(batch: int) -> dict[str, float]:
    model, params = load_quickstart()
    shapes = EngineShapes(
        max_model_len=160,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * 160,
        decode_steps=16,
        prefill_buckets=(32, 128),
    )
    program_table = ProgramTable()
    score = DeterministicScorer(
        model, shapes, dtype="float32", program_table=program_table, temperature=1.0
    )
    prompts = random_ids(batch, PROMPT)
    seconds: dict[str, float] = {}
    gaps: dict[str, float] = {}
    scoring_seconds: dict[str, float] = {}
    for name, engine_table in (("deterministic", program_table), ("fast", None)):
        engine = JetStreamBackend(model, params, shapes, deterministic=engine_table)
        async with running(engine) as backend:
            outputs, seconds[name] = await rollout(backend, prompts, NEW)

        contexts = []
        for prompt_ids, output in zip(prompts.tolist(), outputs, strict=True):
            contexts.append([*prompt_ids, *output.token_ids])
        start = time.perf_counter()
        scores = score(params, contexts)
        scoring_seconds[name] = time.perf_counter() - start

        output_gaps = []
        for output, context_scores in zip(outputs, scores, strict=True):
            log_probs = np.asarray(output.log_probs, np.float32)
            output_gaps.append(np.abs(log_probs - context_scores[PROMPT - 1 :]).max())
        gaps[name] = float(np.max(output_gaps))

    scoring = scoring_seconds["deterministic"]
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
