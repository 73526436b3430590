"""Tool-using agents written with other people's clients, unmodified, on a real engine; what they
did is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

openai = pytest.importorskip("openai")

from jax_agent_rl.agents.frameworks import OpenAIAgentLoop  # noqa: E402
from jax_agent_rl.chat.codec import ChatCodec  # noqa: E402
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig  # noqa: E402
from jax_agent_rl.learner.learner import Learner  # noqa: E402
from jax_agent_rl.types import Group, SamplingParams  # noqa: E402
from tests.agent_testbed import episode_request  # noqa: E402
from tests.tiny_chat import (  # noqa: E402
    CONFIG,
    LONGEST,
    assert_exact,
    params,
    tiny_context,
    tokenizer,
)

ROW = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}
QUESTION = ROW["prompt"][0]["content"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return str(a + b)


def add_few(a: Literal[1, 2], b: Literal[1, 2]) -> str:
    """Adds two small numbers, which a grammar makes a random model write.

    Args:
        a: the first number
        b: the second number
    """
    return str(a + b)


async def openai_chat(base_url, api_key):
    """Chat Completions."""
    messages = [dict(message) for message in ROW["prompt"]]
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[tool]
            )
            message = answer.choices[0].message
            messages.append(
                message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            )
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def langgraph(base_url, api_key):
    """A LangGraph graph over langchain-openai."""
    langchain_openai = pytest.importorskip("langchain_openai")
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = langchain_openai.ChatOpenAI(model="m", base_url=base_url, api_key=api_key).bind_tools(
        [add]
    )

    async def ask(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    await graph.compile().ainvoke({"messages": ROW["prompt"]})


async def openai_responses(base_url, api_key):
    """The Responses API, chained by ``previous_response_id``."""
    tool = {"type": "function", "name": "add", "parameters": SCHEMA}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        fields = {"model": "m", "tools": [tool]}
        answer = await client.responses.create(input=QUESTION, **fields)
        while calls := [item for item in answer.output if item.type == "function_call"]:
            results = [
                {
                    "type": "function_call_output",
                    "call_id": c.call_id,
                    "output": add(**json.loads(c.arguments)),
                }
                for c in calls
            ]
            answer = await client.responses.create(
                previous_response_id=answer.id, input=results, **fields
            )


async def anthropic_messages(base_url, api_key):
    """Anthropic's client; its base URL has no version."""
    anthropic = pytest.importorskip("anthropic")
    messages = [{"role": "user", "content": QUESTION}]
    tool = {"name": "add", "description": "adds", "input_schema": SCHEMA}
    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"), api_key=api_key
    ) as client:
        while True:
            async with client.messages.stream(
                model="m", max_tokens=99, messages=messages, tools=[tool]
            ) as stream:
                answer = await stream.get_final_message()
            messages.append(
                {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
            )
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                return
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": add(**use.input)}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})


async def gemini(base_url, api_key):
    """Google's client, which calls the function by itself; its base URL has no version."""
    genai = pytest.importorskip("google.genai")
    options = {"base_url": base_url.removesuffix("/v1")}
    async with genai.Client(api_key=api_key, http_options=options).aio as client:
        chat = client.chats.create(model="m", config={"tools": [add]})
        async for _ in await chat.send_message_stream(QUESTION):
            pass


async def openai_agents(base_url, api_key, *, responses: bool = True):
    """OpenAI's Agents SDK, over the Responses API by default."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    model = kind(model="m", openai_client=client)
    agent = agents.Agent(
        name="adder", instructions="add", model=model, tools=[agents.function_tool(add)]
    )
    with contextlib.suppress(agents.ModelBehaviorError):  # what it makes of a response that is cut
        await agents.Runner.run(agent, QUESTION, max_turns=20)


async def openai_agents_chat(base_url, api_key):
    """OpenAI's Agents SDK over Chat Completions."""
    await openai_agents(base_url, api_key, responses=False)


async def pydantic_ai(base_url, api_key):
    """Pydantic AI."""
    module = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    await module.Agent(model, tools=[add]).run(QUESTION)


async def litellm(base_url, api_key):
    """LiteLLM's completion function."""
    # Otherwise it asks the network for prices when it is imported.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    module = pytest.importorskip("litellm")
    messages = [dict(message) for message in ROW["prompt"]]
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": SCHEMA},
    }
    while True:
        answer = await module.acompletion(
            model="openai/m", api_base=base_url, api_key=api_key, messages=messages, tools=[tool]
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def smolagents(base_url, api_key):
    """smolagents as it comes: with instructions of some thousand ids, and it demands calls."""
    module = pytest.importorskip("smolagents")
    model = module.OpenAIServerModel(model_id="m", api_base=base_url, api_key=api_key)
    agent = module.ToolCallingAgent(
        tools=[module.tool(add_few)], model=model, max_steps=2, verbosity_level=0
    )
    await asyncio.to_thread(agent.run, QUESTION)


CLIENTS = [
    openai_chat,
    openai_responses,
    anthropic_messages,
    gemini,
    openai_agents,
    openai_agents_chat,
    langgraph,
    pydantic_ai,
    litellm,
    smolagents,
]
REWRITE_THEIR_HISTORY = [smolagents]
"""They send the model's calls back as text of their own, so each step is a context of its own."""

DEMAND_CALLS = [smolagents]
"""They send ``tool_choice="required"``, which a grammar fulfils."""


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_an_unmodified_agent_is_one_exact_trajectory_that_is_trained_on(client):
    async def agent(base_url, api_key, row):
        await client(base_url, api_key)

    loop_class = type(
        "Loop", (OpenAIAgentLoop,), {"function": staticmethod(agent), "name": "test_agent"}
    )
    demands_calls = client in DEMAND_CALLS
    codec = ChatCodec(tokenizer(), tool_format="hermes") if demands_calls else None
    max_tokens = 200 if demands_calls else 12
    trajectories = []
    async with tiny_context(codec=codec, longest=8192 if demands_calls else LONGEST) as context:
        loop = loop_class(context)
        try:
            for seed in (1, 3) if demands_calls else range(4):
                sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
                played = await loop.play(episode_request(ROW, sampling, trajectory_id=f"t-{seed}"))
                trajectories.append(
                    replace(
                        played,
                        reward=float(seed if demands_calls else played.num_turns),
                    )
                )
        finally:
            await loop.close()
        for trajectory in trajectories:
            assert_exact(trajectory, context.client.pool.servers[0].backend)
    sequences = [sequence for t in trajectories for sequence in t.sequences]
    messages = []
    for sequence in sequences:
        messages += [str(message["content"]) for message in sequence.messages]
    assert client is not smolagents or any(
        "Observation:" in text for text in messages
    )  # a tool's, not an error
    assert any(t.segments for t in trajectories) == (client in REWRITE_THEIR_HISTORY)
    # A random model's turns are cut, which ends a run of OpenAI's SDK over the Responses API.
    turns = []
    for trajectory in trajectories:
        turns.append(sum(sequence.num_turns for sequence in trajectory.sequences))
    assert max(turns) >= (2 if client in (openai_agents, smolagents) else 3)
    config = LearnerConfig(pack_length=4096 if demands_calls else LONGEST)
    learner = Learner(CONFIG, params(), algorithm=AlgorithmConfig(), config=config, temperature=1.0)
    metrics = learner.update([Group(group_id="g", trajectories=tuple(trajectories))]).metrics
    assert metrics["logprob_gap_max"] < 1e-3
    assert metrics["grad_norm"] > 0
    assert metrics["trained_tokens"] == sum(sum(sequence.loss_mask) for sequence in sequences)
    assert np.isfinite(metrics["loss"])
