"""The endpoint with the real ``openai`` client over HTTP: OpenAI's shapes, its errors, limits, and
nothing left.
"""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

openai = pytest.importorskip("openai")

from tests.endpoint_testbed import ASK, CALL, JSON, TOOL, serving  # noqa: E402
from tests.fakes import FakeCodec  # noqa: E402
from tests.messages import raises  # noqa: E402


async def test_a_chat_answer_has_openais_shape_with_usage_and_logprobs():
    async with serving(["the answer is 3"]) as stage, stage.client() as client:
        answer = await client.chat.completions.create(
            model="policy", messages=ASK, logprobs=True, seed=3
        )
    choice = answer.choices[0]
    assert choice.message.content == "the answer is 3"
    assert choice.finish_reason == "stop"
    tokens = choice.logprobs.content
    assert "".join(t.token for t in tokens) == "the answer is 3<eos>"
    assert all(t.logprob < 0 and bytes(t.bytes).decode() == t.token for t in tokens)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


async def test_results_of_tool_calls_extend_the_turn_by_its_ids():
    async with serving([CALL, "it is 3"]) as stage, stage.client("/sessions/s/v1") as client:
        first = (
            await client.chat.completions.create(model="x", messages=ASK, tools=[TOOL])
        ).choices[0]
        call = first.message.tool_calls[0]
        assert first.finish_reason == "tool_calls"
        assert call.function.name == "add"
        assert call.function.arguments == '{"a": 1, "b": 2}'
        history = [
            *ASK,
            first.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        second = await client.chat.completions.create(model="x", messages=history, tools=[TOOL])
        assert second.choices[0].message.content == "it is 3"
        first_turn, second_turn = stage.store.known("s", "any").recorder.turns
        assert second_turn.parent is first_turn
        assert second_turn.context_ids[: len(first_turn.context_ids)] == first_turn.context_ids
        recorded = (
            await client.get(f"{stage.server.url}/sessions/s", cast_to=httpx.Response)
        ).json()
    assert [len(path) for path in recorded["sequences"]] == [2]
    assert recorded["sequences"][0][1]["token_ids"] == list(second_turn.output.token_ids)


async def test_a_stream_of_text_and_one_of_calls_add_up_to_the_whole_answer():
    async with serving([CALL, "it is 3"]) as stage, stage.client("/sessions/s/v1") as client:
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="x", messages=ASK, tools=[TOOL], stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert deltas[0].role == "assistant"
        assert deltas[-1].tool_calls[0].function.name == "add"
        assert chunks[-1].usage.completion_tokens == len(
            stage.store.known("s", "any").recorder.turns[0].output.token_ids
        )
        stream = await client.chat.completions.create(model="x", messages=ASK, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == "it is 3"


async def test_a_stop_string_ends_the_text_but_its_ids_are_kept():
    async with serving(["one two three four"]) as stage, stage.client("/sessions/s/v1") as client:
        answer = await client.completions.create(model="x", prompt="count", stop=[" three"])
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3


async def test_several_choices_and_prompts_are_answered_in_order():
    async with serving(lambda r: FakeCodec().encode_text("")) as stage:
        stage.backend.script = lambda r: [*r.prompt_ids[:1], 2]
        async with stage.client() as client:
            answer = await client.completions.create(model="policy", prompt=["alpha", "beta"], n=2)
    assert [choice.text for choice in answer.choices] == ["alpha", "alpha", "beta", "beta"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"n": 100}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_with_the_parameters_name(fields, param):
    async with serving(["hello"]) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "policy", "messages": ASK, **fields})
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert stage.backend.requests == []


async def test_a_refusal_is_a_warning_with_its_path_and_reason_and_repetitions_are_none(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.WARNING)
    async with serving(["hello"]) as stage, stage.client() as client:
        for _ in range(3):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="policy", messages=ASK, top_logprobs=2)
    (message,) = caplog.messages
    refused = "the endpoint refused a request (400)"
    assert message.startswith(f"{refused}: POST '/v1/chat/completions': 400 top_logprobs=2: ")


async def test_unknown_models_and_paths_and_bad_bodies_are_refused():
    async with (
        serving(["hello"], limits={"max_body_bytes": 2000}) as stage,
        stage.client() as client,
    ):
        with raises(openai.NotFoundError, key="model", value="'gpt'"):
            await client.chat.completions.create(model="gpt", messages=ASK)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="policy", input="x")
        with raises(openai.APIStatusError, key="max_body_bytes", value=2000) as caught:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x" * 5000}]
            )
        assert caught.value.status_code == 413
        async with httpx.AsyncClient() as plain:
            answer = await plain.post(
                f"{stage.server.url}/v1/completions", content=b"{", headers=JSON
            )
        assert answer.status_code == 400
        assert "not JSON" in answer.json()["error"]["message"]
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_context_that_is_full_is_openais_error_and_is_not_repeated():
    async with serving(["hello"], max_prompt_length=2) as stage, stage.client(retries=2) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=ASK)
    assert caught.value.code == "context_length_exceeded"


async def test_strangers_learn_nothing_and_open_nothing():
    async with serving(["hello"], api_key="secret") as stage:
        for path in ("/v1", "/sessions/s/v1"):
            async with stage.client(path, key="wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="policy", messages=ASK)
        assert len(stage.store) == 0
        async with stage.client(key="secret") as client:
            assert (await client.chat.completions.create(model="policy", messages=ASK)).choices


async def test_a_client_that_hangs_up_frees_the_engine_whole_or_streamed():
    async with serving(["hello"]) as stage:
        stage.backend.unpaused.clear()  # nothing is sampled until it is set
        for stream in (False, True):
            async with stage.client("/sessions/s/v1") as client:
                request = asyncio.ensure_future(
                    client.chat.completions.create(model="x", messages=ASK, stream=stream)
                )
                while not stage.backend.running:
                    await asyncio.sleep(0)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            while stage.backend.running:
                await asyncio.sleep(0)
        stage.backend.unpaused.set()
        session = stage.store.known("s", "any")
        while session.tasks:
            await asyncio.sleep(0)
        assert session.recorder.turns == []


async def test_a_session_that_ends_ends_its_requests():
    async with serving(["hello"]) as stage, stage.client("/sessions/s/v1") as client:
        stage.backend.unpaused.clear()
        request = asyncio.ensure_future(client.chat.completions.create(model="x", messages=ASK))
        while not stage.backend.running:
            await asyncio.sleep(0)
        assert stage.store.end("s")
        with raises(openai.APIStatusError, value="session ended"):
            await request
        assert not stage.backend.running
        assert not stage.store.end("s")


async def test_requests_over_the_limit_are_told_to_come_again():
    async with (
        serving(["hello"], limits={"max_concurrent_requests": 1}) as stage,
        stage.client() as client,
    ):
        stage.backend.unpaused.clear()
        first = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=ASK))
        while not stage.backend.running:
            await asyncio.sleep(0)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="policy", messages=ASK)
        stage.backend.unpaused.set()
        assert (await first).choices[0].message.content == "hello"


async def test_slow_requests_end():
    async with (
        serving(["hello"], limits={"request_timeout": 0.2}) as stage,
        stage.client() as client,
    ):
        stage.backend.unpaused.clear()
        with raises(openai.InternalServerError, key="request_timeout", value=0.2):
            await client.chat.completions.create(model="policy", messages=ASK)
        assert not stage.backend.running
        with raises(openai.InternalServerError, key="request_timeout", value=0.2):
            await client.chat.completions.create(model="policy", messages=ASK, stream=True)


async def test_idle_sessions_expire_and_too_many_are_refused():
    now = [0.0]
    limits = {"session_ttl": 10, "max_sessions": 2}
    async with serving(["hello"], clock=lambda: now[0], limits=limits) as stage:
        async with stage.client() as client:
            for name in ("a", "b"):
                session_client = client.with_options(
                    base_url=f"{stage.server.url}/sessions/{name}/v1"
                )
                await session_client.chat.completions.create(model="x", messages=ASK)
            third = client.with_options(base_url=f"{stage.server.url}/sessions/c/v1")
            with raises(openai.RateLimitError, value="2 sessions"):
                await third.chat.completions.create(model="x", messages=ASK)
            now[0] = 11.0
            await third.chat.completions.create(model="x", messages=ASK)
            assert len(stage.store) == 1
            await client.delete(f"{stage.server.url}/sessions/c", cast_to=httpx.Response)
            assert len(stage.store) == 0


async def test_an_engine_that_dies_in_a_stream_is_an_error_of_the_stream():
    async with serving(["hello"]) as stage, stage.client() as client:
        stage.backend.die()
        with raises(openai.InternalServerError, value="engine died"):
            await client.chat.completions.create(model="policy", messages=ASK, stream=True)


async def test_prometheus_reads_the_requests_of_every_route_and_needs_the_key():
    async with serving(["hello"], api_key="key") as stage, stage.client(key="key") as client:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "go"}]
        )
        async with httpx.AsyncClient(base_url=stage.server.url) as browser:
            assert (await browser.get("/metrics")).status_code == 401
            browser.headers["Authorization"] = "Bearer key"
            assert (await browser.get("/nothing")).status_code == 404
            answer = await browser.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    samples = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    total = "jax_agent_rl_server_requests_total"
    assert samples[total, "/v1/chat/completions", "200"] == 1
    assert samples[total, "unknown", "404"] == 1
    assert samples[total, "/metrics", "401"] == 1
    assert samples["jax_agent_rl_engine_generated_tokens_total", "server-0"] > 0
    assert samples["jax_agent_rl_server_sessions",] == 0
    assert samples["jax_agent_rl_server_generations_running",] == 0


async def test_adapters_are_models_of_their_names():
    async with serving(["yes", "no"], adapters=["math"]) as stage, stage.client() as client:
        listed = [model.id async for model in client.models.list()]
        plain = await client.chat.completions.create(model="policy", messages=ASK)
        adapted = await client.chat.completions.create(model="math", messages=ASK)
        streamed = await client.chat.completions.create(model="math", messages=ASK, stream=True)
        names = {chunk.model async for chunk in streamed}
        with raises(openai.NotFoundError, fix=("'policy'", "'math'")):
            await client.chat.completions.create(model="law", messages=ASK)
    assert listed == ["policy", "math"]
    assert (plain.model, adapted.model, names) == ("policy", "math", {"math"})
    assert [request.lora for request in stage.backend.requests] == [None, "math", "math"]
