"""Speculative decoding against plain decoding on the quickstart's questions, in one process.

    python benchmarks/speculation.py [--batches 1 4 8 32] [--rounds 2] [--temperature 0.8]

SmolLM2-135M in float32 answers questions of ``prepare shop``, sampled as in the quickstart: groups
of 12, up to 48 ids each, with a batch of requests in flight at any time. Both engines get the same
requests with the same seeds, in turns, after a round of other questions that compiles the programs.
Prompts are part of the time. The last line is one JSON object: per batch size the ids per second of
both, ``ratio`` of speculative to plain, ``accepted_per_draft``, ``drafts_per_request`` and
``same``, the share of requests for which both sampled the same ids (rounding may tip a draw).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import argument_parser, cpu, load_quickstart, running
from transformers import AutoTokenizer

from jax_agent_rl.data.reader import read_row_file
from jax_agent_rl.data.tasks import prepare_shop
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput

GROUP, NEW, SPECULATIVE, LONGEST = 12, 48, 7, 352
REQUESTS = {1: 24, 4: 60, 8: 96, 32: 192}
"""Requests of a round by batch size, so that all take about as long."""


def questions_of(batch: int) -> int:
    """Return the number of questions of a round."""
    return REQUESTS.get(batch, 12 * batch) // GROUP


def encoded_questions(count: int) -> list[tuple[int, ...]]:
    """Return the prompts of training questions as ids."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_quickstart_model(), trust_remote_code=False)
    with tempfile.TemporaryDirectory() as folder:
        rows, *_ = prepare_shop(Path(folder), train=count, heldout=1)
        messages = [row["prompt"] for _, row in read_row_file(rows)]
    texts = [
        tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)
        for m in messages
    ]
    return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


@dataclass
class Side:
    """What one engine sampled, and the seconds it took."""

    backend: JetStreamBackend
    seconds: float = 0.0
    outputs: list[TokenOutput] = field(default_factory=list)

    async def sample(self, requests: Sequence[GenerateRequest], batch: int) -> None:
        """Sample all requests, a batch of them at a time."""
        free = asyncio.Semaphore(batch)

        async def one(request: GenerateRequest) -> TokenOutput:
            async with free:
                return await self.backend.generate(request)

        begin = time.perf_counter()
        self.outputs += await asyncio.gather(*map(one, requests))
        self.seconds += time.perf_counter() - begin

    @property
    def speed(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds


async def compare(
    config: DecoderConfig,
    params: Params,
    questions: list[tuple[int, ...]],
    *,
    batch: int,
    rounds: int,
    temperature: float,
) -> dict[str, float]:
    """Return the figures of one batch size, see the module's docstring."""
    shapes = EngineShapes(
        max_model_len=LONGEST,
        max_concurrent_decodes=batch,
        kv_cache_tokens=(batch + 8) * LONGEST,
        decode_steps=16,
        prefill_buckets=(32, 128, 256),
    )
    count = questions_of(batch)

    def requests(number: int) -> list[GenerateRequest]:
        own = questions[number * count : (number + 1) * count]
        return [
            GenerateRequest(
                request_id=f"{number} {question} {member}",
                prompt_ids=ids,
                sampling=SamplingParams(max_tokens=NEW, temperature=temperature, seed=member),
            )
            for question, ids in enumerate(own)
            for member in range(GROUP)
        ]

    speculative = replace(shapes, num_speculative_tokens=SPECULATIVE)
    async with (
        running(JetStreamBackend(config, params, shapes)) as first,
        running(JetStreamBackend(config, params, speculative)) as second,
    ):
        for backend in (first, second):
            await Side(backend).sample(requests(0), batch)
        before = await second.metrics()
        plain, drafted = Side(first), Side(second)
        for number in range(1, rounds + 1):
            for side in (plain, drafted):
                await side.sample(requests(number), batch)
        done = (await second.metrics()).since(before)
    pairs = list(zip(plain.outputs, drafted.outputs, strict=True))
    return {
        "plain_tokens_per_second": round(plain.speed, 1),
        "speculative_tokens_per_second": round(drafted.speed, 1),
        "ratio": round(drafted.speed / plain.speed, 2),
        "accepted_per_draft": round(done.accepted_tokens / max(1, done.drafts), 2),
        "drafts_per_request": round(done.drafts / len(pairs), 2),
        "same": round(sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs), 3),
        "recompilations": done.recompilations,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    print(cpu(), flush=True)
    config, params = load_quickstart()
    most = max(map(questions_of, arguments.batches))
    questions = encoded_questions((1 + arguments.rounds) * most)
    result = {}
    for batch in arguments.batches:
        options = {"batch": batch, "rounds": arguments.rounds, "temperature": arguments.temperature}
        result[f"batch_{batch}"] = asyncio.run(compare(config, params, questions, **options))
        print(f"batch {batch}: {result[f'batch_{batch}']}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
