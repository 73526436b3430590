"""What ``rollout.deterministic`` costs: rollout and old log-probs by one program, against the fast engine.

    python benchmarks/deterministic.py [--batch 8]

SmolLM2-135M in float32; every request has 96 prompt ids of its own and samples 48. Each engine's wall time is from the
first request to the last log-prob; the deterministic one scores the contexts once more, as its learner does before an
update, while the fast one's learner needs no such pass (the log-probs of a single update are its own). The last line is
one JSON object: ``rollout_ratio`` (deterministic over fast), ``ratio`` (with scoring), and how far each engine's
log-probs are from the scorer's: ``deterministic_gap`` must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import numpy as np

from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.deterministic import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.models.fetch import fetch_quickstart_model
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime import use_compilation_cache
from jax_agent_rl.types import SamplingParams, TokenOutput

PROMPT, NEW = 96, 48


async def rollout(backend: JetStreamBackend, prompts: list[list[int]]) -> tuple[list[TokenOutput], float]:
    """What a started backend samples, and in how many seconds."""
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True)
    begin = time.perf_counter()
    outputs = await asyncio.gather(
        *(
            backend.generate(GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling))
            for i, prompt in enumerate(prompts)
        )
    )
    return outputs, time.perf_counter() - begin


async def measure(batch: int) -> dict[str, float]:
    model, params = load_hf(fetch_quickstart_model())
    shapes = EngineShapes(
        max_model_len=160,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * 160,
        decode_steps=16,
        prefill_buckets=(32, 128),
    )
    table = ProgramTable()
    score = DeterministicScorer(model, shapes, dtype="float32", table=table, temperature=1.0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 49000, PROMPT).tolist() for _ in range(batch)]
    seconds, gaps, scoring = {}, {}, 0.0
    for name, kept in (("deterministic", table), ("fast", None)):
        backend = JetStreamBackend(model, params, shapes, deterministic=kept)
        await backend.start()
        outputs, seconds[name] = await rollout(backend, prompts)
        contexts = [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)]
        begin = time.perf_counter()
        scores = score(params, contexts)
        scoring = scoring or time.perf_counter() - begin
        pairs = zip(outputs, scores, strict=True)
        gaps[name] = max(float(np.abs(np.float32(o.log_probs) - s[PROMPT - 1 :]).max()) for o, s in pairs)
        await backend.close()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="Requests, and slots of the engine.")
    use_compilation_cache()
    print(json.dumps(asyncio.run(measure(parser.parse_args().batch))))


if __name__ == "__main__":
    main()
