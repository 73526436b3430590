"""Grammars in a real vLLM engine: answers of a schema, and an output that an abort makes begin
anew.
"""

import asyncio
import json
from pathlib import Path

import pytest

from jax_agent_rl.chat.grammar import TurnGrammar
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.testing.conformance.models import write_tiny_model
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason
from tests.gpu_backend.conftest import request, running

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCHEMA = {"enum": ["small", "large", "vast"]}  # the tiny model's tokenizer has letters and no space
GRAMMAR = TurnGrammar({}, is_special=lambda number: False, thinking=None).turn(answer=SCHEMA)


async def test_an_answer_is_one_of_its_schema_and_survives_an_abort(tmp_path: Path):
    from transformers import AutoTokenizer

    folder = write_tiny_model(tmp_path / "model")
    decode = AutoTokenizer.from_pretrained(folder).decode
    async with running(folder) as backend:
        assert backend.capabilities.grammars
        asked = [
            request(
                f"r{seed}",
                (5, 6, 7),
                max_tokens=20,
                temperature=1.0,
                seed=seed,
                ignore_eos=False,
                grammar=GRAMMAR,
            )
            for seed in range(4)
        ]
        free = request("free", (5, 6, 7), max_tokens=12)
        alone = await backend.generate(free)
        *outputs, in_batch = await asyncio.gather(*map(backend.generate, [*asked, free]))
        client = LLMServerClient([AsyncServer(backend)])
        await backend.pause(PauseMode.KEEP)
        sampling = SamplingParams(max_tokens=20, seed=0, grammar=GRAMMAR)
        task = asyncio.create_task(
            client.generate("cut", prompt_ids=(5, 6, 7), sampling_params=sampling)
        )
        while (await backend.health()).waiting == 0:
            await asyncio.sleep(0)
        await backend.pause(PauseMode.ABORT)
        await backend.resume()
        outputs.append(await task)
    for output in outputs:
        assert json.loads(decode(output.token_ids[:-1])) in SCHEMA["enum"]
        assert output.stop_reason is StopReason.EOS
        assert output.constrained == (True,) * len(output.token_ids)
    assert in_batch.token_ids == alone.token_ids
    assert in_batch.constrained == ()
