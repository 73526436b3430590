"""Engines on all processes of a learner: they find each other, and serve what all of them have
trained.
"""

import asyncio
import json
import subprocess
from pathlib import Path

import jax
import pytest

from jax_agent_rl.config import Config, build
from jax_agent_rl.errors import BackendError, ModelError, WeightUpdateError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import MESH, WeightUpdate
from jax_agent_rl.runtime.identity import named_content
from jax_agent_rl.runtime.multihost_engines import (
    LEARNER_MODELS,
    HostEngine,
    HostRegistry,
    HostTransport,
    join_hosts,
    own_address,
    publish_own_models,
    require_equal_models,
)
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.ports import free_port
from tests.simulated import environment_with
from tests.tiny import TINY, tiny_params
from tests.tiny_run import SMALL, tiny_recipe
from tests.toy_backend import ToyBackend, to_text
from tests.warm import python


class Store:
    """What jax's coordination service keeps, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


class Engine(ToyBackend):
    """Records the weights it was given; may fail to start."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.taken = []
        self.closed = False

    async def start(self) -> None:
        if self.broken:
            raise MemoryError("2 GB are missing")
        await super().start()

    async def update_weights(self, update: WeightUpdate) -> None:
        assert update.kind == "arrays"
        self.taken.append(update.payload)
        self._version = update.version

    def give_up_weights(self, version: int) -> str:
        return f"room for {version}"

    async def close(self) -> None:
        self.closed = True
        await super().close()


def copies() -> HostTransport:
    return HostTransport(lambda params, old: {"copy of": params, "in": old})


async def fleet(engine: Engine, transport: HostTransport) -> LLMServerClient:
    client = LLMServerClient(decode_text=to_text)
    await client.pool.start({"host-0": lambda: transport.into(engine)})  # type: ignore[dict-item]
    return client


async def test_all_engines_fetch_the_version_of_their_own_process():
    store = Store()
    engines = [Engine(), Engine()]
    buffers = [copies(), copies()]
    second_host = HostEngine(
        lambda: buffers[1].into(engines[1]),  # type: ignore[arg-type,return-value]
        HostRegistry(store),
        number=1,
        host="127.0.0.1",
    )
    client = await fleet(engines[0], buffers[0])
    try:
        assert await join_hosts(client, registry=HostRegistry(store), other_processes=1) == [
            "host-1"
        ]
        for number, buffer in enumerate(buffers):
            buffer.put(1, f"parameters of process {number}")
        await client.pool.update_weights(WeightUpdate(version=1, kind=MESH, payload=None))
        assert [engine.taken for engine in engines] == [
            [{"copy of": f"parameters of process {i}", "in": "room for 1"}] for i in (0, 1)
        ]
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        asked = (
            client.generate(f"r{i}", prompt_ids=[3, 4], sampling_params=sampling) for i in range(4)
        )
        outputs = await asyncio.gather(*asked)
        assert {output.policy_versions for output in outputs} == {(1,) * 5}
        assert len({o.token_ids for o in outputs}) == 1
        assert [(await s.backend.metrics()).requests_finished for s in client.pool.servers] == [
            2,
            2,
        ]
    finally:
        await client.pool.close()
        await asyncio.to_thread(second_host.close)
    assert engines[1].closed


async def test_an_engine_that_cannot_start_ends_the_start_with_its_reason():
    store = Store()
    buffer = copies()
    broken_host = HostEngine(
        lambda: Engine(broken=True), HostRegistry(store), number=3, host="127.0.0.1"
    )
    client = await fleet(Engine(), buffer)
    try:
        with raises(BackendError, key="process 3", value="MemoryError: 2 GB"):
            await join_hosts(client, registry=HostRegistry(store), other_processes=1)
    finally:
        await client.pool.close()
        await asyncio.to_thread(broken_host.close)


class GoneStore(Store):
    """The service after its process has ended."""

    def key_value_set(self, key: str, value: str) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")


class LostStore(GoneStore):
    """The same before the token was read."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")


@pytest.mark.parametrize("store", [GoneStore(), LostStore()], ids=["register", "token"])
async def test_an_engine_whose_process_0_has_ended_says_so_without_a_trace(
    store: Store, caplog: pytest.LogCaptureFixture
):
    store.values["jax_agent_rl/token/0"] = "secret"
    engine = Engine()
    host_engine = HostEngine(lambda: engine, HostRegistry(store), number=2, host="127.0.0.1")
    async with asyncio.timeout(30):
        while not caplog.records:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(host_engine.close)

    (record,) = caplog.records
    assert "process 0 ended before process 2 had an engine" in record.getMessage()
    assert record.exc_info is None
    assert engine.closed


async def test_an_engine_that_nobody_wants_any_more_ends():
    engine = Engine()
    host_engine = HostEngine(lambda: engine, HostRegistry(Store()), number=1, host="127.0.0.1")
    await asyncio.to_thread(host_engine.close)
    assert engine.closed or not engine.taken  # closed, or never made


async def test_a_version_that_is_not_in_the_process_is_refused():
    engine = Engine()
    buffer = copies()
    served = buffer.into(engine)  # type: ignore[arg-type]
    with raises(WeightUpdateError, key="version 1", value="has none"):
        await served.update_weights(WeightUpdate(version=1, kind=MESH, payload=None))
    buffer.put(1, "parameters")  # type: ignore[arg-type]
    with raises(WeightUpdateError, key="version 2", value="has version 1"):
        await served.update_weights(WeightUpdate(version=2, kind=MESH, payload=None))
    with raises(WeightUpdateError, value="'arrays'", fix="'mesh'"):
        await served.update_weights(WeightUpdate(version=2, kind="arrays", payload={}))
    assert engine.taken == []


def test_a_host_is_reached_in_the_network_of_process_0():
    assert own_address("127.0.0.1:1234") == "127.0.0.1"
    assert own_address("auto").count(".") == 3


@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_two_processes_sample_what_all_four_devices_have_trained(tmp_path: Path, axis: str):
    engine = SMALL | {"mesh": {axis: 2}}
    recipe = tiny_recipe(
        tmp_path, rollout={"max_in_flight": 2, "max_model_len": 48, "jetstream": engine}
    )
    port = free_port()
    settings = ["learner.mesh.fsdp=4", "learner.multihost.num_processes=2"]
    settings.append(f"learner.multihost.coordinator=127.0.0.1:{port}")
    environment = environment_with(2)
    started = []
    for number in range(2):
        arguments = [str(recipe), *settings, f"learner.multihost.process_id={number}"]
        command = [*python(), "-m", "tests.unit.runtime.host_engine_worker", *arguments]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        outputs = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0, 0], "\n".join(err[-3000:] for _, err in outputs)
    lines = [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]
    assert [(line["server"], line["versions"]) for line in lines] == [
        (f"host-{host}", [version]) for version in range(2) for host in (0, 1)
    ], outputs[0][1][-3000:]
    for line in lines:
        assert line["found"] == pytest.approx(line["expected"], abs=1e-4)
        assert line["recompilations"] == 0
        assert line["other"] == pytest.approx(line["expected"], abs=1e-4)
    assert lines[0]["found"] != lines[2]["found"], "the weights did not change"


async def test_a_process_with_another_model_is_named(tmp_path):
    """Hosts read their own disks: one with an older model would train a mixture of both."""
    for name, seed in (("zero", 0), ("one", 0), ("two", 1)):
        save_hf(tmp_path / name, TINY, tiny_params(seed))

    def config(name: str) -> Config:
        return build(
            {"run_dir": "r", "model": {"path": str(tmp_path / name)}, "data": {"train": "t"}}
        )

    store = Store()
    content = named_content(config("zero"), LEARNER_MODELS)
    publish_own_models(config("one"), registry=HostRegistry(store), number=1)
    await require_equal_models(content, registry=HostRegistry(store), other_processes=1)
    publish_own_models(config("two"), registry=HostRegistry(store), number=2)
    with raises(ModelError, key="process 2", fix="model.path"):
        await require_equal_models(content, registry=HostRegistry(store), other_processes=2)
    with pytest.raises(ModelError, match="gone"):
        publish_own_models(config("gone"), registry=HostRegistry(store), number=2)
    with raises(ModelError, key="process 2"):
        await require_equal_models(content, registry=HostRegistry(store), other_processes=2)
