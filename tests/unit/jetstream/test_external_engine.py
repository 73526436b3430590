"""An engine of JetStream's later API under our backend, against full forward passes without a
cache.
"""

import asyncio
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.external_engine import (
    ExternalBackend,
    ExternalEngineAdapter,
    load_engine_function,
)
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, digest_ids
from tests.later_api import LaterApiEngine, external_engine, make_external_engine
from tests.messages import raises
from tests.tiny import TINY, full_logits, greedy, logprobs_of, tiny_params

SHAPES = EngineShapes(
    max_model_len=60,
    max_concurrent_decodes=3,
    kv_cache_tokens=192,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
PARAMS = tiny_params()


@contextlib.asynccontextmanager
async def running(make=make_external_engine, **options):
    backend = ExternalBackend(TINY, tiny_params(), SHAPES, make_external=make, version=1, **options)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def request(name: str, prompt, *, max_tokens=8, **sampling) -> GenerateRequest:
    settings = {"temperature": 1.0, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **settings),
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, length).tolist()


def exact_logprobs_of(prompt, sampled):
    """Compute ``logprobs_of`` with layers in float64.

    The rounding of a pass in float32 is as large as the engine's.
    """
    with jax.enable_x64(True):
        return logprobs_of(
            jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), PARAMS), prompt, sampled
        )


async def test_more_requests_than_slots_get_the_logprobs_of_full_passes():
    prompts = [prompt_of(i, 1 + (11 * i) % 40) for i in range(8)]
    async with running() as backend:
        outputs = await asyncio.gather(
            *(
                backend.generate(request(f"r{i}", p, max_tokens=5 + i))
                for i, p in enumerate(prompts)
            )
        )
        metrics = await backend.metrics()
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert len(output.token_ids) == 5 + i
        assert output.stop_reason is StopReason.LENGTH
        np.testing.assert_allclose(
            output.log_probs, exact_logprobs_of(prompt, output.token_ids), atol=2e-5
        )
        assert output.context_digest == digest_ids([*prompt, *output.token_ids])
    assert metrics.generated_tokens == sum(range(5, 13))
    assert metrics.prefill_tokens == sum(map(len, prompts))


async def test_greedy_and_random_requests_take_turns_and_nobody_is_overtaken():
    prompt = prompt_of(1, 9)
    order = []

    async def run(backend, name, **options):
        output = await backend.generate(request(name, prompt, **options))
        order.append(name)
        return output

    async with running() as backend:
        await backend.pause(PauseMode.KEEP)
        tasks = [
            asyncio.ensure_future(run(backend, "random", max_tokens=12)),
            asyncio.ensure_future(run(backend, "greedy", temperature=0.0)),
            asyncio.ensure_future(run(backend, "late", max_tokens=2)),
        ]
        while (await backend.health()).waiting < 3:
            await asyncio.sleep(0)
        await backend.resume()
        _, best, _ = await asyncio.gather(*tasks)
    assert list(best.token_ids) == greedy(PARAMS, prompt, 8, frozenset())
    np.testing.assert_allclose(
        best.log_probs, logprobs_of(PARAMS, prompt, best.token_ids), atol=2e-5
    )
    assert order == ["random", "greedy", "late"]


async def test_ids_behind_a_stop_are_never_delivered_and_the_slot_is_given_back():
    prompt = prompt_of(9, 10)
    expected = greedy(PARAMS, prompt, 8, frozenset())
    stop = next(i for i in expected[1:] if i != expected[0])
    engines = []

    def make(model, shapes):
        engines.append(LaterApiEngine(model, shapes))
        return external_engine(engines[0])

    async with running(make) as backend:
        stopped = request("r", prompt, temperature=0.0, stop_token_ids=(stop,))
        chunks = [chunk async for chunk in backend.stream(stopped)]
    final = chunks[-1].final
    assert list(final.token_ids) == expected[: expected.index(stop) + 1]
    assert sum((c.token_ids for c in chunks), ()) == final.token_ids
    assert final.stop_reason is StopReason.STOP
    assert engines[0].freed[-1] == 0


async def test_servers_with_other_seeds_sample_other_ids():
    prompt = prompt_of(3, 10)
    sampled = []
    for seed in (1, 2):
        async with running(seed=seed) as backend:
            sampled.append((await backend.generate(request("r", prompt, max_tokens=16))).token_ids)
    assert sampled[0] != sampled[1]


async def test_sampled_ids_follow_the_models_distribution():
    prompt = prompt_of(4, 6)
    count = 300
    async with running() as backend:
        outputs = await asyncio.gather(
            *(backend.generate(request(f"r{i}", prompt, max_tokens=1)) for i in range(count))
        )
    logits = full_logits(PARAMS, prompt)[-1].astype(np.float64)
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    seen = np.bincount([o.token_ids[0] for o in outputs], minlength=TINY.vocab_size) / count
    # The total variation of an empirical distribution: E <= sum(sqrt(p(1-p)/n))/2. Twice that is
    # far outside.
    assert np.abs(seen - expected).sum() / 2 < np.sqrt(expected * (1 - expected) / count).sum()


async def test_weights_change_under_frozen_requests_and_every_id_names_its_version():
    prompt = prompt_of(5, 8)
    new_params = tiny_params(1)
    async with running() as backend:
        task = asyncio.ensure_future(backend.generate(request("r", prompt, max_tokens=50)))
        while (await backend.metrics()).generated_tokens < 4:
            await asyncio.sleep(0)
        await backend.pause(PauseMode.KEEP)
        await backend.update_weights(WeightUpdate(version=2, kind="arrays", payload=new_params))
        jax.tree.map(lambda x: x.delete(), new_params)  # the learner's next step takes its memory
        await backend.resume()
        output = await task
        fresh = await backend.generate(request("s", prompt))
    assert set(output.policy_versions) == {1, 2}
    assert list(output.policy_versions) == sorted(output.policy_versions)
    np.testing.assert_allclose(
        fresh.log_probs, logprobs_of(tiny_params(1), prompt, fresh.token_ids), atol=2e-5
    )


def test_arrays_that_to_params_passes_through_are_copied():
    params = tiny_params()
    engine = ExternalEngineAdapter(
        external_engine(LaterApiEngine(TINY, SHAPES), to_params=lambda tree: tree), TINY, SHAPES
    )
    served = engine.load_params(params)
    jax.tree.map(lambda x: x.delete(), params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(served))


async def test_what_the_engine_cannot_do_is_not_declared_and_refused():
    async with running(
        lambda m, s: external_engine(LaterApiEngine(m, s), greedy=None, max_new_tokens=20)
    ) as backend:
        capabilities = backend.capabilities
        assert not capabilities.seeds
        assert not capabilities.prefix_reuse
        assert not capabilities.any_sampling
        prompt = prompt_of(6, 5)
        for named, bad in (
            ({"key": "temperature", "value": 0.7}, {"temperature": 0.7}),
            ({"key": "top_p", "value": 0.9}, {"top_p": 0.9}),
            ({"key": "top_k", "value": 5}, {"top_k": 5}),
            ({"key": "temperature", "value": (0, "no greedy mode")}, {"temperature": 0.0}),
            ({"value": ("21 ids", "holds 20")}, {"max_tokens": 21}),
        ):
            with raises(BackendError, **named):
                await backend.generate(request("r", prompt, **bad))
        assert len((await backend.generate(request("f", prompt, max_tokens=20))).token_ids) == 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"max_concurrent_decodes": 2},
            {"key": "rollout.jetstream.max_concurrent_decodes", "value": ("2 slots", 3)},
        ),
        ({"max_prefill_length": 32}, {"key": "rollout.max_model_len", "value": ("32 ids", 60)}),
        ({"samples_per_slot": 2}, {"value": "2 samples per slot"}),
        ({"generate": lambda params, decode_state: None}, {"key": "generate", "value": "rng"}),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_it_serves(change: dict, named: dict):
    engine = LaterApiEngine(TINY, SHAPES)
    vars(engine).update(change)
    with raises(ConfigError, **named):
        ExternalEngineAdapter(external_engine(engine), TINY, SHAPES)


async def test_logprobs_that_are_switched_off_are_noticed_at_start():
    with raises(ConfigError, fix="return_log_prob=true"):
        async with running(
            lambda m, s: external_engine(LaterApiEngine(m, s, return_log_prob=False))
        ):
            pass


async def test_sleep_gives_the_memory_back_and_waking_changes_nothing():
    prompt = prompt_of(7, 9)
    async with running() as backend:
        await backend.sleep()
        await backend.wake()
        output = await backend.generate(request("r", prompt, temperature=0.0))
    assert list(output.token_ids) == greedy(PARAMS, prompt, 8, frozenset())


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("tests.later_api", {"value": "names no function"}),
        ("tests.later_api:nothing", {"value": "no function 'nothing'"}),
        ("no_such_module:f", {"value": "no such module"}),
    ],
)
def test_a_wrong_name_says_what_to_write(where: str, named: dict):
    with raises(ConfigError, **named):
        load_engine_function(where)


def test_the_function_is_found_by_its_name():
    assert load_engine_function("tests.later_api:make_external_engine") is make_external_engine
