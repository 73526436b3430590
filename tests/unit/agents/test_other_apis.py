"""OpenAI's Responses and Anthropic's Messages API with the real clients: shapes, streams, errors,
exact ids.
"""

from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from tests.endpoint_testbed import ASK, CALL, serving  # noqa: E402

TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [FUNCTION]}


def claude(stage, path="", key="any"):
    return anthropic.AsyncAnthropic(
        base_url=stage.server.url + path, api_key=key, max_retries=0, timeout=30
    )


# --- Anthropic Messages ---------------------------------------------------------------------------


async def test_a_message_has_anthropics_shape_and_usage():
    async with serving(["the answer is 3"]) as stage, claude(stage) as client:
        message = await client.messages.create(
            model="policy", max_tokens=50, system="be brief", messages=ASK
        )
        count = await client.messages.count_tokens(model="policy", system="be brief", messages=ASK)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "the answer is 3"
    assert message.stop_reason == "end_turn"
    assert message.role == "assistant"
    assert message.usage.output_tokens == 5
    assert (
        message.usage.input_tokens
        == count.input_tokens
        == len(stage.backend.requests[0].prompt_ids)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_use_and_its_result_extend_the_turn_by_its_ids(stream: bool):
    async def create(client, messages):
        fields = {"model": "x", "max_tokens": 90, "tools": [TOOL], "messages": messages}
        if not stream:
            return await client.messages.create(**fields)
        async with client.messages.stream(**fields) as events:
            return await events.get_final_message()

    async with serving([CALL, "it is 3"]) as stage, claude(stage, "/sessions/s") as client:
        first = await create(client, ASK)
        (use,) = [block for block in first.content if block.type == "tool_use"]
        assert first.stop_reason == "tool_use"
        assert use.name == "add"
        assert use.input == {"a": 1, "b": 2}
        result = {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "3"}],
        }
        blocks = [block.model_dump() for block in first.content]
        history = [
            *ASK,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
        second = await create(client, history)
        assert second.content[0].text == "it is 3"
        assert second.stop_reason == "end_turn"
        first_turn, second_turn = stage.store.known("s", "any").recorder.turns
    assert second_turn.parent is first_turn
    assert second_turn.context_ids[: len(first_turn.context_ids)] == first_turn.context_ids


async def test_claude_codes_billing_header_is_no_part_of_the_prompt():
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.2de;"},
        {"type": "text", "text": "be brief"},
    ]
    async with serving(["3"]) as stage, claude(stage) as client:
        for given in (system, "be brief"):
            await client.messages.create(model="policy", max_tokens=50, system=given, messages=ASK)
    with_header, without = stage.backend.requests
    assert with_header.prompt_ids == without.prompt_ids


async def test_a_stream_of_text_adds_up_and_ends_with_its_usage():
    async with serving(["one two three four"]) as stage, claude(stage) as client:
        stream = await client.messages.create(
            model="policy", max_tokens=50, messages=ASK, stop_sequences=[" three"], stream=True
        )
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == "one two"
    assert events[-2].delta.stop_reason == "stop_sequence"
    assert events[-2].delta.stop_sequence == " three"
    assert events[-2].usage.output_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [True, False])
async def test_thinking_is_a_block_of_its_own_where_it_is_asked_for(stream: bool, thinking: bool):
    extra = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
    fields = {"model": "policy", "max_tokens": 2000, "messages": ASK, **extra}
    async with serving(["<think>one and two</think>it is 3"]) as stage, claude(stage) as client:
        if stream:
            async with client.messages.stream(**fields) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**fields)
    expected = [("thinking", "one and two")] if thinking else []
    blocks = [(b.type, b.thinking if b.type == "thinking" else b.text) for b in message.content]
    assert [(kind, text.strip()) for kind, text in blocks] == [*expected, ("text", "it is 3")]


async def test_errors_have_anthropics_shape():
    async with serving(["x"], api_key="secret", limits={"max_body_bytes": 2000}) as stage:
        async with claude(stage, key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(model="policy", max_tokens=5, messages=ASK)
            assert caught.value.body["error"]["type"] == "authentication_error"
        async with claude(stage, key="secret") as client:
            assert (
                await client.messages.create(model="policy", max_tokens=5, messages=ASK)
            ).content
            for fields, error, kind in (
                ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
                (
                    {"extra_body": {"temperature": 3}},
                    anthropic.BadRequestError,
                    "invalid_request_error",
                ),
                (
                    {"messages": [{"role": "robot", "content": "x"}]},
                    anthropic.BadRequestError,
                    "invalid_request_error",
                ),
                (
                    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
                    anthropic.BadRequestError,
                    None,
                ),
                (
                    {"messages": [{"role": "user", "content": "x" * 3000}]},
                    anthropic.APIStatusError,
                    "request_too_large",
                ),
            ):
                with pytest.raises(error) as caught:
                    await client.messages.create(
                        **{"model": "policy", "max_tokens": 5, "messages": ASK, **fields}
                    )
                body = caught.value.body
                assert body["type"] == "error" and body["error"]["type"] == kind or kind is None


# --- OpenAI Responses -----------------------------------------------------------------------------


async def test_a_response_has_openais_shape_and_usage():
    async with serving(["the answer is 3"]) as stage, stage.client() as client:
        answer = await client.responses.create(
            model="policy", input="what is 1 + 2 ?", instructions="be brief"
        )
    assert answer.output_text == "the answer is 3"
    assert answer.status == "completed"
    assert answer.usage.output_tokens == 5
    assert answer.usage.input_tokens == len(stage.backend.requests[0].prompt_ids)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_function_call_and_its_output_extend_the_turn_by_its_ids(
    chained: bool, stream: bool
):
    async def create(client, **fields):
        if not stream:
            return await client.responses.create(model="x", tools=[FUNCTION], **fields)
        async with client.responses.stream(model="x", tools=[FUNCTION], **fields) as events:
            return await events.get_final_response()

    question = {"role": "user", "content": "what is 1 + 2 ?"}
    async with serving([CALL, "it is 3"]) as stage, stage.client("/sessions/s/v1") as client:
        first = await create(client, input=[question])
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert call.name == "add"
        assert call.arguments == '{"a": 1, "b": 2}'
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if chained:
            second = await create(client, previous_response_id=first.id, input=[result])
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            second = await create(client, input=[question, *items, result])
        assert second.output_text == "it is 3"
        first_turn, second_turn = stage.store.known("s", "any").recorder.turns
    assert second_turn.parent is first_turn
    assert second_turn.context_ids[: len(first_turn.context_ids)] == first_turn.context_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called_by_both_names(stream: bool):
    async def create(client, items):
        fields = {"model": "x", "tools": [NAMESPACE], "input": items, "store": False}
        if not stream:
            return await client.responses.create(**fields)
        events = await client.responses.create(**fields, stream=True)
        return [event async for event in events][-1].response

    call = CALL.replace("add", "sums.add")
    async with serving([call, "it is 3"]) as stage, stage.client("/sessions/s/v1") as client:
        first = await create(client, ASK)
        (item,) = first.output
        assert (item.namespace, item.name) == ("sums", "add")
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        await create(client, [*ASK, item.model_dump(exclude_none=True), output])
        first_turn, second_turn = stage.store.known("s", "any").recorder.turns
    assert second_turn.parent is first_turn
    assert '"description": "Sums."' in stage.codec.decode(first_turn.prompt_ids)


async def test_a_stream_of_text_adds_up_and_its_events_are_numbered():
    async with serving(["one two three four"]) as stage, stage.client() as client:
        stream = await client.responses.create(model="policy", input="count", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == "one two three four"
    )
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "one two three four"


async def test_a_response_that_is_cut_is_incomplete():
    async with serving(["one two three four"]) as stage, stage.client() as client:
        answer = await client.responses.create(model="policy", input="count", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_none"}, "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, None),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "web_search"}]}]}, None),
        ({"tools": [{**NAMESPACE, "tools": 3}]}, None),
        ({"text": {"format": {"type": "json_object"}}}, None),
        ({"background": True}, None),
        ({"include": ["message.output_text.logprobs"]}, None),
    ],
)
async def test_what_responses_cannot_honour_is_refused(fields: dict, code: str | None):
    async with serving(["hello"]) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "policy", "input": "hi", **fields})
        assert caught.value.code == code
        assert stage.backend.requests == []


async def test_a_summary_may_be_asked_for_as_the_reasoning_itself_is_in_the_answer():
    async with serving(["<think>one and two</think>it is 3"]) as stage, stage.client() as client:
        answer = await client.responses.create(
            model="policy", input="hi", reasoning={"summary": "auto"}
        )
    reasoning, message = answer.output
    assert reasoning.content[0].text.strip() == "one and two"
    assert message.content[0].text.strip() == "it is 3"


# --- sessions -------------------------------------------------------------------------------------


async def test_counting_tokens_opens_no_session_and_counts_in_one_that_is_open():
    async with serving(["one"]) as stage, claude(stage, "/sessions/s") as client:
        first_count = await client.messages.count_tokens(model="x", messages=ASK)
        assert len(stage.store) == 0
        message = await client.messages.create(model="x", max_tokens=50, messages=ASK)
        second_count = await client.messages.count_tokens(model="x", messages=ASK)
        assert first_count.input_tokens == second_count.input_tokens == message.usage.input_tokens
        assert len(stage.store.known("s", "any").recorder.turns) == 1


async def test_responses_are_stored_for_a_sessions_key_without_its_path():
    async with serving(["one", "two"]) as stage:
        stage.store.create = None
        stage.store.add(stage.session("s", "handed-out"))
        async with stage.client(key="handed-out") as client:
            first = await client.responses.create(model="x", input="hi")
            await client.responses.create(model="x", input="and?", previous_response_id=first.id)
        first_turn, second_turn = stage.store.known("s", "handed-out").recorder.turns
    assert second_turn.parent is first_turn


async def test_requests_that_open_one_session_at_once_share_its_stored_responses():
    async with (
        serving(["one", "two", "three", "four"]) as stage,
        stage.client("/sessions/s/v1") as client,
    ):
        slow = {"note": "x" * 500_000}  # so that the bodies arrive in parts, and in turns
        firsts = await asyncio.gather(
            *(client.responses.create(model="x", input=f"{i}", metadata=slow) for i in range(2))
        )
        for first in firsts:
            await client.responses.create(model="x", input="and?", previous_response_id=first.id)
        assert len(stage.store.known("s", "any").responses) == 4


async def test_a_session_is_named_by_path_or_header_whatever_the_api():
    async with serving(["one", "two", "three"]) as stage:
        header = {"X-Session-Id": "s"}
        async with stage.client() as client, claude(stage) as claude_client:
            await client.chat.completions.create(model="x", messages=ASK, extra_headers=header)
            await claude_client.messages.create(
                model="x", max_tokens=50, messages=ASK, extra_headers=header
            )
        async with stage.client("/sessions/s/v1") as client:
            await client.responses.create(model="x", input="and?")
        assert len(stage.store.known("s", "any").recorder.turns) == 3
