"""Engines that make room for the learner, and each placement's engines; Ray is not started."""

import asyncio
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from jax_agent_rl import config
from jax_agent_rl.errors import ConfigError, EngineDiedError
from jax_agent_rl.models.sharding import MESH_AXES
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.protocol import OBJECT_STORE, WeightUpdate
from jax_agent_rl.rollout.ray_backend import RayBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import FetchingBackend, from_object_store, store
from jax_agent_rl.runtime.engine_devices import check_turns
from jax_agent_rl.runtime.placement import (
    open_engine,
    place_engines,
    reserve_actors,
    room_for_learning,
)
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.toy_backend import ToyBackend

SLEEPING = {"placement": "hybrid", "sleep_during_update": True}


def settings(**rollout: Any) -> config.Config:
    return config.build(
        {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout}
    )


class Sleeper(ToyBackend):
    def __init__(self, **options: Any) -> None:
        super().__init__(sleep=True, **options)
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False


async def serving(**backends: ToyBackend) -> LLMServerClient:
    for backend in backends.values():
        await backend.start()
    return LLMServerClient([AsyncServer(backend, name=name) for name, backend in backends.items()])


def names(client: LLMServerClient) -> set[str]:
    return {server.name for server in client.pool.servers}


async def close(client: LLMServerClient) -> None:
    await asyncio.gather(*(server.backend.close() for server in client.pool.servers))


async def test_an_engine_that_shares_nothing_needs_make_no_room():
    client = await serving(here=Sleeper())
    assert room_for_learning(settings(), client, ["here"]) is nullcontext
    assert room_for_learning(settings(placement="separate"), client, ["here"]) is nullcontext
    await close(client)


@pytest.mark.parametrize(
    "rollout", [{"sleep_during_update": True}, SLEEPING], ids=["colocated", "hybrid without others"]
)
async def test_the_only_engine_sleeps_where_it_is_if_it_may(rollout: dict[str, Any]):
    engine = Sleeper()
    client = await serving(here=engine)
    async with room_for_learning(settings(**rollout), client, ["here"])():
        assert names(client) == {"here"}
        assert engine.asleep == (rollout is not SLEEPING)
    assert not engine.asleep
    await close(client)


async def test_in_a_hybrid_it_leaves_and_its_requests_go_on_elsewhere():
    local = Sleeper()
    distant = ToyBackend()
    client = await serving(here=local, there=distant)
    sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    running = [
        asyncio.create_task(client.generate(f"r{i}", prompt_ids=[3, 4], sampling_params=sampling))
        for i in range(2)
    ]
    while not (local.running and distant.running):
        await asyncio.sleep(0)
    with pytest.raises(ArithmeticError):
        async with room_for_learning(settings(**SLEEPING), client, ["here"])():
            assert names(client) == {"there"}
            assert local.asleep
            assert not local.running
            outputs = await asyncio.gather(*running)
            raise ArithmeticError("the learner fails")
    assert [len(output.token_ids) for output in outputs] == [150, 150]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert names(client) == {"here", "there"} and not local.asleep
    await close(client)


async def test_requests_of_a_hybrid_wait_for_the_engine_that_sleeps():
    backends = {"here": Sleeper(), "there": ToyBackend()}
    for backend in backends.values():
        await backend.start()
    servers = [AsyncServer(backend, name=name) for name, backend in backends.items()]
    client = LLMServerClient(servers, wait_for_server_seconds=60.0)
    distant = backends["there"]
    sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    async with room_for_learning(settings(**SLEEPING), client, ["here"])():
        running = asyncio.create_task(
            client.generate("r", prompt_ids=[3, 4], sampling_params=sampling)
        )
        while not distant.running:
            await asyncio.sleep(0)
        (lost,) = client.pool.servers
        client.pool.mark_lost(lost, "its machine is gone")
        await asyncio.sleep(0)
        client.require_server()
        assert names(client) == set() and not running.done()
    assert names(client) == {"here"}
    assert len((await running).token_ids) == 150
    await close(client)


async def test_an_engine_that_dies_asleep_comes_back_for_its_death_to_be_seen():
    class Dying(Sleeper):
        async def wake(self) -> None:
            raise EngineDiedError("out of memory")

    client = await serving(here=Dying(), there=ToyBackend())
    async with room_for_learning(settings(**SLEEPING), client, ["here"])():
        pass
    assert names(client) == {"here", "there"}
    await close(client)


async def test_sleep_that_an_engine_cannot_do_is_refused_at_start():
    client = await serving(here=ToyBackend())
    with raises(
        ConfigError,
        key="rollout.sleep_during_update",
        value="jetstream",
    ):
        room_for_learning(settings(sleep_during_update=True), client, ["here"])
    await close(client)


async def test_colocated_engines_need_no_ray():
    async with reserve_actors(settings()) as reserved:
        assert reserved == []


@pytest.mark.parametrize(
    ("placement", "kinds"),
    [
        ("colocated", {"jetstream": ToyBackend}),
        ("separate", {"ray-0": RayBackend, "ray-1": RayBackend}),
        ("hybrid", {"jetstream": FetchingBackend, "ray-0": RayBackend, "ray-1": RayBackend}),
    ],
)
def test_each_placement_has_its_engines(placement: str, kinds: dict[str, type]):
    bundles = [] if placement == "colocated" else [{"num_cpus": 1}] * 2
    engines = place_engines(settings(placement=placement), bundles, {"jetstream": ToyBackend})
    # In this order: at equal load, requests go to the first.
    assert [(name, type(make())) for name, make in engines.items()] == list(kinds.items())


async def test_an_engine_of_this_process_takes_weights_from_the_store(tmp_path):
    (tmp_path / "w.safetensors").write_text("other")
    stored: dict[int, Any] = {}

    async def get(reference: int) -> Any:
        return stored[reference]

    engine = from_object_store(ToyBackend(weight_payloads=frozenset({"safetensors"})), get=get)
    assert engine.capabilities.weight_payloads == {OBJECT_STORE}
    files = WeightUpdate(version=4, kind="safetensors", payload=[str(tmp_path / "w.safetensors")])
    await engine.update_weights(store(files, lambda contents: stored.setdefault(0, contents) and 0))
    assert engine.policy_version == 4


def meshes(learner: range, engines: range, *, data: int = 1) -> tuple[Mesh, Mesh]:
    """Over devices of these numbers; a mesh asks nothing of them but that."""
    return tuple(
        Mesh(np.array(numbers, object).reshape(size, 1, 1, 1, -1), MESH_AXES)
        for numbers, size in ((learner, 1), (engines, data))
    )


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_who_works_at_the_same_time_shares_no_devices_to_exchange_data_over(mode: str):
    """Run on three CPU devices each, engine and learner waited for each other at the first step."""
    apart = settings(), settings(placement="hybrid")
    asynchronous, hybrid = (
        placed.model_copy(update={"trainer": placed.trainer.model_copy(update={"mode": mode})})
        for placed in apart
    )
    for learner, engine in ((range(4), range(4)), (range(8), range(4)), (range(4), range(2, 6))):
        with raises(ConfigError, key="trainer.mode", value=mode, fix="devices of its own"):
            check_turns(asynchronous, *meshes(learner, engine))
        check_turns(settings(), *meshes(learner, engine))
        check_turns(hybrid, *meshes(learner, engine))
    for learner, engine in ((range(4), range(4, 8)), (range(4), range(1)), (range(1), range(4))):
        check_turns(asynchronous, *meshes(learner, engine))
    check_turns(
        asynchronous, *meshes(range(4), range(4), data=4)
    )  # four engines, none of which exchanges anything
    with raises(ConfigError, value="2 devices"):
        check_turns(asynchronous, *meshes(range(4), range(4), data=2))


async def test_a_run_refuses_an_engine_that_its_weights_do_not_reach():
    server = "http://10.0.0.7:8100"
    for url, rollout, named in (
        (server, {}, ("rollout.backend=jetstream", "weights do not reach")),
        (
            server,
            {"placement": "separate"},
            ("rollout.placement=separate", "weights do not reach"),
        ),
        (None, {}, ("rollout.placement=colocated", "cannot start engines")),
        (
            None,
            {"backend": "remote", "urls": ["http://10.0.0.5:8100"]},
            "name a rollout server's URL",
        ),
    ):
        with raises(ConfigError, value=named):
            async with open_engine(settings(**rollout), url):
                raise AssertionError("it was accepted")


async def test_a_rollout_server_joins_a_run_of_rollout_servers_under_its_address():
    async with open_engine(
        settings(backend="remote", urls=["http://10.0.0.5:8100"]), "http://10.0.0.7:8100"
    ) as opened:
        name, make = opened
        engine = make()
        assert isinstance(engine, RemoteBackend)
        assert engine.url == name == "http://10.0.0.7:8100"
