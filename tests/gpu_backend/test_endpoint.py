"""An agent of the ``openai`` client in front of a real vLLM engine: exact ids, and log-probs that
are transformers'.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.frameworks import OpenAIAgentLoop
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.gpu_backend.conftest import MAX_MODEL_LEN, SMALL, Reference, running
from tests.tiny import tiny_params
from tests.tiny_chat import TinyCodec

pytestmark = pytest.mark.asyncio(loop_scope="session")
CONFIG = replace(SMALL, vocab_size=400)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}


async def add_up(base_url, api_key, row):
    """Asks four times, and calls the tools that the model asks for."""
    messages = [dict(message) for message in row["prompt"]]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[TOOL]
            )
            message = answer.choices[0].message
            messages.append(
                message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            )
            for call in message.tool_calls or ():
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "and"})


async def test_a_session_is_one_sequence_with_transformers_log_probs(
    tmp_path: Path,
):
    save_hf(tmp_path, CONFIG, tiny_params(5, CONFIG))
    reference = Reference(tmp_path)
    loop_class = type(
        "Loop", (OpenAIAgentLoop,), {"function": staticmethod(add_up), "name": "test_agent"}
    )
    async with running(tmp_path) as backend:
        context = AgentContext(
            client=LLMServerClient([AsyncServer(backend)]),
            codec=TinyCodec(),
            limits=AgentConfig(max_prompt_length=64, max_response_length=160),
            max_model_len=MAX_MODEL_LEN,
        )
        loop = loop_class(context)
        sampling = SamplingParams(max_tokens=12, seed=1)
        trajectory = await loop.play(episode_request(ROW, sampling))
        await loop.close()
    assert trajectory.num_turns == 4 and trajectory.segments == ()
    prompt = trajectory.prompt_ids
    for turn in trajectory.turns:
        expected = reference.logprobs(prompt, turn.output.token_ids)
        np.testing.assert_allclose(turn.output.log_probs, expected, atol=5e-5)
        prompt += turn.output.token_ids + turn.appended_ids
    assert prompt == trajectory.prompt_ids + trajectory.response_ids
