"""The endpoint refuses what it cannot do and what costs too much, and a session is its opener's."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

openai = pytest.importorskip("openai")

from jax_agent_rl.config import AgentConfig  # noqa: E402
from jax_agent_rl.runtime.serve import serving_limits  # noqa: E402
from tests.endpoint_testbed import ASK, JSON, TOOL, serving  # noqa: E402
from tests.messages import raises  # noqa: E402

# --- what a request may ask for, and what it may cost ---------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls"),
        ({"guided_json": {}}, "guided_json"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**70}, "seed"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_by_its_name(fields, param):
    async with serving(["hello"]) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=ASK, extra_body=fields)
        assert caught.value.param == param
        assert stage.backend.requests == []


async def test_top_k_and_min_p_are_the_engines_and_neutral_values_change_nothing():
    neutral = {
        "min_p": 0,
        "repetition_penalty": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
    }
    async with serving(["hello"]) as stage, stage.client() as client:
        for top_k in (7, -1, 0):
            await client.chat.completions.create(
                model="policy", messages=ASK, extra_body={"top_k": top_k, **neutral}
            )
        assert [request.sampling.top_k for request in stage.backend.requests] == [7, 0, 0]
        await client.chat.completions.create(
            model="policy", messages=ASK, extra_body={"min_p": 0.1}
        )
        assert stage.backend.requests[-1].sampling.min_p == 0.1


async def test_sampling_that_an_engine_of_its_own_kind_cannot_do_is_refused():
    async with serving(["hello"]) as stage, stage.client() as client:
        stage.backend.capabilities = replace(
            stage.backend.capabilities, any_sampling=False, stop_strings=False
        )
        for param, value in {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.2,
            "stop": "x",
        }.items():
            with raises(openai.BadRequestError, value="not supported") as caught:
                await client.chat.completions.create(
                    model="policy", messages=ASK, extra_body={param: value}
                )
            assert caught.value.param == param
        assert (
            await client.chat.completions.create(model="policy", messages=ASK, temperature=0)
        ).choices


@pytest.mark.parametrize(
    "prompt", [[0, 10**9], [-1], [2**40], [10**30], [[1], [10**9]], [[]], [""], ""]
)
async def test_ids_that_no_tokenizer_knows_and_empty_prompts_are_bad_requests(prompt):
    async with serving(["hello"]) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="policy", prompt=prompt)
        assert caught.value.param == "prompt"
        assert stage.backend.requests == []


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "policy", "messages": [{"role": "user", "content": "\ud800"}]}',
        rb'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "stop": "\udfff"}',
        b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{"id": "a",'
        b' "function": {"name": "f", "arguments": "' + b"[" * 5000 + b'"}}]}]}',
    ],
    ids=["half a character", "half a stop string", "arguments nested deep in a string"],
)
async def test_text_that_is_none_is_a_bad_request(body):
    async with serving(["hello"]) as stage, httpx.AsyncClient() as plain:
        answer = await plain.post(
            f"{stage.server.url}/v1/chat/completions", content=body, headers=JSON
        )
        assert answer.status_code == 400, answer.text
        assert stage.backend.requests == []


LONG = [
    ("chat/completions", {"messages": [{"role": "user", "content": "x " * 60_000}]}),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x " * 60_000}]}]},
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 1001}),
    ("completions", {"prompt": "x " * 60_000}),
    ("completions", {"prompt": [0] * 1001}),
]


@pytest.mark.parametrize(("path", "body"), LONG, ids=["text", "parts", "messages", "prompt", "ids"])
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(path, body, monkeypatch):
    async with serving(["hello"]) as stage, httpx.AsyncClient() as plain:
        for name in ("encode_prompt", "encode_text", "encode_markup", "decode"):
            monkeypatch.setattr(stage.codec, name, None)
        answer = await plain.post(f"{stage.server.url}/v1/{path}", json={"model": "policy", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# --- sessions -------------------------------------------------------------------------------------


async def ask(stage, name: str, key: str = "any"):
    async with stage.client(f"/sessions/{name}/v1", key=key) as client:
        return await client.chat.completions.create(model="x", messages=ASK)


async def test_only_a_generation_opens_a_session():
    async with serving(["hello"]) as stage, httpx.AsyncClient(base_url=stage.server.url) as plain:
        for method, path in (("GET", "/sessions/typo"), ("DELETE", "/sessions/typo")):
            answer = await plain.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "session_not_found",
            )
        assert (await plain.get("/sessions/typo/v1/models")).status_code == 200
        for body in (
            {},
            {"model": "x", "messages": [{"role": "robot"}]},
            {"model": "x", "messages": ASK, "min_p": 2},
        ):
            assert (
                await plain.post("/sessions/typo/v1/chat/completions", json=body)
            ).status_code == 400
        stage.backend.die()
        assert (
            await plain.post(
                "/sessions/typo/v1/chat/completions", json={"model": "x", "messages": ASK}
            )
        ).is_error
        assert len(stage.store) == 0


async def test_a_session_belongs_to_the_key_that_opened_it():
    async with serving(["hello"]) as stage, httpx.AsyncClient(base_url=stage.server.url) as plain:
        await ask(stage, "mine", "a")
        for headers in ({}, {"Authorization": "Bearer b"}):
            for method in ("GET", "DELETE"):
                assert (
                    await plain.request(method, "/sessions/mine", headers=headers)
                ).status_code == 401
            assert (await plain.get("/sessions", headers=headers)).json() == {"sessions": []}
        with pytest.raises(openai.AuthenticationError):
            await ask(stage, "mine", "b")
        owner_headers = {"Authorization": "Bearer a"}
        listed = (await plain.get("/sessions", headers=owner_headers)).json()["sessions"]
        assert listed == [{"session_id": "mine", "turns": 1, "running": 0}]
        assert (await plain.delete("/sessions/mine", headers=owner_headers)).json() == {
            "ended": True
        }


async def test_a_session_tells_the_version_of_every_token():
    async with serving(["it is 3"]) as stage, httpx.AsyncClient(base_url=stage.server.url) as plain:
        await ask(stage, "s", "k")
        turn = (await plain.get("/sessions/s", headers={"Authorization": "Bearer k"})).json()[
            "sequences"
        ][0][0]
    assert turn["policy_versions"] == [0] * len(turn["token_ids"]) != []


async def test_a_session_records_no_more_than_it_may():
    async with serving(["hello"], limits={"max_session_tokens": 5}) as stage:
        await ask(stage, "s")
        with raises(openai.BadRequestError, key="max_session_tokens", value=5) as caught:
            await ask(stage, "s")
        assert caught.value.code == "session_full"
        assert len(stage.store) == 1


async def test_a_request_outside_sessions_leaves_nothing_with_the_client():
    async with serving(["hello"]) as stage, stage.client() as client:
        ended: list[str] = []
        stage.context.client.end_session = ended.append
        await client.chat.completions.create(model="policy", messages=ASK)
        assert ended == ["once"]
        assert len(stage.store) == 0


async def test_an_id_of_a_session_has_a_length_and_an_alphabet():
    async with serving(["hello"]) as stage, httpx.AsyncClient(base_url=stage.server.url) as plain:
        for name in ("x" * 129, "a%20b", "a%0Ab"):
            body = {"model": "x", "messages": ASK}
            answer = await plain.post(f"/sessions/{name}/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert "1 to 128" in answer.text


def test_a_served_models_client_is_the_one_who_explains_tools():
    served = serving_limits(AgentConfig(tool_prompt="none"), 64)
    assert (served.tool_prompt, served.max_prompt_length) == ("template", 64)
