"""Weights that engines in other processes pull from a learner's devices."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import jax
import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.offered import OfferedParams
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.wire import PROTOCOL_HEADER, PROTOCOL_VERSION, encode_ticket
from jax_agent_rl.rollout.protocol import PULL, GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import WeightTransport
from jax_agent_rl.runtime.transports import make_transport
from jax_agent_rl.testing.conformance.backends import BackendOptions, select_backend
from jax_agent_rl.testing.conformance.models import prepare_folders
from jax_agent_rl.testing.conformance.runner import run_suite
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.pull_tickets import PullOffer, PullTicket
from tests.messages import raises
from tests.served import behind_server
from tests.simulated import environment_with
from tests.tiny import TINY, TWO_SLOTS, greedy, tiny_params
from tests.toy_backend import ToyBackend
from tests.warm import python

PROMPT = (5, 6, 7)
TOKEN = "correct horse"
EVEN = replace(TINY, vocab_size=96)
"""Its vocabulary can be divided among two devices."""
UNREACHABLE = "http://127.0.0.1:1"
WORKER = "tests.unit.runtime.pulled_engine_worker"


def configured(**rollout: Any):
    rollout = {"backend": "remote", "urls": [UNREACHABLE]} | rollout
    rollout["weight_transport"] = "jax_transfer"
    return build(
        {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}, "rollout": rollout}
    )


@dataclass
class Parameters:
    """A learner that has been trained."""

    params: Params


@contextlib.contextmanager
def worker(folder: Path, *options: str) -> Iterator[str]:
    """Address of an engine of two devices, in a process that ends afterwards."""
    process = subprocess.Popen(
        [*python(), "-m", WORKER, str(folder), *options],
        env=environment_with(2) | {"ROLLOUT_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the engine did not start"
        yield url
    finally:
        process.kill()
        process.communicate()


async def sampled(backend: Any, name: str) -> list[int]:
    """What an engine samples greedily."""
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling)
    output = await backend.generate(request)
    return list(output.token_ids)


def expected(version: int) -> list[int]:
    return greedy(tiny_params(version, EVEN), PROMPT, 6, frozenset())


async def publish(transport: WeightTransport, client: LLMServerClient, version: int) -> None:
    update = transport.offer(Parameters(tiny_params(version, EVEN)), version)
    assert update.lasting and update.digests and update.probe is not None
    await client.pool.update_weights(update)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", EVEN, tiny_params(config=EVEN))
    return tmp_path / "model"


async def test_an_engine_of_another_process_serves_what_it_pulls_also_if_it_joins_late(
    folder: Path,
):
    client = LLMServerClient()
    transport = make_transport(configured(), EVEN, client.pool, probe_ids=[3, 4, 5])
    with worker(folder, "--devices=2") as first_url, worker(folder) as late_url:
        try:
            await client.pool.start({"first": lambda: RemoteBackend(first_url, token=TOKEN)})
            for version in range(2):
                await publish(transport, client, version)
                (server,) = client.pool.servers
                assert await sampled(server.backend, f"r{version}") == expected(version)

            await client.pool.join("late", lambda: RemoteBackend(late_url, token=TOKEN))
            late = client.pool.servers[-1].backend
            assert late.policy_version == 1
            assert await sampled(late, "late") == expected(1)
        finally:
            transport.release()
            await client.pool.close()


async def test_an_engine_that_dies_during_a_pull_takes_nothing_with_it(folder: Path):
    """The other one has the version, and the learner publishes the next."""
    client = LLMServerClient()
    transport = make_transport(configured(), EVEN, client.pool, probe_ids=[3, 4, 5])
    with worker(folder) as url, worker(folder, "--dies") as dying_url:
        factories = {"lives": url, "dies": dying_url}
        try:
            await client.pool.start(
                {name: connecting(address) for name, address in factories.items()}
            )
            for version in range(2):
                await publish(transport, client, version)
                (server,) = client.pool.servers
                assert server.name == "lives"
                assert await sampled(server.backend, f"r{version}") == expected(version)
        finally:
            transport.release()
            await client.pool.close()


def connecting(url: str):
    return lambda: RemoteBackend(url, token=TOKEN)


def test_a_server_of_another_process_obeys_the_protocol_with_weights_that_it_pulls(
    tmp_path: Path,
):
    pytest.importorskip("torch")
    folders = prepare_folders(None, tmp_path)
    checks = ["weights-take-effect", "weights-round-trip", "update-in-flight"]
    checks += ["stale-version-refused", "bad-weights-refused"]
    with worker(folders.base) as url:
        options = BackendOptions(
            folders=folders, max_model_len=128, max_concurrent=2, url=url, token=TOKEN
        )
        report = run_suite(select_backend("remote", options), only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 5, report.results


# --- refusals -------------------------------------------------------------------------------------


@dataclass
class Altered(PullOffer):
    """An offer whose tickets say something else."""

    offer: PullOffer
    fields: Mapping[str, Any]

    def ticket(self, interface: str) -> PullTicket:
        return replace(self.offer.ticket(interface), **self.fields)


async def test_the_old_version_is_served_while_the_new_one_cannot_be_pulled():
    backend = JetStreamBackend(EVEN, tiny_params(0, EVEN), TWO_SLOTS, version=0)
    async with behind_server(backend) as (_, remote):
        pool = LLMServerClient([AsyncServer(remote)]).pool
        transport = make_transport(configured(), EVEN, pool, probe_ids=[3, 4, 5])
        update = transport.offer(Parameters(tiny_params(1, EVEN)), 1)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]

        gone = Altered(update.payload, {"port": port})
        with raises(WeightUpdateError, key=f"127.0.0.1:{port}", fix="weight_transport=files"):
            await remote.update_weights(replace(update, payload=gone))
        other_model = Altered(update.payload, {"params": {}})
        with raises(WeightUpdateError, key="embed", value="missing"):
            await remote.update_weights(replace(update, payload=other_model, digests={}))
        with raises(WeightUpdateError, key="the ticket", value="xxh3_128:0"):
            await remote.update_weights(replace(update, digests={"offer": "xxh3_128:0"}))
        with raises(WeightUpdateError, key="payload", value="str"):
            await remote.update_weights(replace(update, payload="http://10.0.0.1"))

        assert backend.policy_version == 0
        assert await sampled(remote, "old") == expected(0)
        await remote.update_weights(update)
        assert await sampled(remote, "new") == expected(1)
        transport.release()


async def test_an_engine_pulls_from_the_machine_that_asks_it_and_from_no_other():
    """A ticket has no address: nobody who may update weights leads an engine elsewhere."""
    received: list[PullTicket] = []

    class Puller(ToyBackend):
        async def load(self, update: WeightUpdate) -> None:
            received.append(update.payload)

    offer = OfferedParams(tiny_params(), version=1)
    async with behind_server(Puller(weight_payloads=frozenset({PULL}))) as (server, remote):
        await remote.update_weights(WeightUpdate(version=1, kind=PULL, payload=offer))
        body = {"version": 2, "kind": PULL} | {"host": "10.0.0.1", "interface": "10.0.0.1"}
        body["ticket"] = encode_ticket(offer.ticket("127.0.0.1")) | {"host": "10.0.0.1"}
        headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
        async with aiohttp.ClientSession(headers=headers) as client:
            url = f"{server.url}/v1/update_weights"
            async with client.post(url, json=body) as answer:
                assert "error" not in await answer.text()
    offer.release()
    assert [(ticket.host, ticket.interface) for ticket in received] == [("127.0.0.1",) * 2] * 2


async def test_a_version_that_is_not_offered_any_longer_is_not_asked_for():
    offer = OfferedParams(tiny_params(), version=1)
    offer.release()
    async with behind_server(ToyBackend(weight_payloads=frozenset({PULL}))) as (server, remote):
        with raises(WeightUpdateError, key="version 1", value="not offered any longer"):
            await remote.update_weights(WeightUpdate(version=1, kind=PULL, payload=offer))

        headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
        async with aiohttp.ClientSession(headers=headers) as client:
            body = {"version": 1, "kind": PULL}
            async with client.post(f"{server.url}/v1/update_weights", json=body) as answer:
                assert "needs a ticket" in await answer.text()


def test_engines_that_cannot_pull_are_named_before_anything_is_offered():
    pool = LLMServerClient([AsyncServer(ToyBackend(weight_payloads=frozenset({"toy"})))]).pool
    transport = make_transport(configured(), EVEN, pool, probe_ids=[3, 4, 5])
    with raises(
        WeightUpdateError,
        key="rollout.weight_transport=jax_transfer",
        value="['toy']",
        fix=("rollout.backend=jetstream", "rollout.weight_transport=files"),
    ):
        transport.offer(Parameters(tiny_params(0, EVEN)), 1)


def test_engines_that_are_no_servers_are_refused_with_the_configuration():
    with raises(
        ConfigError,
        key="rollout.weight_transport=jax_transfer",
        value="rollout.backend=jetstream",
        fix="rollout.backend=remote",
    ):
        configured(backend="jetstream", urls=[])


def test_a_folder_through_which_nothing_would_pass_is_refused_with_the_configuration():
    with raises(
        ConfigError,
        key="rollout.weight_dir=/weights",
        value="rollout.weight_transport=jax_transfer",
        fix=("remove rollout.weight_dir", "rollout.weight_transport=files or tensorstore"),
    ):
        configured(weight_dir="/weights")


def test_a_learner_of_several_processes_is_told_what_to_use_instead(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with raises(ConfigError, value="2", fix=("rollout.weight_transport=files", "tensorstore")):
        make_transport(configured(), EVEN, LLMServerClient().pool, probe_ids=[3, 4, 5])
