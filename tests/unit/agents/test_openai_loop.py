"""Agents written against the real ``openai`` client, on a real engine: what is trained on is what was sampled."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from jax_agent_rl.agents.openai_loop import OpenAIAgentLoop  # noqa: E402
from jax_agent_rl.types import FinishReason, SamplingParams  # noqa: E402
from tests.tiny_chat import assert_exact, tiny_context, tokenizer  # noqa: E402

ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def client_of(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60)


async def trajectory_of(function, context, *, row=ROW, seed=1):
    loop_class = type("Loop", (OpenAIAgentLoop,), {"function": staticmethod(function), "name": "test_agent"})
    loop = loop_class(context)
    sampling = SamplingParams(max_tokens=12, seed=seed)
    try:
        return await loop.run(row, trajectory_id=f"t-{seed}", group_id="g", sampling=sampling)
    finally:
        await loop.close()


async def tool_agent(base_url, api_key, row):
    """The loop everybody writes: call tools until the model answers."""
    async with client_of(base_url, api_key) as client:
        messages = [dict(m) for m in row["prompt"]]
        while True:
            answer = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def test_many_turns_of_a_tool_calling_client_are_one_exact_trajectory():
    async with tiny_context() as context:
        trajectories = [await trajectory_of(tool_agent, context, seed=seed) for seed in range(6)]
        backend = context.client.servers[0].backend
        for trajectory in trajectories:
            assert trajectory.segments == ()
            assert_exact(trajectory, backend)
    assert max(t.num_turns for t in trajectories) >= 3
    assert all(
        t.row["extra_info"]["agent_output"] == t.messages[-1]["content"].strip()
        for t in trajectories
        if t.finish_reason is FinishReason.ANSWER
    )
    drifts = [
        tokenizer().encode(tokenizer().decode(turn.output.token_ids), add_special_tokens=False)
        != list(turn.output.token_ids)
        for t in trajectories
        for turn in t.turns
    ]
    assert any(drifts), "the test would not notice re-tokenization"
