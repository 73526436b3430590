"""A reward server over HTTP: requests, retries and rate limits."""

import asyncio
import json

import httpx
import pytest

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards import RemoteReward
from tests.messages import raises

URL = "http://rewards.test/score"
QUESTION = ("mine", "it is 9", "9", {"index": 3})


def remote(handler, **kwargs):
    return RemoteReward(URL, transport=httpx.MockTransport(handler), retry_delay=0.0, **kwargs)


async def test_the_question_is_posted_as_json_and_the_answer_is_the_score():
    seen = []

    def handler(request):
        seen.append(
            (
                request.method,
                str(request.url),
                request.headers["x-key"],
                json.loads(request.content),
            )
        )
        return httpx.Response(200, json={"score": 0.5, "format": 1.0})

    reward = remote(handler, headers={"x-key": "k"})
    assert await reward(*QUESTION) == {"score": 0.5, "format": 1.0}
    expected = {
        "data_source": "mine",
        "solution_str": "it is 9",
        "ground_truth": "9",
        "extra_info": {"index": 3},
    }
    assert seen == [("POST", URL, "k", expected)]
    await reward.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_status_that_may_pass_is_tried_again(status):
    answers = [httpx.Response(status), httpx.Response(status), httpx.Response(200, json=1.0)]
    assert await remote(lambda request: answers.pop(0))(*QUESTION) == 1.0


async def test_a_broken_connection_is_tried_again():
    attempts = []

    def handler(request):
        attempts.append(request)
        if len(attempts) < 3:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=1.0)

    assert await remote(handler)(*QUESTION) == 1.0


async def test_retries_end_and_the_message_names_the_url_and_the_key():
    attempts = []

    def handler(request):
        attempts.append(request)
        raise httpx.ConnectError("refused")

    with raises(RewardError, key=(URL, "reward.remote.url"), value=("refused", "3 times")):
        await remote(handler, max_retries=2)(*QUESTION)
    assert len(attempts) == 3


async def test_a_refusal_is_not_tried_again():
    attempts = []

    def handler(request):
        attempts.append(request)
        return httpx.Response(422, text="who are you?")

    with raises(RewardError, key=URL, value=("HTTP 422", "who are you")):
        await remote(handler)(*QUESTION)
    assert len(attempts) == 1


async def test_an_answer_that_is_no_json_is_an_error():
    with raises(RewardError, key=(URL, "JSON"), value="<html>"):
        await remote(lambda request: httpx.Response(200, text="<html>"))(*QUESTION)


async def test_a_server_that_is_not_there_is_named():
    reward = RemoteReward("http://127.0.0.1:9/score", max_retries=0)
    with raises(RewardError, key="http://127.0.0.1:9/score", value="cannot be reached"):
        await reward(*QUESTION)
    await reward.close()


async def test_only_so_many_requests_are_in_flight():
    running = 0
    peak = 0

    async def handler(request):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, json=1.0)

    reward = remote(handler, max_concurrency=3)
    await asyncio.gather(*(reward(*QUESTION) for _ in range(10)))
    assert peak == 3


async def test_starts_are_spaced_to_the_rate_and_the_server_may_ask_for_more(monkeypatch):
    now = 100.0
    pauses = []

    async def sleep(seconds):
        nonlocal now
        pauses.append(round(seconds, 6))
        now += seconds

    answers = [httpx.Response(200, json=1.0)] * 2 + [
        httpx.Response(429, headers={"Retry-After": "7"}),
        httpx.Response(200, json=1.0),
    ]
    monkeypatch.setattr("jax_agent_rl.rewards.judge.time.monotonic", lambda: now)
    monkeypatch.setattr("jax_agent_rl.rewards.judge.asyncio.sleep", sleep)
    reward = remote(lambda request: answers.pop(0), requests_per_second=4.0)
    for _ in range(3):
        await reward(*QUESTION)
    assert pauses == [0.25, 0.25, 7.0]


async def test_an_attempt_has_its_time_however_the_answer_trickles_in():
    async def trickle():
        while True:
            await asyncio.sleep(0)
            yield b" "

    async def handler(request):
        return httpx.Response(200, content=trickle())

    reward = RemoteReward(
        URL, transport=httpx.MockTransport(handler), timeout=0.01, max_retries=1, retry_delay=0.0
    )
    with raises(RewardError, key="reward.remote.timeout", value=(0.01, "2 times")):
        await reward(*QUESTION)


async def test_each_repetition_waits_twice_as_long(monkeypatch):
    pauses = []

    def handler(request):
        return httpx.Response(503)

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("jax_agent_rl.rewards.judge.asyncio.sleep", sleep)
    reward = RemoteReward(
        URL, transport=httpx.MockTransport(handler), timeout=4.0, max_retries=2, retry_delay=0.5
    )
    with pytest.raises(RewardError):
        await reward(*QUESTION)
    assert [pause for pause in pauses if pause > 0] == [0.5, 1.0]
