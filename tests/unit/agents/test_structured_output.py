"""Structured output through all APIs: a random model calls what it must call and answers in JSON,
by exact ids.
"""

from __future__ import annotations

import contextlib
import json

import jsonschema
import numpy as np
import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from jax_agent_rl.chat.codec import ChatCodec  # noqa: E402
from tests.agent_testbed import session_trajectory  # noqa: E402
from tests.endpoint_testbed import ASK, TOOL, serving  # noqa: E402
from tests.messages import raises  # noqa: E402
from tests.tiny_chat import reference_logprobs, tiny_context, tokenizer  # noqa: E402

ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {"name": "get_weather", "description": "tells the weather", "parameters": ARGUMENTS}
STOP = {"name": "stop", "description": "stops", "parameters": EMPTY}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, STOP)]
FUNCTIONS = [{"type": "function", **function} for function in (WEATHER, STOP)]
CLAUDE_TOOLS = [
    {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    for function in (WEATHER, STOP)
]
HUGE = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "maxItems": 10**7}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "plan", "schema": ARGUMENTS, "strict": True},
}


@contextlib.asynccontextmanager
async def stage(tool_format: str = "hermes"):
    codec = ChatCodec(tokenizer(), tool_format=tool_format)
    async with (
        tiny_context(codec=codec, max_assistant_turns=50) as context,
        serving(context=context) as serving_stage,
    ):
        yield serving_stage


def check_call(name: str, arguments: dict) -> None:
    jsonschema.validate(arguments, {"get_weather": ARGUMENTS, "stop": EMPTY}[name])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_requires_or_names_a_tool_calls_it(stream: bool):
    async def create(client, **fields):
        fields = {"model": "policy", "messages": ASK, "tools": TOOLS, "max_tokens": 200} | fields
        if not stream:
            return await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as events:
            return await events.get_final_completion()

    async with stage() as serving_stage, serving_stage.client() as client:
        for seed in range(4):
            (choice,) = (
                await create(client, tool_choice="required", parallel_tool_calls=False, seed=seed)
            ).choices
            (call,) = choice.message.tool_calls
            check_call(call.function.name, json.loads(call.function.arguments))
            assert choice.finish_reason == "tool_calls"
            assert not choice.message.content
            (choice,) = (await create(client, tool_choice=NAMED, seed=seed)).choices
            (call,) = choice.message.tool_calls
            assert call.function.name == "get_weather"
            check_call("get_weather", json.loads(call.function.arguments))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_format_makes_the_answer_json_of_its_schema(stream: bool):
    async with stage() as serving_stage, serving_stage.client() as client:
        for seed in range(4):
            fields = {
                "model": "policy",
                "messages": ASK,
                "max_tokens": 200,
                "response_format": SCHEMA,
                "seed": seed,
            }
            if stream:
                chunks = [
                    chunk
                    async for chunk in await client.chat.completions.create(**fields, stream=True)
                ]
                text = "".join(
                    chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
                )
            else:
                text = (await client.chat.completions.create(**fields)).choices[0].message.content
            jsonschema.validate(json.loads(text), ARGUMENTS)


async def test_an_answer_may_be_any_object_and_a_limit_cuts_it():
    async with stage() as serving_stage, serving_stage.client() as client:
        fields = {
            "model": "policy",
            "messages": ASK,
            "response_format": {"type": "json_object"},
            "seed": 3,
        }
        (choice,) = (await client.chat.completions.create(**fields, max_tokens=1)).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == "{"


async def test_with_tools_and_a_format_the_answer_is_a_call_or_json():
    async with stage() as serving_stage, serving_stage.client() as client:
        for seed in range(4):
            (choice,) = (
                await client.chat.completions.create(
                    model="policy",
                    messages=ASK,
                    tools=TOOLS[:1],
                    response_format=SCHEMA,
                    max_tokens=400,
                    seed=seed,
                    temperature=2,
                )
            ).choices
            for call in choice.message.tool_calls or ():
                check_call(call.function.name, json.loads(call.function.arguments))
            if not choice.message.tool_calls:
                jsonschema.validate(json.loads(choice.message.content), ARGUMENTS)


async def test_the_responses_api_takes_the_same_and_says_so():
    text = {"format": {"type": "json_schema", "name": "plan", "schema": ARGUMENTS, "strict": True}}
    async with stage() as serving_stage, serving_stage.client() as client:
        answer = await client.responses.create(
            model="policy", input="plan", text=text, max_output_tokens=200
        )
        jsonschema.validate(json.loads(answer.output_text), ARGUMENTS)
        assert answer.text.format.type == "json_schema"
        answer = await client.responses.create(
            model="policy",
            input="the weather",
            tools=FUNCTIONS,
            tool_choice={"type": "function", "name": "get_weather"},
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        (item,) = answer.output
        assert item.type == "function_call"
        assert item.name == "get_weather"
        check_call(item.name, json.loads(item.arguments))
        assert answer.parallel_tool_calls is False
        assert answer.tool_choice.name == "get_weather"
        answer = await client.responses.create(
            model="policy",
            input="go",
            tools=FUNCTIONS[1:],
            tool_choice="required",
            max_output_tokens=250,
        )
        assert {item.name for item in answer.output if item.type == "function_call"} == {"stop"}


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=str
)
async def test_a_message_with_a_tool_choice_uses_the_tool(choice):
    async with stage() as serving_stage:
        client = anthropic.AsyncAnthropic(
            base_url=serving_stage.server.url, api_key="any", max_retries=0, timeout=60
        )
        async with client:
            message = await client.messages.create(
                model="policy",
                max_tokens=200,
                messages=ASK,
                tools=CLAUDE_TOOLS,
                tool_choice={**choice, "disable_parallel_tool_use": True},
            )
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert block.name == choice.get("name", block.name)
    check_call(block.name, block.input)


async def test_a_session_trains_on_what_a_grammar_restricted_over_what_it_left():
    async with stage() as serving_stage, serving_stage.client("/sessions/s/v1") as client:
        for fields in ({"tools": TOOLS, "tool_choice": "required"}, {}):
            await client.chat.completions.create(model="x", messages=ASK, max_tokens=60, **fields)
        recorder = serving_stage.store.known("s", "any").recorder
    constrained, free = recorder.turns
    assert constrained.output.constrained == free.output.supports == ()
    assert len(constrained.output.supports) == len(constrained.output.token_ids)
    ids = constrained.context_ids
    prompt = len(ids) - len(constrained.output.token_ids)
    learner = reference_logprobs(ids)[prompt - 1 :]  # one full pass, without a grammar
    trajectory = session_trajectory(recorder)
    sequences = {s.response_ids: s for s in trajectory.sequences}
    sequence = sequences[constrained.output.token_ids]
    assert sequence.supports == constrained.output.supports
    assert all(sequence.loss_mask)
    assert (
        np.array(constrained.output.log_probs) >= learner - 2e-4
    ).all()  # normalized over fewer ids
    assert (np.array(constrained.output.log_probs) > learner + 0.01).any()


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice",
            "'f'",
        ),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice", "some"),
        ({"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls", "forces a call"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", '"schema"'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "objekt"}},
                }
            },
            "response_format",
            "Invalid type: objekt",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": HUGE}}},
            "response_format",
            "maxItems=10000000",
        ),
        (
            {
                "tools": [{"type": "function", "function": {**STOP, "parameters": HUGE}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "maxItems=10000000",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a b"}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "'a b'",
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_with_the_parameter_and_the_reason(
    fields, param, reason
):
    async with stage() as serving_stage, serving_stage.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=ASK, extra_body=fields)
        assert caught.value.param == param
        assert reason in caught.value.body["message"]
        assert not serving_stage.context.client.pool.servers[0].backend.seen


async def test_a_format_without_a_grammar_is_refused_by_its_name():
    async with stage("glm") as serving_stage, serving_stage.client() as client:
        with raises(openai.BadRequestError, value="'glm'"):
            await client.chat.completions.create(
                model="policy", messages=ASK, extra_body={"tools": TOOLS, "tool_choice": "required"}
            )


async def test_an_api_says_in_its_words_that_an_engine_has_no_grammars():
    async with serving(["3"]) as serving_stage, serving_stage.client() as client:
        with raises(openai.BadRequestError, value="grammar") as caught:
            await client.chat.completions.create(
                model="policy",
                messages=ASK,
                extra_body={"tools": [TOOL], "tool_choice": "required"},
            )
        assert caught.value.param == "tool_choice"
        claude = anthropic.AsyncAnthropic(
            base_url=serving_stage.server.url, api_key="any", max_retries=0
        )
        async with claude:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await claude.messages.create(
                    model="policy",
                    max_tokens=9,
                    messages=ASK,
                    tools=CLAUDE_TOOLS,
                    tool_choice={"type": "any"},
                )
        assert refused.value.body["error"]["type"] == "invalid_request_error"
