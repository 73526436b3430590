"""Rollout servers and their clients: who may ask, how errors travel, and what happens when one side
goes away.
"""

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from prometheus_client.parser import text_string_to_metric_families

from jax_agent_rl.errors import (
    BackendError,
    ConfigError,
    EngineDiedError,
    PromptTooLongError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.http.weight_files import Uploads
from jax_agent_rl.rollout.http.wire import decode_request, encode_request
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, TokenChunk, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput
from jax_agent_rl.utils.fingerprints import read_fingerprint
from jax_agent_rl.utils.media import as_frames, as_image
from jax_agent_rl.utils.network import is_loopback
from tests.messages import raises
from tests.served import behind_server
from tests.toy_backend import ToyBackend

FILES = frozenset({"safetensors"})
PROTOCOL = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}


@contextlib.asynccontextmanager
async def served(*, client: dict | None = None, backend: ToyBackend | None = None, **server):
    """A toy backend, its server, and a started client."""
    inner = backend or ToyBackend(tick_seconds=0.001, weight_payloads=FILES)
    async with behind_server(inner, client=client, **server) as (http, remote):
        yield inner, http, remote


def request(name: str = "r", *, max_tokens: int = 5, prompt=(5, 6, 7), **fields) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, **fields)


def send(url: str, path: str = "/v1/health", method: str = "GET", **options):
    @contextlib.asynccontextmanager
    async def call():
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url + path, **options) as response,
        ):
            yield response

    return call()


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "example.org"])
def test_an_address_others_can_reach_needs_a_token(host):
    with raises(ConfigError, value="token", fix="rollout.token_env"):
        RolloutServer(ToyBackend(), host=host)


def test_loopback_addresses_are_known():
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "192.168.0.1", "localhost.example.org"]))


@pytest.mark.parametrize(
    "token", [None, "Bearer wrong", "secret", "Bearer secretx", "Bearer ſecret"]
)
async def test_without_the_right_token_nothing_is_answered(token):
    async with served(token="secret", client={"token": "secret"}) as (_, http, _remote):
        headers = PROTOCOL | ({"Authorization": token} if token else {})
        for path in ("/v1/health", "/v1/handshake", "/nothing"):
            async with send(http.url, path, headers=headers) as response:
                assert response.status == 401


async def test_a_client_with_a_wrong_token_reads_which_key_to_check():
    with raises(BackendError, key="token", fix="rollout.token_env"):
        async with served(token="secret", client={"token": "other"}):
            pass


async def test_another_protocol_version_is_refused_with_both_numbers(monkeypatch):
    ours = f"protocol {wire.PROTOCOL_VERSION}"
    async with served() as (_, http, _remote):
        for headers in ({}, {wire.PROTOCOL_HEADER: "0"}):
            async with send(http.url, headers=headers) as response:
                assert response.status == 426
                assert ours in (await response.json())["error"]["message"]
        with monkeypatch.context() as patch:
            patch.setattr(wire, "PROTOCOL_VERSION", 4)
            old = RemoteBackend(http.url)
        with raises(BackendError, value=(ours, "client 4")):
            await old.start()


async def test_a_body_over_the_limit_is_refused():
    async with served(max_request_bytes=2000) as (inner, _, remote):
        with pytest.raises(BackendError, match="generate"):
            await remote.generate(request(prompt=[5] * 3000))
        assert len((await remote.generate(request())).token_ids) == 5
        assert not inner.running


@pytest.mark.parametrize(
    "body", [b"[1]", b"{", b"\x80", b'{"prompt_ids": [1.5], "request_id": "x", "sampling": {}}']
)
async def test_nonsense_is_this_requests_error(body):
    async with served() as (_, http, remote):
        async with send(http.url, "/v1/generate", "POST", data=body, headers=PROTOCOL) as response:
            assert "BackendError" in await response.text()
        assert (await remote.health()).ok


# --- what travels ---------------------------------------------------------------------------------


async def test_the_client_is_a_backend():
    async with served() as (_, _http, remote):
        assert isinstance(remote, RolloutBackend)


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.urls"):
        RemoteBackend("10.0.0.5:8100")


def test_requests_and_outputs_travel_unchanged():
    sampling = SamplingParams(
        max_tokens=3, temperature=0.7, top_p=0.1 + 0.2, seed=2**40, stop=("é\n",), top_k=3
    )
    sampling = replace(sampling, grammar='start: "é"')
    asked = request(session_id="s", session_ends=True, priority=-2, resumed=1)
    asked = GenerateRequest(
        **{f: getattr(asked, f) for f in asked.__dataclass_fields__}
        | {"sampling": sampling, "lora": "a"}
    )
    assert decode_request(json.loads(wire.line(encode_request(asked)))) == asked
    output = TokenOutput(
        token_ids=(1, 2),
        log_probs=(-0.1, -math.pi),
        policy_versions=(-1, 4),
        stop_reason=StopReason.STOP,
        stop_match="x",
        context_digest="d",
        cached_tokens=3,
        constrained=(True, False),
    )
    assert wire.decode_output(json.loads(wire.line(wire.encode_output(output)))) == output
    chunk = TokenChunk(
        token_ids=(2,),
        log_probs=(-math.pi,),
        policy_versions=(4,),
        constrained=(False,),
        final=output,
    )
    assert wire.decode_chunk(json.loads(wire.line(wire.encode_chunk(chunk)))) == chunk


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"priority": "high"}, ("priority='high'", "whole number")),
        ({"session_id": [1]}, "must be a string"),
        ({"prompt_ids": [5, 1.5]}, ("prompt_ids", "whole numbers")),
        ({"prompt_ids": [5, 2**31]}, ("prompt_ids", "0 to 2147483647", "5 to 2147483648")),
        ({"prompt_ids": [5, -1]}, ("prompt_ids", "from 0")),
        ({"sampling": {"max_tokens": 4, "top_k": 2**32}}, "top_k=4294967296"),
        ({"sampling": {"max_tokens": 4, "stop": [5]}}, "stop string=5"),
        ({"sampling": {"max_tokens": 4, "stop": "end"}}, "must be a tuple of strings"),
        ({"sampling": {"max_tokens": 4, "seed": "a"}}, "seed='a'"),
        ({"sampling": {"max_tokens": 4, "temperature": math.nan}}, "temperature=nan"),
    ],
)
def test_what_is_no_request_is_refused_before_an_engine_sees_it(wrong: dict, named):
    with raises(BackendError, key="generate request", value=named):
        decode_request(encode_request(request()) | wrong)


@pytest.mark.parametrize(
    "kind", [PromptTooLongError, BackendError, EngineDiedError, WeightUpdateError]
)
async def test_errors_arrive_as_what_they_were(kind):
    class Failing(ToyBackend):
        def check_request(self, request):
            raise kind("exactly this text")

    async with served(backend=Failing()) as (_, _http, remote):
        with pytest.raises(kind, match="^exactly this text$") as caught:
            await remote.generate(request())
        assert type(caught.value) is kind


async def test_a_surprise_in_the_backend_is_a_backend_error_with_its_name(caplog):
    class Broken(ToyBackend):
        def check_request(self, request):
            raise ZeroDivisionError("oops")

    async with served(backend=Broken()) as (_, _http, remote):
        with pytest.raises(BackendError, match="ZeroDivisionError: oops"):
            await remote.generate(request())
    assert "ZeroDivisionError" in caplog.text


MEDIA = {
    "image": (Image.effect_noise((20, 10), 90).convert("RGB"), Image.new("L", (3, 3), 77)),
    "video": ([Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 2), "blue")],),
}


async def test_images_are_refused_before_anything_is_sent():
    async with served() as (_, _http, remote):
        with raises(BackendError, key="server at http", value="['image']"):
            await remote.generate(request(multi_modal={"image": MEDIA["image"]}))


async def test_pictures_arrive_pixel_by_pixel():
    class Seeing(ToyBackend):
        def check_request(self, request):
            seen.append(request.multi_modal)

    seen = []
    async with served(backend=Seeing(tick_seconds=0.001, multi_modal=frozenset(MEDIA))) as (
        _,
        _http,
        remote,
    ):
        assert remote.capabilities.multi_modal == MEDIA.keys()
        await remote.generate(request(multi_modal=MEDIA))
    (got,) = seen
    for sent, arrived in zip(MEDIA["image"], got["image"], strict=True):
        np.testing.assert_array_equal(np.asarray(as_image(sent)), np.asarray(arrived))
    np.testing.assert_array_equal(as_frames(MEDIA["video"][0]), as_frames(got["video"][0]))


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"image": ["cat.png"]}, "not a PNG image in base64"),
        ({"image": [base64.b64encode(b"GIF89a").decode()]}, "not a PNG image in base64"),
        ({"video": [[7]]}, "not a PNG image in base64"),
        ({"image": 7}, "TypeError"),
        ([7], "AttributeError"),
    ],
)
def test_damaged_pictures_are_refused(media, message):
    data = encode_request(request()) | {"multi_modal": media}
    with raises(BackendError, key="generate request", value=message):
        decode_request(data)


def test_a_small_file_that_claims_to_be_a_huge_picture_is_not_unpacked():
    stream = io.BytesIO()
    Image.new("1", (9000, 8000)).save(stream, format="PNG")
    data = encode_request(request()) | {
        "multi_modal": {"image": [base64.b64encode(stream.getvalue()).decode()]}
    }
    with raises(BackendError, value="9000 x 8000"):
        decode_request(data)


def test_pictures_of_one_request_have_a_limit_together_and_none_is_unpacked(monkeypatch):
    stream = io.BytesIO()
    Image.new("1", (8000, 8000)).save(stream, format="PNG")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", None)
    encoded = base64.b64encode(stream.getvalue()).decode()
    data = encode_request(request()) | {
        "multi_modal": {"image": [encoded], "video": [[encoded, encoded]]}
    }
    with raises(BackendError, value=("4096 images", f"{1 << 27} pixels")):
        decode_request(data)


def test_what_is_no_picture_is_not_sent():
    with raises(BackendError, key="request 'r'", value="got str", fix="a PIL image or an array"):
        encode_request(request(multi_modal={"image": ["cat.png"]}))


# --- when one side goes away ----------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_slots():
    async with served() as (inner, _http, remote):
        tasks = [
            asyncio.create_task(remote.generate(request(f"r{i}", max_tokens=190))) for i in range(6)
        ]
        while len(inner.running) < 4 or len(inner.waiting) < 2:
            await asyncio.sleep(0.001)
        await remote.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60):
            while inner.running or inner.waiting:
                await asyncio.sleep(0.001)
        assert (await inner.metrics()).requests_finished == 0


async def test_a_server_that_closes_in_the_middle_is_an_engine_that_died():
    async with served(client={"silence_seconds": 300}) as (inner, http, remote):
        inner.frozen = True
        task = asyncio.create_task(remote.generate(request()))
        while not inner.waiting:
            await asyncio.sleep(0.001)
        await http.close()
        async with asyncio.timeout(60):  # less than the silence
            with raises(EngineDiedError, key=http.url, value="gone"):
                await task
        health = await remote.health()
        assert not health.ok
        assert "gone" in health.detail


async def test_a_silent_server_is_an_engine_that_died_and_a_slow_one_is_not():
    async with served(client={"silence_seconds": 4.0}, heartbeat_seconds=0.1) as (
        inner,
        http,
        remote,
    ):
        inner.frozen = True
        task = asyncio.create_task(remote.generate(request()))
        await asyncio.sleep(5.0)
        assert not task.done(), "heartbeats keep a slow request alive"
        http.heartbeat_seconds = 60
        with pytest.raises(EngineDiedError, match="is gone"):
            await asyncio.wait_for(task, 60)


async def test_a_restarted_server_is_refused_because_it_has_lost_its_weights():
    async with served() as (inner, http, remote):
        await http.close()
        restarted = RolloutServer(inner, port=http.http.port)
        await restarted.start()
        try:
            with raises(EngineDiedError, key=http.url, value="restarted"):
                await remote.generate(request())
            assert not (await remote.health()).ok
        finally:
            await restarted.close()


async def test_the_client_of_several_servers_goes_on_without_the_lost_one():
    async with served() as (first, http, first_remote), served() as (_second, _, second_remote):
        fleet = LLMServerClient(
            [AsyncServer(first_remote, name="one"), AsyncServer(second_remote, name="two")]
        )
        first.frozen = True
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        task = asyncio.create_task(
            fleet.generate("r", prompt_ids=[5, 6, 7], sampling_params=sampling)
        )
        while not first.waiting:
            await asyncio.sleep(0.001)
        await http.close()
        assert len((await task).token_ids) == 5
        assert [s.name for s in fleet.pool.servers] == ["two"]


async def test_start_waits_for_a_server_that_still_loads():
    async with served() as (inner, http, _remote):
        later = RolloutServer(inner, port=0)
        await later.start()
        url = later.url
        port = later.http.port
        await later.close()
        late = RemoteBackend(url, start_seconds=60)
        starting = asyncio.create_task(late.start())
        await asyncio.sleep(0.1)
        again = RolloutServer(inner, port=port)
        await again.start()
        await starting
        assert late.capabilities.max_concurrent == 4
        await late.close()
        await again.close()


async def test_start_gives_up_with_the_address():
    with raises(EngineDiedError, key="http://127.0.0.1:9", value="gone"):
        await RemoteBackend("http://127.0.0.1:9", start_seconds=0).start()


KILLED = """
import asyncio, sys
from jax_agent_rl.rollout.http.server import RolloutServer
from tests.served import behind_server
from tests.toy_backend import ToyBackend

async def main():
    backend = ToyBackend(tick_seconds=0.02)
    await backend.start()
    server = RolloutServer(backend)
    await server.start()
    print(server.url, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_server_process_fails_its_requests_at_once():
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        url = (await asyncio.to_thread(process.stdout.readline)).strip()
        remote = RemoteBackend(url, silence_seconds=300)
        await remote.start()
        streams = [remote.stream(request(f"r{i}", max_tokens=190)) for i in range(8)]
        await asyncio.gather(*(anext(s) for s in streams[:4]))
        reads = [asyncio.create_task(anext(s)) for s in streams[4:]]
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):  # less than the silence
            errors = await asyncio.gather(*map(drain, streams[:4]), *reads, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineDiedError}, errors
        await remote.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def drain(stream) -> None:
    async for _ in stream:
        pass


# --- weights --------------------------------------------------------------------------------------


async def test_uploaded_weights_are_checked_used_and_deleted(tmp_path: Path):
    file = tmp_path / "new.safetensors"
    file.write_text("other")
    async with served(client={"shares_disk": False}, upload_folder=tmp_path) as (inner, _, remote):
        await remote.update_weights(
            WeightUpdate(version=3, kind="safetensors", payload=[str(file)])
        )
        assert (remote.policy_version, inner.policy_version) == (3, 3)
        (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
        assert [p.name for p in folder.iterdir()] == []
        file.write_text("nonsense")
        with pytest.raises(WeightUpdateError, match="no weight set"):
            await remote.update_weights(WeightUpdate(version=4, kind="safetensors", payload=[file]))
        assert [p.name for p in folder.iterdir()] == []
        assert remote.policy_version == 3
    assert not folder.exists()


@pytest.mark.parametrize("shares_disk", [True, False])
async def test_digests_go_with_the_update_to_the_backend_that_checks_them(
    tmp_path: Path, monkeypatch, shares_disk
):
    file = tmp_path / "w.safetensors"
    seen_digests = []
    file.write_text("other")
    async with served(client={"shares_disk": shares_disk}, upload_folder=tmp_path) as (
        inner,
        _,
        remote,
    ):

        async def take(update: WeightUpdate) -> None:
            seen_digests.append(update.digests)

        monkeypatch.setattr(inner, "update_weights", take)
        digests = {"w.safetensors": read_fingerprint(file)}
        await remote.update_weights(
            WeightUpdate(version=1, kind="safetensors", payload=[file], digests=digests)
        )
    assert seen_digests == [digests]


async def test_a_local_server_reads_the_file_itself_and_an_unshared_one_is_sent_it(
    tmp_path: Path, monkeypatch
):
    file = tmp_path / "w.safetensors"
    file.write_text("other")
    update = WeightUpdate(version=1, kind="safetensors", payload=[file])
    for shares_disk in (None, False):  # as the address says, or as the user does
        async with served(weight_dir=str(tmp_path), client={"shares_disk": shares_disk}) as (
            inner,
            _http,
            remote,
        ):
            received = []

            async def take(update: WeightUpdate, received=received) -> None:
                received.append(update.payload)

            monkeypatch.setattr(inner, "update_weights", take)
            await remote.update_weights(update)
        ((path,),) = received
        assert (path == str(file)) == (shares_disk is None)


@pytest.mark.parametrize("update", [{"kind": "arrays"}, {"payload": ["/nowhere/w.safetensors"]}])
async def test_weights_that_cannot_be_sent_are_refused(update):
    async with served() as (_, _http, remote):
        fields = {"version": 1, "kind": "safetensors", "payload": []} | update
        with pytest.raises(WeightUpdateError):
            await remote.update_weights(WeightUpdate(**fields))
        assert remote.capabilities.weight_payloads == FILES


async def blocks(*parts: bytes):
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("upload", "name", "digest", "message"),
    [
        ("0" * 16, "../w.safetensors", "", "not allowed"),
        ("0" * 16, ".hidden.safetensors", "", "not allowed"),
        ("../" + "0" * 16, "w.safetensors", "", "not allowed"),
        ("0" * 16, "w.pickle", "", "not allowed"),
        ("0" * 16, "w.safetensors", "feed", "digest"),
        ("1" * 16, "big.safetensors", "", "18 bytes, more than the server's limit of 10"),
    ],
)
async def test_a_bad_upload_leaves_nothing(tmp_path: Path, upload, name, digest, message):
    uploads = Uploads(max_bytes=10, folder=tmp_path)
    data = blocks(b"x" * 9, b"y" * (9 if "big" in name else 1))
    with pytest.raises(WeightUpdateError, match=message):
        await uploads.receive(upload, name, digest, data)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []
    with pytest.raises(WeightUpdateError, match="no upload"):
        uploads.files(upload)


# --- metrics --------------------------------------------------------------------------------------


async def test_prometheus_reads_what_the_engine_did_and_who_asked():
    async with served() as (_, http, remote):
        await remote.generate(request(max_tokens=5))
        async with send(http.url, "/v1/nothing", headers=PROTOCOL) as response:
            assert response.status == 404
        async with send(http.url, "/metrics") as response:  # without headers of ours
            assert response.status == 200
            assert response.content_type == "text/plain"
            families = text_string_to_metric_families(await response.text())
    samples = {}
    for family in families:
        for sample in family.samples:
            samples[sample.name, *sample.labels.values()] = sample.value
    assert samples["jax_agent_rl_engine_generated_tokens_total", "0"] == 5
    assert samples["jax_agent_rl_engine_requests_finished_total", "0"] == 1
    assert samples["jax_agent_rl_engine_up", "0"] == 1
    assert samples["jax_agent_rl_engine_requests_running", "0"] == 0
    assert samples["jax_agent_rl_server_requests_total", "/v1/generate", "200"] == 1
    assert samples["jax_agent_rl_server_requests_total", "unknown", "404"] == 1
    assert samples["jax_agent_rl_server_requests_running",] == 1  # this one


@pytest.mark.parametrize(
    ("token", "headers", "status"), [("secret", {}, 401), (None, {"Host": "evil.example"}, 403)]
)
async def test_strangers_and_pages_under_another_name_read_no_metrics(token, headers, status):
    async with served(token=token, client={"token": token} if token else {}) as (_, http, _remote):
        async with send(http.url, "/metrics", headers=headers) as response:
            assert response.status == status
