"""The client of the tool server: what its answers may be, and what is made of those they may not
be.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response

from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import (
    NO_TOOL,
    ServerAction,
    ToolServerClient,
    observation_url,
    read_observations,
)
from jax_agent_rl.utils.network import JsonService
from tests.http_service import ToolServer, data_url
from tests.messages import raises
from tests.ports import free_port


def client(url, *, timeout=10.0):
    service = JsonService(
        url=observation_url(url),
        url_key="agent.tool_server_url",
        timeout=timeout,
        timeout_key="agent.tool_call_timeout",
        error=ToolServerError,
    )
    return ToolServerClient(service)


async def ask(server, *texts, timeout=10.0):
    it = client(server.url, timeout=timeout)
    try:
        return await it.get_observation(
            [ServerAction(trajectory_id=str(i), text=t) for i, t in enumerate(texts)]
        )
    finally:
        await it.close()


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "http://h:1/", "http://h:1/get_observation", "http://h:1/get_observation/"],
)
def test_the_path_may_be_left_out(url):
    assert observation_url(url) == "http://h:1/get_observation"


async def test_a_batch_comes_back_in_order():
    async with ToolServer() as server:
        observations = await ask(server, "a", "b", "c")
    assert [o.text for o in observations] == [" ran 'a'", " ran 'b'", " ran 'c'"]
    assert server.requests[0]["trajectory_ids"] == ["0", "1", "2"]


async def test_a_detailed_observation_is_parsed():
    detailed = {"obs": "x", "reward": 1, "metrics": {"t": 0.5}, "more": "for others"}
    async with ToolServer(lambda action: (detailed, True, True)) as server:
        (observation,) = await ask(server, "a")
    assert (
        observation.text,
        observation.reward,
        observation.metrics,
        observation.done,
        observation.error,
    ) == (
        "x",
        1.0,
        {"t": 0.5},
        True,
        None,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"audio": ["…"]}, "audio, which cannot be shown"),
        ({"image": "data:…"}, "an image cannot be read"),
        ({"image": ["data:image/png;base64,aGVsbG8="]}, "an image cannot be read"),
        ({"image": data_url((5000, 4000))}, "more than 16000000"),
        ({"image": data_url((9, 9))[:-40]}, "an image cannot be read"),
    ],
)
async def test_content_that_cannot_be_shown_is_an_error_for_the_model(fields, words):
    async with ToolServer(lambda action: {"obs": "x", **fields}) as server:
        (observation,) = await ask(server, "a")
    assert observation.error == "raised"
    assert words in observation.text
    assert not observation.media


async def test_images_are_decoded():
    urls = [data_url((4, 3)), data_url((2, 5)).partition(",")[2]]
    async with ToolServer(lambda action: {"obs": "x", "image": urls}) as server:
        (observation,) = await ask(server, "a")
    assert [(image.mode, image.size) for image in observation.media["image"]] == [
        ("RGB", (4, 3)),
        ("RGB", (2, 5)),
    ]


async def test_an_action_that_no_tool_accepts_has_a_default_observation():
    async with ToolServer(lambda action: (action, False, False)) as server:
        silent, speaking = await ask(server, "", "use <python>")
    assert (silent.text, silent.error) == (NO_TOOL, "invalid_action")
    assert (speaking.text, speaking.error) == ("use <python>", "invalid_action")


async def test_an_answer_that_ends_the_trajectory_is_no_mistake():
    async with ToolServer(lambda action: ("", True, False)) as server:
        (answered,) = await ask(server, "<answer>4</answer>")
    assert (answered.text, answered.done, answered.error) == ("", True, None)


WRONG = [
    None,
    [],
    "text",
    {},
    {"observations": ["a"], "dones": [False]},
    {"observations": ["a"], "dones": [False, True], "valids": [True]},
    {"observations": [], "dones": [], "valids": []},
    {"observations": "a", "dones": [False], "valids": [True]},
    {"observations": ["a"], "dones": ["maybe"], "valids": [True]},
]


@pytest.mark.parametrize("answer", WRONG)
async def test_a_wrong_answer_is_an_error_that_names_the_server(answer):
    async with ToolServer() as server:

        async def wrong(payload):
            return JSONResponse(answer)

        server.respond = wrong
        with raises(ToolServerError, key=("http://", "/get_observation"), value="wrong"):
            await ask(server, "a")


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        ["a"],
        {},
        {"obs": 3},
        {"obs": "x", "reward": "high"},
        {"obs": "x", "metrics": {"t": "s"}},
    ],
)
async def test_a_wrong_observation_is_an_error_of_its_own_entry(content):
    async with ToolServer(lambda action: content if action == "bad" else "fine") as server:
        bad, good = await ask(server, "bad", "good")
    assert isinstance(bad, ToolServerError)
    assert "gave a wrong observation" in str(bad)
    assert good.text == "fine"


async def test_a_reward_must_be_finite():
    async with ToolServer() as server:

        async def infinite(payload):
            return Response(
                '{"observations": [{"obs": "x", "reward": Infinity}], "dones": [0], "valids": [1]}'
            )

        server.respond = infinite
        (observation,) = await ask(server, "a")
    assert isinstance(observation, ToolServerError)
    assert "reward" in str(observation)


async def test_half_a_surrogate_pair_becomes_text_that_can_be_tokenized():
    async with ToolServer() as server:

        async def half(payload):
            return Response('{"observations": ["a\\ud800b"], "dones": [false], "valids": [true]}')

        server.respond = half
        (observation,) = await ask(server, "a")
    assert observation.text == "a?b"


async def test_a_slow_tool_is_an_observation_the_model_reads():
    never = asyncio.Event()
    async with ToolServer() as server:

        async def hang(payload):
            await never.wait()

        server.respond = hang
        observations = await ask(server, "a", "b", timeout=0.2)
        never.set()
    assert [o.error for o in observations] == ["timeout", "timeout"]
    assert "0.2 seconds" in observations[0].text


async def test_health_is_asked_before_a_run():
    async with ToolServer() as server:
        await client(server.url).check()
        server.health = 500
        with raises(ConfigError, key=("not ready", "/health"), value="HTTP 500"):
            await client(server.url).check()
    with raises(ConfigError, value="cannot be reached", fix="agent.tool_server_url"):
        await client(f"http://127.0.0.1:{free_port()}").check()


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["obs", "dones", "valids", "observations"]), inner)
    ),
)


@given(json_values, st.integers(1, 3))
def test_whatever_a_server_answers_is_an_observation_or_a_named_error(answer, count):
    try:
        observations = read_observations(answer, count, "http://h")
    except ToolServerError as error:
        assert "http://h" in str(error)
        return
    assert len(observations) == count
    assert all(isinstance(o, ToolServerError) or isinstance(o.text, str) for o in observations)


@pytest.mark.parametrize("released", [True, False])
async def test_closing_ends_what_outlives_a_cancelled_trajectory(released, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.tools.client.CLOSE_SECONDS", 60.0 if released else 0.0)
    it = client("http://127.0.0.1:1")
    release = asyncio.Event()
    ended = []

    async def work():
        try:
            await release.wait()
            ended.append("complete")
        finally:
            ended.append("ended")

    waiting = asyncio.ensure_future(it.complete(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == []
    if released:
        release.set()
    await it.close()
    assert ended == (["complete", "ended"] if released else ["ended"])
