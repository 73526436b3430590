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

GROUP = 12
NEW = 48  # ids
SPECULATIVE = 7
LONGEST = 352
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
        conversations = [row["prompt"] for _, row in read_row_file(rows)]

    prompts = []
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tuple(tokenizer(text, add_special_tokens=False).input_ids))
    return prompts


@dataclass
class Side:
    """What one engine sampled, and the seconds it took."""

    backend: JetStreamBackend
    seconds: float = 0.0
    outputs: list[TokenOutput] = field(default_factory=list)

    async def sample(self, requests: Sequence[GenerateRequest], batch: int) -> None:
        """Sample all requests, a batch of them at a time."""
        slots = asyncio.Semaphore(batch)

        async def generate(request: GenerateRequest) -> TokenOutput:
            async with slots:
                return await self.backend.generate(request)

        start = time.perf_counter()
        self.outputs += await asyncio.gather(*map(generate, requests))
        self.seconds += time.perf_counter() - start

    @property
    def speed(self) -> float:
        """Ids per second."""
        num_ids = sum(len(output.token_ids) for output in self.outputs)
        return num_ids / self.seconds


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
        """Return the requests of a round."""
        result = []
        for question, ids in enumerate(questions[number * count : (number + 1) * count]):
            for member in range(GROUP):
                request = GenerateRequest(
                    request_id=f"{number} {question} {member}",
                    prompt_ids=ids,
                    sampling=SamplingParams(max_tokens=NEW, temperature=temperature, seed=member),
                )
                result.append(request)
        return result

    speculative_shapes = replace(shapes, num_speculative_tokens=SPECULATIVE)
    async with (
        running(JetStreamBackend(config, params, shapes)) as plain_backend,
        running(JetStreamBackend(config, params, speculative_shapes)) as speculative_backend,
    ):
        # Other questions compile the programs.
        for backend in (plain_backend, speculative_backend):
            await Side(backend).sample(requests(0), batch)

        start_metrics = await speculative_backend.metrics()
        plain = Side(plain_backend)
        speculative = Side(speculative_backend)
        for number in range(1, rounds + 1):
            for side in (plain, speculative):
                await side.sample(requests(number), batch)
        metrics = (await speculative_backend.metrics()).since(start_metrics)

    num_requests = len(plain.outputs)
    num_same = 0
    for plain_output, speculative_output in zip(plain.outputs, speculative.outputs, strict=True):
        if plain_output.token_ids == speculative_output.token_ids:
            num_same += 1
    return {
        "plain_tokens_per_second": round(plain.speed, 1),
        "speculative_tokens_per_second": round(speculative.speed, 1),
        "ratio": round(speculative.speed / plain.speed, 2),
        "accepted_per_draft": round(metrics.accepted_tokens / max(1, metrics.drafts), 2),
        "drafts_per_request": round(metrics.drafts / num_requests, 2),
        "same": round(num_same / num_requests, 3),
        "recompilations": metrics.recompilations,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    print(cpu(), flush=True)
    config, params = load_quickstart()
    max_questions = max(map(questions_of, arguments.batches))
    questions = encoded_questions((1 + arguments.rounds) * max_questions)
    result = {}
    for batch in arguments.batches:
        figures = asyncio.run(
            compare(
                config,
                params,
                questions,
                batch=batch,
                rounds=arguments.rounds,
                temperature=arguments.temperature,
            )
        )
        result[f"batch_{batch}"] = figures
        print(f"batch {batch}: {figures}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
