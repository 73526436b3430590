"""JSON over HTTP: bounded, repeated only where it is harmless, and every failure names the URL and
the key.
"""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.utils.network import JsonService, bearer
from tests.http_service import serve
from tests.messages import raises
from tests.ports import free_port


class Script:
    """An app that gives its responses one after the other, the last one forever."""

    def __init__(self, *responses):
        self.responses = list(responses)
        self.bodies = []
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["POST", "GET"])])

    async def answer(self, request):
        self.bodies.append(await request.body())
        response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        return (
            await response()
            if callable(response) and not isinstance(response, Response)
            else response
        )


def service(url, *, timeout=10.0, retries=0, sleeps=None, **options):
    async def sleep(seconds):
        (sleeps if sleeps is not None else []).append(seconds)

    return JsonService(
        url=url,
        url_key="a.url",
        timeout=timeout,
        timeout_key="a.timeout",
        max_retries=retries,
        retry_delay=0.7,
        error=ToolServerError,
        sleep=sleep,
        **options,
    )


async def post(script, payload=None, *, repeatable=False, **settings):
    async with serve(script.app) as url:
        client = service(url, **settings)
        try:
            return await client.post(payload, repeatable=repeatable)
        finally:
            await client.close()


async def test_what_is_sent_arrives_and_what_is_answered_comes_back():
    script = Script(Response('{"ü": [1, null]}'))
    assert await post(script, {"a": "ä\x00\ud800"}) == {"ü": [1, None]}
    assert script.bodies == [b'{"a": "\\u00e4\\u0000\\ud800"}'], "even what is no text can be sent"


async def test_an_unreachable_server_is_named_with_its_key_after_the_retries():
    sleeps = []
    url = f"http://127.0.0.1:{free_port()}"
    client = service(url, retries=2, sleeps=sleeps)
    with raises(ToolServerError, key=(url, "a.url"), value="3 times"):
        await client.post({})
    assert sleeps == [0.7, 0.7] and client.retries == 2


async def test_a_slow_server_is_not_waited_for_and_named_with_the_key():
    never = asyncio.Event()
    with raises(TimeoutError, key=("http://", "a.timeout"), value=0.2):
        await post(Script(never.wait), timeout=0.2)


@pytest.mark.parametrize(
    ("repeatable", "repeated", "ending"), [(False, 0, "slow$"), (True, 2, r" \(3 times\)$")]
)
async def test_a_request_that_timed_out_is_repeated_only_if_it_may_run_twice(
    repeatable, repeated, ending
):
    never = asyncio.Event()
    sleeps = []
    with pytest.raises(TimeoutError, match=ending):
        await post(Script(never.wait), timeout=0.1, retries=2, repeatable=repeatable, sleeps=sleeps)
    assert sleeps == [0.7] * repeated


async def test_a_repetition_that_is_in_time_is_the_answer():
    never = asyncio.Event()
    assert (
        await post(Script(never.wait, Response("7")), timeout=0.5, retries=3, repeatable=True) == 7
    )


async def test_a_server_that_trickles_forever_is_not_waited_for():
    async def trickle():
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async def response():
        return StreamingResponse(trickle())

    with pytest.raises(TimeoutError, match=r"a\.timeout"):
        await post(Script(response), timeout=0.3)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_asked_again(status):
    assert await post(Script(Response(status_code=status), Response("1")), retries=1) == 1


@pytest.mark.parametrize(("repeatable", "asked"), [(False, 1), (True, 3)])
async def test_a_server_error_is_repeated_only_for_what_may_run_twice(repeatable, asked):
    script = Script(Response("out of luck", status_code=500))
    with raises(ToolServerError, value=("HTTP 500", "out of luck")):
        await post(script, retries=2, repeatable=repeatable)
    assert len(script.bodies) == asked


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "find a key"),
        (403, "find a key"),
        (404, r"correct a\.url"),
        (413, "too large"),
        (507, "out of memory"),
    ],
)
async def test_a_refusal_says_what_to_do_and_is_not_repeated_in_vain(status, hint):
    script = Script(Response("no", status_code=status))
    with pytest.raises(ToolServerError, match=hint):
        await post(script, retries=2, token_hint="find a key")
    assert len(script.bodies) == 1


@pytest.mark.parametrize("body", [b"<html>", b"", b"[" * 100_000, b"{'a': 1}"])
async def test_an_answer_that_is_not_json_is_named(body):
    with raises(ToolServerError, key="http://", value="not JSON"):
        await post(Script(Response(body)))


async def test_invalid_utf8_is_replaced():
    assert await post(Script(Response(b'"a\xff\xfeb"'))) == "a\ufffd\ufffdb"


async def test_a_huge_answer_is_refused_before_it_is_in_memory():
    script = Script(Response(b'"' + b"x" * 5000 + b'"'))
    with raises(ToolServerError, value="1000 bytes"):
        await post(script, retries=2, repeatable=True, max_answer_bytes=1000)
    assert len(script.bodies) == 1


@pytest.mark.parametrize("payload", [{"a": b"bytes"}, {"a": float("nan")}, {1, 2}])
async def test_what_json_cannot_hold_is_not_sent(payload):
    with pytest.raises(ToolServerError, match="as JSON"):
        await service("http://localhost:1").post(payload)


@pytest.mark.parametrize("url", ["", "localhost:5000", "ftp://x", "http://", "http://h:port"])
def test_what_is_no_url_is_refused_with_its_key(url):
    with pytest.raises(ConfigError, match=r"a\.url="):
        service(url)


async def test_a_connection_that_breaks_off_is_an_error_not_a_crash():
    async def cut(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    broken = await asyncio.start_server(cut, "127.0.0.1", 0)
    port = broken.sockets[0].getsockname()[1]
    with pytest.raises(ToolServerError, match="off the connection"):
        await service(f"http://127.0.0.1:{port}").post({})
    broken.close()


def test_a_secret_comes_from_the_environment(monkeypatch):
    assert bearer(None, key="a.token_env") == {}
    monkeypatch.setenv("MY_SECRET", "s3")
    assert bearer("MY_SECRET", key="a.token_env") == {"authorization": "Bearer s3"}
    monkeypatch.delenv("MY_SECRET")
    with raises(ConfigError, key="a.token_env", value="MY_SECRET"):
        bearer("MY_SECRET", key="a.token_env")
