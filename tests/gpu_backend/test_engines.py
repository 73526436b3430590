"""Engines of other kinds: tensor parallel, dying, and not starting at all."""

import asyncio
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from gpu_backend.settings import argument_names
from jax_agent_rl.errors import BackendClosedError, ConfigError, EngineDiedError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import FILES, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import PauseMode, SamplingParams
from tests.gpu_backend.conftest import (
    ENGINE_ARGS,
    PROBE,
    SMALL,
    Engine,
    Reference,
    prompt_of,
    request,
    running,
)
from tests.messages import raises

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = prompt_of(8, 30)


async def test_two_tensor_parallel_ranks_serve_and_take_weights(tmp_path: Path):
    config = SMALL.__class__(**(vars_of(SMALL) | {"num_kv_heads": 2}))
    params = [tiny(config, seed) for seed in (0, 1)]
    for folder, each in zip(("old", "new"), params, strict=True):
        save_hf(tmp_path / folder, config, each)
    files = FileTransport(config, probe_ids=PROBE, folder=tmp_path)
    async with running(tmp_path / "old", tensor_parallel_size=2) as backend:
        first = await backend.generate(request("a", PROMPT))
        await backend.update_weights(files.write(params[1], 2))
        second = await backend.generate(request("b", PROMPT))
    assert list(first.token_ids) == Reference(tmp_path / "old").greedy(PROMPT, 8)
    assert list(second.token_ids) == Reference(tmp_path / "new").greedy(PROMPT, 8)


def vars_of(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def tiny(config, seed: int):
    from tests.tiny import tiny_params

    return tiny_params(seed, config)


def engine_cores() -> set[psutil.Process]:
    """vLLM's engine processes that this one has started."""
    return {
        child for child in psutil.Process().children(recursive=True) if "EngineCore" in child.name()
    }


async def test_requests_of_an_engine_that_dies_go_on_in_another(model_folder: Path):
    earlier_cores = engine_cores()
    sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    async with running(model_folder) as dying:
        (core,) = engine_cores() - earlier_cores
        async with running(model_folder) as second:
            client = LLMServerClient(
                [AsyncServer(dying, name="dying"), AsyncServer(second, name="other")]
            )
            prompts = [prompt_of(i, 30) for i in range(6)]
            tasks = [
                asyncio.create_task(
                    client.generate(f"r{i}", prompt_ids=prompt, sampling_params=sampling)
                )
                for i, prompt in enumerate(prompts)
            ]
            while not (await dying.health()).running:
                await asyncio.sleep(0.001)
            core.kill()
            outputs = await asyncio.gather(*tasks)
            assert [server.name for server in client.pool.servers] == ["other"]
    reference = Reference(model_folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 150
        assert list(output.token_ids[:8]) == reference.greedy(prompt, 8)


async def test_an_engine_that_dies_fails_its_requests_and_says_so(model_folder: Path):
    earlier_cores = engine_cores()
    async with running(model_folder) as backend:
        stream = backend.stream(request("r", PROMPT, max_tokens=200))
        await anext(stream)
        (core,) = engine_cores() - earlier_cores
        core.kill()
        with pytest.raises(EngineDiedError, match="the vLLM engine died"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDiedError):
            await backend.generate(request("s", PROMPT))
        with pytest.raises(EngineDiedError):
            await backend.update_weights(WeightUpdate(version=2, kind=FILES, payload=[]))
        assert not (await backend.health()).ok


async def test_too_little_memory_is_a_config_error_with_the_keys_to_change(model_folder: Path):
    with raises(ConfigError, key="kv_cache_gib", value=("too little memory", "4e-06")):
        async with running(model_folder, kv_cache_gib=4e-6):
            pass


async def test_an_unknown_setting_is_a_config_error(model_folder: Path):
    with pytest.raises(ConfigError, match="no_such_argument"):
        async with running(model_folder, engine_args={"no_such_argument": 1}):
            pass


async def test_arguments_read_from_its_source_are_those_vllm_has():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert argument_names() == {argument.name for argument in fields(AsyncEngineArgs)}


async def test_further_arguments_reach_the_engine(shared: Engine):
    scheduler = shared.backend.engine.vllm_config.scheduler_config
    assert scheduler.max_num_batched_tokens == ENGINE_ARGS["max_num_batched_tokens"]


async def test_a_closed_engine_ends_its_requests_and_leaves_no_process(model_folder: Path):
    earlier_cores = engine_cores()
    async with running(model_folder) as backend:
        stream = backend.stream(request("running", PROMPT, max_tokens=200))
        await anext(stream)
        new = [
            asyncio.create_task(backend.generate(request(f"new {i}", PROMPT, max_tokens=200)))
            for i in range(20)
        ]
        await asyncio.sleep(0)  # they are on their way to the engine, which has not heard of them
        await backend.close()
        with pytest.raises(BackendClosedError):
            async for _ in stream:
                pass
        ended = await asyncio.gather(*new, return_exceptions=True)
        assert {type(error) for error in ended} == {BackendClosedError}
        with pytest.raises(BackendClosedError):
            await backend.generate(request("s", PROMPT))
        with pytest.raises(BackendClosedError):
            await backend.pause(PauseMode.KEEP)
    assert not engine_cores() - earlier_cores
