"""What runs inside an actor, without one."""

import asyncio
from pathlib import Path

import pytest

from jax_agent_rl.errors import PromptTooLongError, WeightUpdateError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.ray_backend import EngineHost
from jax_agent_rl.rollout.transport import from_object_store, store
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.fingerprints import digest
from tests.messages import raises
from tests.toy_backend import VOCAB, ToyBackend


def request(name: str = "a", *, length: int = 3, max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(3 + i % (VOCAB - 5) for i in range(length)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


async def started(make=ToyBackend) -> EngineHost:
    host = EngineHost(make)
    answer = await host.start()
    assert answer.error is None
    return host


async def test_it_answers_with_capabilities_outputs_and_versions():
    host = EngineHost(ToyBackend)
    assert (await host.start()).value.max_model_len == 200
    answer = await host.call("generate", request())
    assert len(answer.value.token_ids) == 5
    assert answer.policy_version == 0
    await host.call("close")


async def test_errors_of_the_engine_come_back_as_what_they_are():
    host = await started()
    answer = await host.call("generate", request(length=300))
    with raises(PromptTooLongError, value="300 ids"):
        raise wire.decode_error(answer.error)
    assert (await host.call("sleep")).error["type"] == "NotImplementedError"
    *_, last = [answer async for answer in host.stream(request(length=300))]
    assert last.error["type"] == "PromptTooLongError"
    await host.call("close")


async def test_an_engine_that_cannot_start_says_why():
    def broken():
        raise OSError("no such device")

    host = EngineHost(broken)
    assert (await host.start()).error == {
        "type": "BackendError",
        "message": "OSError: no such device",
    }
    assert (await host.call("generate", request())).error["type"] == "BackendClosedError"


async def test_stored_weights_are_taken_and_damaged_ones_leave_the_old_ones_served(tmp_path: Path):
    (tmp_path / "w.safetensors").write_text("other")

    async def get(reference):
        return reference

    def fetching():
        engine = ToyBackend(weight_payloads=frozenset({"safetensors"}))
        return from_object_store(engine, get=get)

    host = await started(fetching)
    files = WeightUpdate(
        version=1,
        kind="safetensors",
        payload=[str(tmp_path / "w.safetensors")],
        digests={"w.safetensors": digest(b"other")},
    )
    update = store(files, lambda contents: contents)
    _, stored = update.payload
    weights = stored["w.safetensors"]
    old_ids = (await host.call("generate", request("before"))).value.token_ids

    stored["w.safetensors"] = weights ^ 1
    answer = await host.call("update_weights", update)
    assert isinstance(wire.decode_error(answer.error), WeightUpdateError)
    assert answer.policy_version == 0
    assert (await host.call("generate", request("still"))).value.token_ids == old_ids

    stored["w.safetensors"] = weights
    assert (await host.call("update_weights", update)).policy_version == 1
    assert (await host.call("generate", request("after"))).value.token_ids != old_ids
    await host.call("close")


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
async def test_a_cancelled_call_frees_its_slot(streamed: bool):
    backend = ToyBackend()
    host = await started(lambda: backend)

    async def run():
        if not streamed:
            return await host.call("generate", request(max_tokens=150))
        return [answer async for answer in host.stream(request(max_tokens=150))]

    task = asyncio.create_task(run())
    while not backend.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not backend.running
    await host.call("close")
