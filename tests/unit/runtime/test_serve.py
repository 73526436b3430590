"""``serve``: contexts as long as model and cache allow; engines that are watched and replaced as in
training.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

openai = pytest.importorskip("openai")

from jax_agent_rl.chat.codec import ChatCodec  # noqa: E402
from jax_agent_rl.config import Config, build  # noqa: E402
from jax_agent_rl.jetstream.shapes import EngineShapes  # noqa: E402
from jax_agent_rl.models.hf import load_config  # noqa: E402
from jax_agent_rl.runtime import serve  # noqa: E402
from jax_agent_rl.runtime.engines import backend_factories, engine_shapes  # noqa: E402
from jax_agent_rl.runtime.serve import serve_openai, serving_config  # noqa: E402
from tests.endpoint_testbed import ASK  # noqa: E402
from tests.fakes import FakeCodec, ScriptedBackend  # noqa: E402
from tests.tiny_run import tiny_model  # noqa: E402


def configured(folder: Path, *, reads: int = 512, **rollout) -> Config:
    """A config whose model reads so many positions; its default cache has 4 contexts of 256."""
    file = tiny_model(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": reads}))
    sizes = {"max_in_flight": 4, "max_model_len": 256, **rollout}
    lengths = {"max_prompt_length": 128, "max_response_length": 128}
    tree = {"run_dir": str(folder), "data": {"train": "none"}, "agent": lengths, "rollout": sizes}
    return build(tree | {"model": {"path": str(folder)}})


@pytest.mark.parametrize(
    ("reads", "rollout", "longest"),
    [
        (512, {}, 512),
        (100_000, {}, 1024),  # the cache
        (100_000, {"jetstream": {"kv_cache_tokens": 2000}}, 1920),  # in whole pages of 128
        (128, {}, 256),  # as configured
        (512, {"deterministic": True}, 256),
        (512, {"backend": "vllm"}, 256),
    ],
)
def test_a_context_is_as_long_as_model_and_cache_allow(
    reads: int, rollout: dict, longest: int, tmp_path: Path
):
    config = configured(tmp_path, reads=reads, **rollout)
    served = serving_config(config, fixed_length=False)
    assert served.rollout.max_model_len == served.agent.max_prompt_length == longest
    trained = engine_shapes(config)
    serving = engine_shapes(served)
    assert serving.kv_cache_tokens == trained.kv_cache_tokens
    assert serving.pages * serving.page >= longest
    assert serving.prefill_buckets == trained.prefill_buckets or config.rollout.backend == "vllm"


def test_a_length_of_the_command_line_is_kept(tmp_path: Path):
    served = serving_config(configured(tmp_path, reads=4096), fixed_length=True)
    assert served.rollout.max_model_len == served.agent.max_prompt_length == 256


def test_a_served_engine_has_programs_for_short_contexts_of_a_long_one():
    trained = EngineShapes(
        max_model_len=8192,
        max_concurrent_decodes=4,
        kv_cache_tokens=8192,
        decode_steps=4,
        prefill_buckets=(256,),
    )
    assert trained.span_buckets == (2048, 4096, 6144, 8192)
    assert replace(trained, shortest_span=256).span_buckets == (
        256,
        512,
        1024,
        2048,
        4096,
        6144,
        8192,
    )
    assert replace(trained, shortest_span=256, max_model_len=352).span_buckets == (
        96,
        192,
        288,
        352,
    )


@pytest.mark.parametrize(
    ("serving", "ahead", "shortest"), [(True, False, 256), (False, None, None)]
)
def test_a_served_engine_compiles_on_demand_and_a_runs_engine_by_device(
    serving: bool, ahead: bool | None, shortest: int | None, tmp_path: Path, monkeypatch
):
    arguments: dict = {}
    monkeypatch.setattr(
        "jax_agent_rl.jetstream.data_parallel.make_backend",
        lambda model, params, shapes, **options: arguments.update(options, shapes=shapes),
    )
    config = configured(tmp_path)
    model = load_config(config.model.path)
    codec = ChatCodec.from_pretrained(config.model.path)
    factories = backend_factories(
        config, codec, weights=lambda: (model, {}), print_line=print, serving=serving
    )
    factories["jetstream"]()
    assert (arguments["compile_ahead"], arguments["shapes"].shortest_span) == (ahead, shortest)


@contextlib.asynccontextmanager
async def running(
    config: Config, backends: dict[str, list[ScriptedBackend]], codec: FakeCodec, monkeypatch
):
    """``serve`` with these engines; an engine's later backends replace those that are lost. Yields
    its address.
    """
    factories = {name: iter(engines).__next__ for name, engines in backends.items()}
    monkeypatch.setattr(serve, "check_engine", lambda config: None)
    monkeypatch.setattr(serve, "open_codec", lambda config: codec)
    monkeypatch.setattr(serve, "backend_factories", lambda config, codec, **_: factories)
    said: asyncio.Queue[str] = asyncio.Queue()
    options = {
        "host": "127.0.0.1",
        "port": 0,
        "token_env": None,
        "model_name": "policy",
        "fixed_length": False,
    }
    task = asyncio.create_task(
        serve_openai(config, policy="p", print_line=said.put_nowait, **options)
    )
    try:
        while "base_url=" not in (line := await said.get()):
            pass
        yield line.partition("base_url=")[2].removesuffix("/v1")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def recorded_turns(url: str) -> list[int]:
    """Turns of each sequence of the session ``s``; the server's own metrics can be read, too."""
    async with httpx.AsyncClient(base_url=url) as client:
        recorded = await client.get("/sessions/s", headers={"Authorization": "Bearer k"})
        assert (await client.get("/metrics")).status_code == 200
    return [len(sequence) for sequence in recorded.json()["sequences"]]


REMOTE = {"backend": "remote", "urls": ["http://127.0.0.1:1"]}


def dies_after(backend: ScriptedBackend, count: int) -> ScriptedBackend:
    """An engine that dies under the first request that has so many ids."""

    def hold(request, sampled: int) -> bool:
        if sampled >= count:
            backend.die()
        return False

    backend.hold = hold
    return backend


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_engine_dies_is_answered_by_another_one(
    stream: bool, tmp_path: Path, monkeypatch
):
    codec = FakeCodec()
    first = ScriptedBackend(codec, ["one two three four", "five"])
    second = ScriptedBackend(codec, ["one two three four", "five"])
    first.share_plans(second)
    engines = {"a": [dies_after(first, 2)], "b": [dies_after(second, 99)]}
    async with running(configured(tmp_path, **REMOTE), engines, codec, monkeypatch) as url:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="k", max_retries=0
        ) as client:
            answer = await client.chat.completions.create(model="x", messages=ASK, stream=stream)
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            else:
                text = answer.choices[0].message.content
            messages = [
                *ASK,
                {"role": "assistant", "content": text},
                {"role": "user", "content": "and"},
            ]
            assert (await client.chat.completions.create(model="x", messages=messages)).choices[
                0
            ].message.content == "five"
    assert text == "one two three four"
    assert first.requests and second.requests
    assert (
        second.requests[-1].prompt_ids[: len(first.requests[0].prompt_ids)]
        == first.requests[0].prompt_ids
    )


async def test_an_engine_that_died_is_replaced_and_its_sessions_go_on(tmp_path: Path, monkeypatch):
    codec = FakeCodec()
    old = ScriptedBackend(codec, ["one", "two"])
    new = ScriptedBackend(codec, ["one", "two"])
    old.share_plans(new)
    async with running(
        configured(tmp_path, **REMOTE), {"a": [old, new]}, codec, monkeypatch
    ) as url:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="k", max_retries=0
        ) as client:
            said = (
                (await client.chat.completions.create(model="x", messages=ASK))
                .choices[0]
                .message.content
            )
            old.die()
            messages = [
                *ASK,
                {"role": "assistant", "content": said},
                {"role": "user", "content": "and"},
            ]
            assert (await client.chat.completions.create(model="x", messages=messages)).choices[
                0
            ].message.content == "two"
        assert await recorded_turns(url) == [2]


async def test_without_an_engine_a_request_fails_and_its_session_stands(
    tmp_path: Path, monkeypatch
):
    codec = FakeCodec()
    only = ScriptedBackend(codec, ["one"])
    config = configured(tmp_path, **REMOTE, recovery_seconds=0)
    async with running(config, {"a": [only]}, codec, monkeypatch) as url:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="k", max_retries=0
        ) as client:
            await client.chat.completions.create(model="x", messages=ASK)
            only.die()
            for _ in range(2):
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(model="x", messages=ASK)
                assert (caught.value.status_code, caught.value.code) == (503, "engine_gone")
        assert await recorded_turns(url) == [1]
        async with httpx.AsyncClient() as http:
            health = await http.get(f"{url}/health")
        assert health.status_code == 503
        assert "no rollout engine is left" in health.json()["detail"]
