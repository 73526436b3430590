"""New weights for a real vLLM engine: each way to get them wrong without an error has a test."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpu_backend import broadcast
from jax_agent_rl.errors import EngineDiedError, WeightUpdateError
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import device_tensors, save_hf
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import BROADCAST, WeightUpdate
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import PauseMode
from tests.gpu_backend.conftest import (
    PROBE,
    SMALL,
    Engine,
    Reference,
    prompt_of,
    request,
    small_params,
)
from tests.messages import raises

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIXED = -1  # the reference of a model made of two


async def assert_serves(engine: Engine, seed: int, name: str = "check") -> None:
    prompt = prompt_of(8, 30)
    output = await engine.backend.generate(request(name, prompt, max_tokens=12))
    reference = engine.reference(seed)
    assert list(output.token_ids) == reference.greedy(prompt, 12)
    np.testing.assert_allclose(
        output.log_probs, reference.logprobs(prompt, output.token_ids), atol=5e-5
    )
    assert set(output.policy_versions) == {engine.backend.policy_version}


def rewrite(update: WeightUpdate, change) -> WeightUpdate:
    """The same update with its (only) file's tensors changed."""
    path = Path(update.payload[0])
    save_file(change(load_file(path)), path)
    return update


async def test_every_tensor_of_an_update_is_served(engine: Engine):
    """The CPU build packs matrices while loading; tied output matrices and fused ones are easily
    left stale.
    """
    await engine.serve(1)
    await assert_serves(engine, 1)
    largest, mean = engine.backend.updater.last_difference
    assert largest < 1e-4 and mean < 1e-5


async def test_the_prefix_cache_is_forgotten_with_the_weights(engine: Engine):
    prompt = prompt_of(9, 80)
    await engine.backend.generate(request("a", prompt))
    assert (await engine.backend.generate(request("b", prompt))).cached_tokens == 64
    await engine.serve(2)
    output = await engine.backend.generate(request("c", prompt))
    assert output.cached_tokens == 0
    assert list(output.token_ids) == engine.reference(2).greedy(prompt, 8)


async def test_weights_change_in_flight_and_each_token_says_whose_it_is(engine: Engine):
    old = engine.backend.policy_version
    prompt = prompt_of(4, 8)
    stream = engine.backend.stream(request("r", prompt, max_tokens=200, temperature=1.0, seed=5))
    chunks = [await anext(stream)]
    await asyncio.sleep(0.05)  # nobody reads: tokens of the old weights queue up
    await engine.backend.pause(PauseMode.KEEP)
    new = await engine.serve(3)
    await engine.backend.resume()
    chunks += [chunk async for chunk in stream]
    output = chunks[-1].final
    versions = np.array(output.policy_versions)
    assert list(versions) == sorted(versions)
    assert set(versions) == {old, new}
    assert len(versions) == 200
    assert sum((chunk.policy_versions for chunk in chunks), ()) == output.policy_versions
    for version, seed in [(old, 0), (new, 3)]:
        mine = versions == version
        expected = engine.reference(seed).logprobs(prompt, output.token_ids)
        # Long contexts in a changing batch: sums in another order. Other weights differ by more
        # than 0.1 somewhere.
        np.testing.assert_allclose(np.array(output.log_probs)[mine], expected[mine], atol=5e-4)


async def test_an_update_needs_no_pause(engine: Engine):
    tasks = [
        engine.backend.generate(request(f"r{i}", prompt_of(i, 8), max_tokens=150)) for i in range(4)
    ]
    running = [asyncio.create_task(task) for task in tasks]
    await asyncio.sleep(0.1)
    new = await engine.serve(1)
    outputs = await asyncio.gather(*running)
    assert all(
        len(output.token_ids) == 150 and output.policy_versions[-1] == new for output in outputs
    )
    await assert_serves(engine, 1)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_requests_that_wait_out_an_update_get_the_new_weights(
    engine: Engine, mode: PauseMode
):
    await engine.backend.pause(mode)
    waiting = asyncio.create_task(assert_serves(engine, 2))
    await asyncio.sleep(0.05)
    await engine.serve(2)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.backend.resume()
    await waiting


async def test_a_partial_update_changes_what_it_names_and_nothing_else(engine: Engine):
    """vLLM's own reload_weights spoils the rest of the model."""
    mixed = small_params(0)
    mixed["layers"]["k"] = small_params(4)["layers"]["k"]  # one part of a fused matrix
    mixed["embed"] = small_params(4)["embed"]  # tied
    whole_update = engine.files.write(mixed, engine.backend.policy_version + 1)
    update = replace(whole_update, digests={}, partial=True)

    def keep(tensors):
        return {n: t for n, t in tensors.items() if "k_proj" in n or "embed" in n}

    await engine.backend.update_weights(rewrite(update, keep))
    save_hf(engine.folder / "mixed", SMALL, mixed)
    engine.references[MIXED] = Reference(engine.folder / "mixed")
    await assert_serves(engine, MIXED)


async def test_a_whole_update_that_lacks_a_tensor_is_refused(
    engine: Engine,
):
    def drop(tensors):
        return {n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n}

    with raises(WeightUpdateError, value="1 of"):
        await engine.backend.update_weights(rewrite(engine.update(1), drop))
    await assert_serves(engine, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 1}, "not newer"),
        ({"kind": "arrays", "payload": {}}, "kind='arrays'"),
        ({"payload": ["/nowhere.safetensors"]}, "nowhere"),
    ],
)
async def test_a_wrong_update_is_refused_and_the_old_weights_serve(
    engine: Engine, change: dict, named: str
):
    with raises(WeightUpdateError, value=named):
        await engine.backend.update_weights(engine.update(1, **change))
    await assert_serves(engine, 0)


async def test_an_update_without_a_probe_is_refused(engine: Engine):
    with pytest.raises(WeightUpdateError, match="no log-prob probe"):
        await engine.backend.update_weights(engine.update(1, probe=None))
    await assert_serves(engine, 0)


def stale(tensors):
    """One matrix is another, as if it had stayed that of the version before."""
    name = "model.layers.1.mlp.down_proj.weight"
    return tensors | {name: tensors[name] * 1.02}


def stale_tied(tensors):
    name = "model.embed_tokens.weight"
    return tensors | {name: tensors[name] * 1.02}


def renamed(tensors):
    """Right bytes under wrong names, as in SkyRL #1816."""
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return tensors | {gate: tensors[up], up: tensors[gate]}


def unwritten(tensors):
    """Numbers that nobody wrote, as in Tunix #2096."""
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("spoil", [stale, stale_tied, renamed, unwritten])
async def test_weights_that_are_not_the_learners_are_never_served(engine: Engine, spoil):
    """The probe says one thing, the tensors another."""
    running = asyncio.create_task(
        engine.backend.generate(request("r", prompt_of(1, 8), max_tokens=200))
    )
    await asyncio.sleep(0.05)
    with raises(WeightUpdateError, value="not the learner's"):
        await engine.backend.update_weights(rewrite(engine.update(1), spoil))
    with pytest.raises(EngineDiedError, match="loaded wrongly"):
        await running
    await engine.backend.resume()  # what a server does in any case
    with raises(EngineDiedError, fix="send a whole update"):
        await engine.backend.generate(request("s", prompt_of(1, 8)))
    health = await engine.backend.health()
    assert not health.ok and "differ" in health.detail
    with pytest.raises(WeightUpdateError, match="partial update cannot repair"):
        await engine.backend.update_weights(engine.update(1, partial=True))
    await engine.serve(1)
    assert (await engine.backend.health()).ok
    await assert_serves(engine, 1)


async def send(engine: Engine, tensors: dict) -> None:
    """Broadcasts tensors with the probe of weights 1."""
    probe = score_probe(SMALL, small_params(1), PROBE, dtype="float32")
    version = engine.backend.policy_version + 1
    update = WeightUpdate(version=version, kind=BROADCAST, payload=tensors, probe=probe)
    async with broadcast.sending(update, receivers=1, host="127.0.0.1") as sent:
        await engine.backend.update_weights(sent)


async def test_what_is_broadcast_is_served_if_it_is_whole(engine: Engine):
    tensors = device_tensors(SMALL, small_params(1))
    assert tensors is not None
    await send(engine, tensors)
    await assert_serves(engine, 1)
    version = engine.backend.policy_version
    missing = dict(tensors)
    del missing["model.layers.0.mlp.up_proj.weight"]
    with raises(WeightUpdateError, key="model.layers.0.mlp.up_proj.weight"):
        await send(engine, missing)
    assert engine.backend.policy_version == version
    await assert_serves(engine, 1)


@pytest.mark.parametrize("spoil", [stale, renamed, unwritten])
async def test_what_is_broadcast_and_not_the_learners_is_never_served(engine: Engine, spoil):
    with raises(WeightUpdateError, value="not the learner's"):
        await send(engine, spoil(device_tensors(SMALL, small_params(1))))
    with raises(EngineDiedError, fix="send a whole update"):
        await engine.backend.generate(request("s", prompt_of(1, 8)))
    await engine.serve(1)
    await assert_serves(engine, 1)


async def test_the_probe_notices_what_vllms_own_reload_spoils(engine: Engine):
    """``reload_weights`` with some tensors leaves others without values, and says nothing."""
    folder = engine.folder / "some"
    folder.mkdir()
    tensors = load_file(engine.update(0).payload[0])
    save_file(
        {n: t for n, t in tensors.items() if "k_proj" in n},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    await engine.backend.engine.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(folder)}
    )
    await engine.backend.reset_prefix_cache()
    with pytest.raises(WeightUpdateError, match="not the learner's"):
        await engine.backend.updater.verify(score_probe(SMALL, small_params(0), PROBE), "probe")
    await engine.serve(0)
    await assert_serves(engine, 0)


async def test_a_tensor_that_did_not_land_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    placements = engine.backend.updater.placements
    name = "model.layers.0.self_attn.v_proj.weight"
    parameter, first, *layout = placements[name]
    monkeypatch.setitem(placements, name, (parameter, first - 1, *layout))
    with pytest.raises(WeightUpdateError, match=name):
        await engine.serve(1)
    monkeypatch.undo()
    await engine.serve(1)
    await assert_serves(engine, 1)


async def test_seconds_of_updates_are_counted(engine: Engine):
    old_seconds = (await engine.backend.metrics()).weight_update_seconds
    await engine.serve(1)
    assert (await engine.backend.metrics()).weight_update_seconds > old_seconds


async def test_changes_sent_to_a_server_become_the_files_that_the_engine_loads(
    engine: Engine, tmp_path: Path
):
    await engine.serve(1)
    files = FileTransport(SMALL, probe_ids=PROBE, folder=tmp_path, full_every=100)
    server = RolloutServer(engine.backend, upload_folder=tmp_path)
    await server.start()
    remote = RemoteBackend(server.url, shares_disk=False)
    await remote.start()
    try:
        base = small_params(3)
        target = small_params(4)
        for params in (base, base | {"final_norm": target["final_norm"]}):
            version = engine.backend.policy_version + 1
            update = files.write(params, version)
            await remote.update_weights(update)
        assert update.deltas, "the second brought what changed"
        largest, _ = engine.backend.updater.last_difference
        assert largest < 1e-4
        assert engine.backend.policy_version == version
    finally:
        await remote.close()
        await server.close()
        files.release()
    await engine.serve(0)
