"""Several engines on simulated devices of one process sample as one does, side by side, and change
weights together.
"""

import json

import pytest

from tests.simulated import run_on_devices

ENGINES = """
import asyncio, json, sys
from dataclasses import replace
import jax, numpy as np
from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.jetstream.data_parallel import make_backend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams
from tests.tiny import TINY, tiny_params

model = replace(TINY, vocab_size=96, num_layers=2, num_heads=8, num_kv_heads=2)
shapes = EngineShapes(
    max_model_len=60, max_concurrent_decodes=2, kv_cache_tokens=256, decode_steps=4,
    prefill_buckets=(8,),
)
PROMPTS = [np.random.default_rng(i).integers(3, 96, 5 + i).tolist() for i in range(8)]

def request(name, prompt, *, count=8, session=None, **sampling):
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0} | sampling)
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=sampling, session_id=session
    )

def engines_of(backend):
    return getattr(backend, "engines", (backend,))

def scheduler(engine):
    return engine.core.scheduler

def parts(backend):
    "Where each device keeps its part of a matrix."
    return {s.device.id: s.data.unsafe_buffer_pointer() for e in engines_of(backend)
            for s in scheduler(e).params.layers[0]["down"].addressable_shards}

def published(seed):
    "The learner's parameters on all eight devices."
    places = parameter_shardings(make_mesh(MeshConfig(fsdp=4, tensor=2)), model.parameter_shapes())
    return jax.tree.map(place, tiny_params(seed, model), places)
"""

SAMPLING = (
    ENGINES
    + """
async def outputs(mesh):
    backend = make_backend(model, published(0), shapes, mesh=mesh, seed=3)
    await backend.start()
    first = await asyncio.gather(*(
        backend.generate(request(f"g{i}", p, session=f"s{i}")) for i, p in enumerate(PROMPTS)))
    counts = [(await engine.metrics()).requests_finished for engine in engines_of(backend)]
    turn = [*PROMPTS[0], *first[0].token_ids, 7, 8]
    second = await backend.generate(
        request("turn", turn, session="s0", temperature=0.8, top_p=0.9, seed=5)
    )
    assert second.cached_tokens == len(turn) - 3, second
    old = parts(backend)
    await backend.update_weights(WeightUpdate(version=1, kind="arrays", payload=published(1)))
    in_place = old == parts(backend)
    changed = [await backend.generate(request(f"c{i}", p)) for i, p in enumerate(PROMPTS)]
    assert all(set(o.policy_versions) == {1} and o.cached_tokens == 0 for o in changed)
    await backend.sleep()
    hosts = {id(scheduler(engine).params.embed) for engine in engines_of(backend)}
    await backend.wake()
    woken = await asyncio.gather(*(
        backend.generate(request(f"w{i}", p)) for i, p in enumerate(PROMPTS)))
    metrics = await backend.metrics()
    assert metrics.recompilations == 0 and metrics.requests_finished == 8 + 1 + 8 + 8
    first_replica = await backend.tensor_samples()
    replicas = await backend.replica_samples()
    for replica in replicas:
        for name, sample in first_replica.items():
            assert np.array_equal(sample.values, replica[name].values)
    await backend.close()
    facts = {
        "counts": counts, "in place": in_place, "host copies": len(hosts),
        "replicas": 1 + len(replicas),
    }
    return [*first, second, *changed, *woken], facts

expected, _ = asyncio.run(outputs(make_engine_mesh(EngineMeshConfig())))
found, facts = asyncio.run(outputs(make_engine_mesh(EngineMeshConfig(data=4, tensor=2))))
for a, b in zip(expected, found, strict=True):
    assert a.token_ids == b.token_ids, (a, b)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
print(json.dumps(facts))
"""
)


def test_four_engines_of_two_devices_say_what_one_says():
    (line,) = run_on_devices(SAMPLING)
    facts = json.loads(line)
    assert facts["counts"] == [2, 2, 2, 2], "each engine got as many requests as the others"
    assert facts["in place"], "one program wrote the new weights of all engines over the old ones"
    assert facts["host copies"] == 1, "sleeping engines share one copy on the host"
    assert facts["replicas"] == 4, "a diagnosis reads the tensors of each"


SPECULATING = (
    ENGINES
    + """
from jax_agent_rl.jetstream import speculation
from jax_agent_rl.jetstream.speculation import Speculation

# Whether it pays is measured; here every draft is verified, and no loss is too large.
speculation.LOSS_SECONDS = float("inf")
Speculation.best_columns = lambda on, plain, chances: on.most_columns if len(chances) else None

async def outputs(mesh, most):
    speculative = replace(shapes, num_speculative_tokens=most)
    backend = make_backend(model, published(0), speculative, mesh=mesh, seed=3)
    await backend.start()

    async def every(name):
        "Each prompt in a session of its own, so that an engine sees what it has sampled before."
        return await asyncio.gather(*(
            backend.generate(
                request(f"{name}{i}", p, count=20, session=f"s{i}", temperature=0.7, seed=i)
            )
            for i, p in enumerate(PROMPTS)))

    first, second = await every("a"), await every("b")
    await backend.update_weights(WeightUpdate(version=1, kind="arrays", payload=published(1)))
    changed, again = await every("c"), await every("d")
    assert all(set(o.policy_versions) == {1} for o in [*changed, *again])
    accepted = [(await engine.metrics()).accepted_tokens for engine in engines_of(backend)]
    metrics = await backend.metrics()
    assert metrics.accepted_tokens == sum(accepted) and metrics.recompilations == 0
    await backend.close()
    return [*first, *second, *changed, *again], accepted

expected, none = asyncio.run(outputs(make_engine_mesh(EngineMeshConfig()), 0))
found, accepted = asyncio.run(outputs(make_engine_mesh(EngineMeshConfig(data=2, tensor=2)), 3))
for a, b in zip(expected, found, strict=True):
    assert a.token_ids == b.token_ids, (a, b)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
assert none == [0]
print(json.dumps(accepted))
"""
)


def test_engines_that_verify_drafts_say_what_one_says_without():
    (line,) = run_on_devices(SPECULATING)
    accepted = json.loads(line)
    assert len(accepted) == 2 and min(accepted) > 50, (
        "each engine drafts from what it has sampled itself"
    )


CONTROL = (
    ENGINES
    + """
async def raised(what, awaitable):
    try:
        await awaitable
    except (BackendError, WeightUpdateError) as error:
        return f"{what}: {error}"
    raise AssertionError(what)

async def main():
    mesh = make_engine_mesh(EngineMeshConfig(data=4))
    backend = make_backend(model, tiny_params(config=model), shapes, mesh=mesh)
    await backend.start()
    assert backend.capabilities.max_concurrent == 8
    # A wrong update: all refuse it, and all go on with the weights they have.
    wrong = tiny_params(1, replace(model, num_layers=1))
    print(await raised("wrong", backend.update_weights(
        WeightUpdate(version=1, kind="arrays", payload=wrong))))
    # One that fails in the middle of loading, on whichever engine loads for all.
    for engine in backend.engines:
        scheduler(engine).engine._load.args[0]._layer_program = None
    print(await raised("fails", backend.update_weights(
        WeightUpdate(version=1, kind="arrays", payload=tiny_params(1, model)))))
    assert {engine.policy_version for engine in backend.engines} == {0}
    assert (await backend.health()).ok
    # Sampling without seeds differs between engines.
    random = [backend.generate(request(f"r{i}", PROMPTS[0], temperature=1.0)) for i in range(4)]
    print(len({output.token_ids for output in await asyncio.gather(*random)}))
    # Aborts and pauses reach the engine that has the request.
    await backend.pause(PauseMode.KEEP)
    frozen = []
    for i, prompt in enumerate(PROMPTS):
        frozen.append(asyncio.ensure_future(backend.generate(request(f"f{i}", prompt))))
    await asyncio.sleep(0)
    print(await raised("twice", backend.generate(request("f5", PROMPTS[5]))))
    assert await backend.abort("f5") and not await backend.abort("unknown")
    print((await frozen[5]).stop_reason.value, (await backend.health()).waiting)
    await backend.resume()
    assert all(len(output.token_ids) == 8 for output in await asyncio.gather(*frozen[:5]))
    # An engine that dies takes nobody with it into a wait.
    def die():
        raise MemoryError("device lost")
    scheduler(backend.engines[2]).step = lambda **_: die()
    backend._balancer.assign = lambda name, *_: None
    backend._balancer.acquire = lambda *_: "2"
    backend._balancer.release = lambda *_: None
    print(await raised("dead", backend.generate(request("d", PROMPTS[0]))))
    print(await raised("update", backend.update_weights(
        WeightUpdate(version=1, kind="arrays", payload=tiny_params(1, model)))))
    print((await backend.health()).ok)
    await backend.close()

asyncio.run(main())
"""
)


def test_engines_agree_on_every_update_and_none_waits_for_one_that_died():
    wrong, fails, distinct, twice, aborted, dead, update, healthy = run_on_devices(
        CONTROL, devices=4
    )
    assert "wrong: the update does not fit the model served" in wrong
    assert "could not be loaded (TypeError" in fails
    assert "version 0 is still served" in fails
    assert distinct == "4", "each engine draws with a seed of its own"
    assert "'f5' is already running" in twice
    assert aborted == "aborted 7"
    assert "device lost" in dead
    assert "the engine died: MemoryError: device lost" in update
    assert healthy == "False"


@pytest.mark.parametrize("failing", ["engine", "warm_up"])
def test_a_start_that_fails_on_one_engine_fails_with_its_reason(failing: str):
    script = (
        ENGINES
        + f"""
from jax_agent_rl.jetstream import engine
kind, failing = engine.JaxEngine, "{failing}"
init, warm_up = kind.__init__, kind.warm_up

def failing_init(self, *args, **options):
    if failing == "engine" and options["replica"].number == 3:
        raise RuntimeError("no such device")
    init(self, *args, **options)
    self.number = options["replica"].number

def failing_warm_up(self, *args):
    if failing == "warm_up" and self.number == 1:
        raise RuntimeError("no such device")
    return warm_up(self, *args)

kind.__init__, kind.warm_up = failing_init, failing_warm_up

async def main():
    mesh = make_engine_mesh(EngineMeshConfig(data=4))
    backend = make_backend(model, tiny_params(config=model), shapes, mesh=mesh)
    try:
        await backend.start()
    except RuntimeError as error:
        print(error, [engine._thread._thread.is_alive() for engine in backend.engines])

asyncio.run(main())
"""
    )
    assert run_on_devices(script, devices=4) == ["no such device [False, False, False, False]"]
