"""What frameworks ask for by themselves: answers of a type, streams, parameters meant for the model
they know.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, WithJsonSchema

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from tests.unit.agents.test_structured_output import stage  # noqa: E402

QUESTION = "where to?"
ASK = [{"role": "user", "content": QUESTION}]


class Plan(BaseModel):
    """Where to go and for how long; few values, so that a random model's answers end."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Annotated[int, WithJsonSchema({"enum": [1, 2, 3]})]


def without_version(base_url: str) -> str:
    return base_url.removesuffix("/v1")


# --- answers of a type ----------------------------------------------------------------------------


async def openai_chat_parsed(base_url, key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        answer = await client.chat.completions.parse(model="m", messages=ASK, response_format=Plan)
    return answer.choices[0].message.parsed


async def openai_responses_parsed(base_url, key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        return (
            await client.responses.parse(model="m", input=QUESTION, text_format=Plan)
        ).output_parsed


async def anthropic_parsed(base_url, key):
    async with anthropic.AsyncAnthropic(base_url=without_version(base_url), api_key=key) as client:
        answer = await client.messages.parse(
            model="m", max_tokens=200, messages=ASK, output_format=Plan
        )
    return answer.parsed_output


async def gemini_json_schema(base_url, key):
    genai = pytest.importorskip("google.genai")
    # Google's own kind of schema has no enums of numbers.
    config = {
        "response_mime_type": "application/json",
        "response_json_schema": Plan.model_json_schema(),
    }
    options = {"base_url": without_version(base_url)}
    async with genai.Client(api_key=key, http_options=options).aio as client:
        answer = await client.models.generate_content(model="m", contents=QUESTION, config=config)
    return Plan.model_validate(answer.parsed)


async def langchain_schema(base_url, key, method: Any = "json_schema"):
    module = pytest.importorskip("langchain_openai")
    model = module.ChatOpenAI(model="gpt-5", base_url=base_url, api_key=key)
    return await model.with_structured_output(Plan, method=method).ainvoke(QUESTION)


async def langchain_named_tool(base_url, key):
    return await langchain_schema(base_url, key, "function_calling")


async def openai_agents_output_type(base_url, key):
    agents = pytest.importorskip("agents")
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key)
    model = agents.OpenAIResponsesModel(model="m", openai_client=client)
    agent = agents.Agent(name="planner", model=model, output_type=Plan)
    return (await agents.Runner.run(agent, QUESTION)).final_output


async def pydantic_ai_required_tool(base_url, key, *, claude: bool = False):
    module = pytest.importorskip("pydantic_ai")
    if claude:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider = AnthropicProvider(base_url=without_version(base_url), api_key=key)
        return (
            await module.Agent(AnthropicModel("m", provider=provider), output_type=Plan).run(
                QUESTION
            )
        ).output
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key=key))
    return (await module.Agent(model, output_type=Plan).run(QUESTION)).output


async def pydantic_ai_over_anthropic(base_url, key):
    return await pydantic_ai_required_tool(base_url, key, claude=True)


async def litellm_format(base_url, key):
    # Otherwise it asks the network for prices when it is imported.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    module = pytest.importorskip("litellm")
    answer = await module.acompletion(
        model="openai/m", api_base=base_url, api_key=key, messages=ASK, response_format=Plan
    )
    return Plan.model_validate_json(answer.choices[0].message.content)


TYPED = [
    openai_chat_parsed,
    openai_responses_parsed,
    anthropic_parsed,
    gemini_json_schema,
    langchain_schema,
    langchain_named_tool,
    openai_agents_output_type,
    pydantic_ai_required_tool,
    pydantic_ai_over_anthropic,
    litellm_format,
]


@pytest.mark.parametrize("ask", TYPED, ids=lambda ask: ask.__name__)
async def test_a_framework_gets_an_answer_of_the_type_it_asks_for(ask):
    async with stage() as serving_stage:
        plan = await ask(f"{serving_stage.server.url}/sessions/s/v1", "k")
        (turn,) = serving_stage.store.known("s", "k").recorder.turns
    assert isinstance(plan, Plan)
    assert plan.days in (1, 2, 3)
    assert any(turn.output.supports)


# --- streams --------------------------------------------------------------------------------------


async def langchain_stream(base_url, key):
    module = pytest.importorskip("langchain_openai")
    model = module.ChatOpenAI(model="m", base_url=base_url, api_key=key, max_tokens=12)
    return "".join([chunk.content async for chunk in model.astream(QUESTION)])


async def openai_agents_stream(base_url, key):
    agents = pytest.importorskip("agents")
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key)
    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
    settings = agents.ModelSettings(max_tokens=12)
    run = agents.Runner.run_streamed(
        agents.Agent(name="a", model=model, model_settings=settings), QUESTION
    )
    deltas = [
        e.data.delta
        async for e in run.stream_events()
        if getattr(e, "data", None) and e.data.type == DELTA
    ]
    assert "".join(deltas) == run.final_output
    return run.final_output


DELTA = "response.output_text.delta"


async def pydantic_ai_stream(base_url, key):
    module = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key=key))
    async with module.Agent(model, model_settings={"max_tokens": 12}).run_stream(QUESTION) as run:
        return "".join([text async for text in run.stream_text(delta=True, debounce_by=None)])


async def litellm_stream(base_url, key):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    module = pytest.importorskip("litellm")
    fields = {
        "api_base": base_url,
        "api_key": key,
        "messages": ASK,
        "max_tokens": 12,
        "stream": True,
    }
    chunks = [chunk async for chunk in await module.acompletion(model="openai/m", **fields)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def smolagents_stream(base_url, key):
    module = pytest.importorskip("smolagents")
    model = module.OpenAIServerModel(model_id="m", api_base=base_url, api_key=key, max_tokens=12)
    message = module.ChatMessage(role="user", content=QUESTION)
    deltas = await asyncio.to_thread(lambda: list(model.generate_stream([message])))
    return "".join(delta.content or "" for delta in deltas)


STREAMS = [
    langchain_stream,
    openai_agents_stream,
    pydantic_ai_stream,
    litellm_stream,
    smolagents_stream,
]


@pytest.mark.parametrize("ask", STREAMS, ids=lambda ask: ask.__name__)
async def test_what_a_framework_streams_is_what_was_recorded(ask):
    async with stage() as serving_stage:
        text = await ask(f"{serving_stage.server.url}/sessions/s/v1", "k")
        (turn,) = serving_stage.store.known("s", "k").recorder.turns
    assert text == turn.reply.content
    assert text


# --- what programs set for the model they were written for ----------------------------------------


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_an_openai_sdk_agent_without_a_model_runs_with_the_sdks_defaults(api):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    defaults = agents.Agent(name="a").model_settings
    assert (defaults.reasoning and defaults.reasoning.effort, defaults.verbosity) != (None, None)
    async with stage() as serving_stage:
        client = serving_stage.client("/sessions/s/v1", key="k")
        provider = agents.OpenAIProvider(openai_client=client, use_responses=api == "responses")
        agent = agents.Agent(name="a", output_type=Plan)  # so that a random model's answer ends
        result = await agents.Runner.run(
            agent, QUESTION, run_config=agents.RunConfig(model_provider=provider)
        )
        (turn,) = serving_stage.store.known("s", "k").recorder.turns
    assert result.final_output == Plan.model_validate_json(turn.reply.content)


async def test_claudes_effort_and_strict_tools_are_accepted_and_change_nothing():
    plain = {"name": "visit", "input_schema": {"type": "object"}}
    async with stage() as serving_stage:
        for extra, tool in (
            ({}, plain),
            ({"output_config": {"effort": "low"}}, plain | {"strict": True}),
        ):
            session = without_version(f"{serving_stage.server.url}/sessions/{len(extra)}/v1")
            async with anthropic.AsyncAnthropic(base_url=session, api_key="k") as client:
                await client.messages.create(
                    model="claude",
                    max_tokens=9,
                    messages=ASK,
                    tools=[tool],
                    extra_body={"top_k": 5, **extra},
                )
        first, second = (serving_stage.store.known(str(i), "k").recorder.turns[0] for i in range(2))
    assert first.context_ids[: first.prompt_length] == second.context_ids[: second.prompt_length]
