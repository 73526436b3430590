"""Official clients over HTTP get a turn in the order in which the model wrote it, whole and
streamed alike.
"""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from tests.endpoint_testbed import TOOL, serving  # noqa: E402
from tests.unit.chat.test_template_families import codec_of  # noqa: E402

ASK = [{"role": "user", "content": "q"}]
CALLS = [
    f'<tool_call>\n{{"name": "add", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in range(2)
]
BROKEN = '<tool_call>\n{"name": "add", "argu\n</tool_call>'
SAID = f"<think>plan</think>First.{CALLS[0]} then {BROKEN} and{CALLS[1]} Done."
ORDER = [
    ("thinking", "plan"),
    ("text", "First."),
    ("call", {"n": 0}),
    ("text", f" then {BROKEN} and"),
    ("call", {"n": 1}),
    ("text", " Done."),
]
TEXT = "".join(value for kind, value in ORDER if kind == "text")
ALL_AS_TEXT = SAID.removeprefix("<think>plan</think>")


def scripted(text=SAID):
    codec = codec_of("qwen3")
    ids = (*codec.encode_markup(text), codec.eos_token_ids[0])
    return serving(lambda request: ids, codec=codec)


async def ask_claude(client, stream, messages=ASK, **fields):
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {
        "model": "policy",
        "max_tokens": 2000,
        "messages": messages,
        "tools": tools,
        "thinking": thinking,
    } | fields
    if not stream:
        return await client.messages.create(**fields)
    async with client.messages.stream(**fields) as events:
        return await events.get_final_message()


async def ask_responses(client, stream, messages=ASK, **fields):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    fields = {"model": "policy", "input": messages, "tools": tools} | fields
    if not stream:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as events:
        return await events.get_final_response()


async def ask_chat(client, stream, **fields):
    fields = {"model": "policy", "messages": ASK, "tools": [TOOL]} | fields
    if not stream:
        return await client.chat.completions.create(**fields)
    async with client.chat.completions.stream(**fields) as events:
        return await events.get_final_completion()


def blocks_of(message):
    values = {
        "thinking": lambda b: b.thinking,
        "text": lambda b: b.text,
        "tool_use": lambda b: b.input,
    }
    return [
        (block.type.replace("tool_use", "call"), values[block.type](block))
        for block in message.content
    ]


def items_of(response):
    items = []
    for item in response.output:
        if item.type == "function_call":
            items.append(("call", json.loads(item.arguments)))
        else:
            kind = "thinking" if item.type == "reasoning" else "text"
            items.append((kind, item.content[0].text))
    return items


@pytest.mark.parametrize("stream", [False, True])
async def test_claude_gets_blocks_in_order_and_sends_them_back_as_the_same_turn(stream):
    testbed = scripted()
    async with testbed as stage:
        client = anthropic.AsyncAnthropic(
            base_url=f"{stage.server.url}/sessions/s", api_key="any", max_retries=0
        )
        message = await ask_claude(client, stream)
        assert blocks_of(message) == ORDER
        assert message.stop_reason == "tool_use"
        uses = [block.id for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": "3"} for use in uses]
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        history = [
            *ASK,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results},
        ]
        await ask_claude(client, stream, history)
        first, second = stage.store.known("s", "any").recorder.turns
    assert second.parent is first


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_has_items_in_order_and_takes_them_back_as_the_same_turn(stream):
    testbed = scripted()
    async with testbed as stage, stage.client("/sessions/s/v1") as client:
        response = await ask_responses(client, stream)
        assert items_of(response) == ORDER
        assert response.output_text == TEXT
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call, "output": "3"} for call in calls
        ]
        items = [item.model_dump(exclude_none=True) for item in response.output]
        await ask_responses(client, stream, [*ASK, *items, *results])
        first, second = stage.store.known("s", "any").recorder.turns
    assert second.parent is first


@pytest.mark.parametrize("stream", [False, True])
async def test_gemini_gets_parts_in_order_and_sends_them_back_as_the_same_turn(stream):
    genai = pytest.importorskip("google.genai")
    add = {"name": "add", "parameters": {"type": "OBJECT", "properties": {}}}
    config = {
        "tools": [{"function_declarations": [add]}],
        "thinking_config": {"include_thoughts": True},
    }
    async with scripted() as stage:
        options = {"base_url": f"{stage.server.url}/sessions/s"}
        async with genai.Client(api_key="any", http_options=options).aio as client:
            chat = client.chats.create(model="policy", config=config)
            if stream:
                pieces = [piece async for piece in await chat.send_message_stream("q")]
            else:
                pieces = [await chat.send_message("q")]
            found = []
            results = []
            for piece in pieces:
                for part in piece.candidates[0].content.parts:
                    if part.function_call is not None:
                        found.append(("call", part.function_call.args))
                        result = genai.types.Part.from_function_response(
                            name="add", response={"output": "3"}
                        )
                        results.append(result)
                    else:
                        found.append(("thinking" if part.thought else "text", part.text))
            assert found == ORDER
            await chat.send_message(results)
        first, second = stage.store.known("s", "any").recorder.turns
    assert second.parent is first


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_message_has_the_same_text_and_calls(stream):
    testbed = scripted()
    async with testbed as stage, stage.client() as client:
        (choice,) = (await ask_chat(client, stream)).choices
    assert choice.message.content == TEXT
    assert choice.message.reasoning_content == "plan"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"n": 0},
        {"n": 1},
    ]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_choice_of_tools_calls_are_text_for_every_client(stream):
    testbed = scripted()
    async with testbed as stage, stage.client() as client:
        claude = anthropic.AsyncAnthropic(base_url=stage.server.url, api_key="any", max_retries=0)
        message = await ask_claude(claude, stream, tool_choice={"type": "none"})
        response = await ask_responses(client, stream, tool_choice="none")
        (choice,) = (await ask_chat(client, stream, tool_choice="none")).choices
    assert blocks_of(message) == items_of(response) == [("thinking", "plan"), ("text", ALL_AS_TEXT)]
    assert (choice.message.content, choice.message.reasoning_content) == (ALL_AS_TEXT, "plan")
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_only_call_is_malformed_is_text_and_asks_for_no_result(stream):
    testbed = scripted(BROKEN)
    async with testbed as stage, stage.client() as client:
        claude = anthropic.AsyncAnthropic(base_url=stage.server.url, api_key="any", max_retries=0)
        message = await ask_claude(claude, stream)
        response = await ask_responses(client, stream)
        (choice,) = (await ask_chat(client, stream)).choices
    assert blocks_of(message) == items_of(response) == [("text", BROKEN)]
    assert choice.message.content == BROKEN
    assert choice.finish_reason == "stop"
    assert message.stop_reason == "end_turn"
