"""The JetStream-style backend on a tiny model, against full forward passes without a cache."""

import asyncio
import contextlib
import threading

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    PromptTooLongError,
    WeightUpdateError,
)
from jax_agent_rl.jetstream import inspection
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.engine_core import THREAD_NAME
from jax_agent_rl.jetstream.programs import cache_hits
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, digest_ids
from tests.messages import raises
from tests.tiny import FOUR_SLOTS, TINY, full_logits, greedy, logprobs_of, tiny_params

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def to_text(ids) -> str:
    """A made-up tokenizer: one letter per id."""
    return "".join(LETTERS[i % 26] for i in ids)


@pytest.fixture(scope="module")
def params():
    return tiny_params()


@contextlib.asynccontextmanager
async def running(params):
    backend = JetStreamBackend(TINY, params, FOUR_SLOTS, version=1, seed=3, decode_text=to_text)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def request(name: str, prompt, *, max_tokens=8, session=None, **sampling) -> GenerateRequest:
    settings = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        session_id=session,
        sampling=SamplingParams(max_tokens=max_tokens, **settings),
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, length).tolist()


async def test_greedy_output_equals_full_forward_passes_for_many_requests_at_once(params):
    prompts = [prompt_of(i, 1 + (7 * i) % 40) for i in range(11)]
    async with running(params) as backend:
        assert isinstance(backend, RolloutBackend)
        outputs = await asyncio.gather(
            *(backend.generate(request(f"r{i}", p)) for i, p in enumerate(prompts))
        )
        metrics = await backend.metrics()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(params, prompt, 8, frozenset())
        assert output.stop_reason is StopReason.LENGTH
        assert output.context_digest == digest_ids([*prompt, *output.token_ids])
        assert set(output.policy_versions) == {1}
    assert metrics.recompilations == 0
    assert metrics.generated_tokens == 88


@pytest.mark.parametrize("length", [2, 17, 60])
async def test_given_ids_are_scored_as_by_a_full_pass_beside_running_requests(
    params, length: int, monkeypatch
):
    monkeypatch.setattr(inspection, "CHUNK", 16)
    monkeypatch.setattr(inspection, "BLOCK", 8)
    ids = prompt_of(6, length)
    async with running(params) as backend:
        generating = asyncio.create_task(
            backend.generate(request("r", prompt_of(7, 9), max_tokens=20))
        )
        scores = await backend.score(ids, start=1, top_k=5)
        last = await backend.score(ids, start=length - 1)
        assert last.top_ids == ()
        assert last.log_probs == pytest.approx(scores.log_probs[-1:], abs=1e-5)
        assert list((await generating).token_ids) == greedy(
            params, prompt_of(7, 9), 20, frozenset()
        )
        with raises(BackendError, key="max_model_len", value=60):
            await backend.score(prompt_of(6, 61))
        with raises(BackendError, key="id 97", value=97):
            await backend.score([5, 97])
    logits = full_logits(params, ids).astype(np.float64)[:-1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores.log_probs, logs[np.arange(length - 1), ids[1:]], atol=2e-5)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logs, axis=-1)[:, :5])
    np.testing.assert_allclose(scores.top_log_probs, -np.sort(-logs, axis=-1)[:, :5], atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_equal_those_of_a_full_pass(params, temperature: float):
    prompt = prompt_of(5, 20)
    async with running(params) as backend:
        output = await backend.generate(
            request("r", prompt, max_tokens=20, temperature=temperature, seed=1)
        )
    expected = logprobs_of(params, prompt, output.token_ids, temperature)
    np.testing.assert_allclose(output.log_probs, expected, atol=2e-5)


async def test_a_seed_reproduces_a_request_whatever_runs_beside_it(params):
    prompt = prompt_of(6, 10)
    async with running(params) as backend:
        alone = await backend.generate(request("a", prompt, temperature=1.0, seed=42))
        crowd = [
            backend.generate(request(f"c{i}", prompt_of(i, 9), temperature=1.0)) for i in range(6)
        ]
        again, *_ = await asyncio.gather(
            backend.generate(request("b", prompt, temperature=1.0, seed=42)), *crowd
        )
        other_seed = await backend.generate(request("d", prompt, temperature=1.0, seed=43))
    assert alone.token_ids == again.token_ids != other_seed.token_ids


async def test_the_next_turn_reuses_the_cache_and_changes_nothing(params):
    prompt = prompt_of(7, 12)
    async with running(params) as backend:
        first = await backend.generate(request("t0", prompt, session="s"))
        longer = [*prompt, *first.token_ids, 11, 12, 13]
        second = await backend.generate(request("t1", longer, session="s"))
    assert second.cached_tokens == len(prompt) + len(first.token_ids) - 1
    assert list(second.token_ids) == greedy(params, longer, 8, frozenset())


async def test_a_group_computes_its_prompt_once(params):
    prompt = prompt_of(8, 30)
    async with running(params) as backend:
        await asyncio.gather(
            *(backend.generate(request(f"g{i}", prompt, temperature=1.0)) for i in range(4))
        )
        metrics = await backend.metrics()
    assert metrics.prefill_tokens == 29
    assert metrics.cached_tokens == 3 * 29


async def test_eos_ends_a_generation_and_is_kept_with_its_logprob(params):
    for seed in range(200):
        prompt = prompt_of(seed, 5)
        expected = greedy(params, prompt, 12)
        if expected[-1] == 2:
            break
    async with running(params) as backend:
        output = await backend.generate(request("r", prompt, max_tokens=12, ignore_eos=False))
    assert list(output.token_ids) == expected
    assert output.stop_reason is StopReason.EOS
    assert len(output.log_probs) == len(expected)


async def test_a_stop_string_ends_at_the_id_that_completes_it(params):
    prompt = prompt_of(9, 10)
    expected = greedy(params, prompt, 8, frozenset())
    stop = to_text(expected[2:4])
    async with running(params) as backend:
        output = await backend.generate(request("r", prompt, stop=(stop,)))
        follow = [*prompt, *output.token_ids, 5]
        continued = await backend.generate(request("s", follow))
    cut = next(n for n in range(1, 9) if stop in to_text(expected[:n]))
    assert list(output.token_ids) == expected[:cut]
    assert (output.stop_reason, output.stop_match) == (StopReason.STOP, stop)
    assert list(continued.token_ids) == greedy(params, follow, 8, frozenset())


async def test_an_extra_stop_id_ends_a_generation(params):
    prompt = prompt_of(10, 10)
    expected = greedy(params, prompt, 8, frozenset())
    async with running(params) as backend:
        output = await backend.generate(request("r", prompt, stop_token_ids=(expected[3],)))
    assert list(output.token_ids) == expected[: expected.index(expected[3]) + 1]
    assert output.stop_match == str(expected[3])


async def test_the_context_limit_ends_a_generation(params):
    async with running(params) as backend:
        output = await backend.generate(request("r", prompt_of(1, 55), max_tokens=50))
    assert len(output.token_ids) == 5
    assert output.stop_reason is StopReason.LENGTH


async def test_a_prompt_without_room_is_refused_with_both_numbers(params):
    async with running(params) as backend:
        with raises(PromptTooLongError, key="max_model_len", value=("60 ids", 60)):
            await backend.generate(request("r", prompt_of(1, 60)))


async def test_an_id_outside_the_vocabulary_is_refused(params):
    async with running(params) as backend:
        with raises(BackendError, value="[0, 97)"):
            await backend.generate(request("r", [5, 97]))


async def test_a_request_that_breaks_while_it_is_queued_harms_no_other(params):
    bad = request("bad", [5, 6])
    object.__setattr__(bad.sampling, "seed", "a")  # past the checks of SamplingParams
    async with running(params) as backend:
        healthy = asyncio.create_task(backend.generate(request("beside", [5, 6], max_tokens=50)))
        with raises(BackendError, key="request 'bad'", value="TypeError") as caught:
            await backend.generate(bad)
        assert not isinstance(caught.value, EngineDiedError)
        assert len((await healthy).token_ids) == 50
        assert (await backend.health()).ok


async def test_chunks_put_together_are_the_output(params):
    async with running(params) as backend:
        chunks = [
            chunk async for chunk in backend.stream(request("r", prompt_of(2, 6), max_tokens=11))
        ]
    final = chunks[-1].final
    assert final is not None
    assert all(chunk.final is None for chunk in chunks[:-1])
    assert len(chunks) > 1
    assert sum((chunk.token_ids for chunk in chunks), ()) == final.token_ids
    assert sum((chunk.log_probs for chunk in chunks), ()) == final.log_probs


async def test_abort_returns_what_there_is_and_the_rest_follows_seamlessly(params):
    prompt = prompt_of(3, 8)
    uninterrupted = greedy(params, prompt, 30, frozenset())
    async with running(params) as backend:
        for _ in range(
            50
        ):  # on a busy machine a request may be through before the engine hears of the abort
            stream = backend.stream(request("r", prompt, max_tokens=30))
            await anext(stream)
            met = await backend.abort("r")
            async for chunk in stream:
                part = chunk.final
            if met:
                break
        assert part.stop_reason is StopReason.ABORTED
        assert 0 < len(part.token_ids) < 30
        continued = await backend.generate(
            request("r2", [*prompt, *part.token_ids], max_tokens=30 - len(part.token_ids))
        )
        assert not await backend.abort("r")
    assert list(part.then(continued).token_ids) == uninterrupted


async def test_cancelling_a_caller_frees_its_slot(params):
    async with running(params) as backend:
        tasks = [
            asyncio.create_task(backend.generate(request(f"r{i}", prompt_of(i, 4), max_tokens=55)))
            for i in range(8)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        output = await backend.generate(request("after", prompt_of(1, 4)))
        health = await backend.health()
    assert len(output.token_ids) == 8
    assert (health.running, health.waiting) == (0, 0)
    assert health.kv_used_share
    assert 0 < health.kv_used_share < 1


async def test_weights_change_in_flight_with_a_version_per_token(params):
    newer = jax.tree.map(lambda x: x * 1.3, params)
    prompt = prompt_of(4, 8)
    async with running(params) as backend:
        for version in range(
            2, 30
        ):  # on a busy machine a request may be through before the engine hears of the pause
            stream = backend.stream(request("r", prompt, max_tokens=50))
            await anext(stream)
            await backend.pause(PauseMode.KEEP)
            await backend.update_weights(
                WeightUpdate(version=version, kind="arrays", payload=newer)
            )
            await backend.resume()
            async for chunk in stream:
                output = chunk.final
            fresh = await backend.generate(request("s", prompt))
            assert fresh.cached_tokens == 0
            assert list(fresh.token_ids) == greedy(newer, prompt, 8, frozenset())
            versions = list(output.policy_versions)
            assert versions == sorted(versions)
            assert set(versions) <= {version - 1, version}
            if set(versions) == {version - 1, version}:
                return
    raise AssertionError("no update ever met a request in flight")


async def test_pausing_with_wait_lets_running_requests_finish_and_holds_new_ones(params):
    async with running(params) as backend:
        stream = backend.stream(request("r", prompt_of(4, 8), max_tokens=20))
        await anext(stream)
        pausing = asyncio.create_task(backend.pause(PauseMode.WAIT))
        async for chunk in stream:
            finished = chunk.final
        await pausing
        late = asyncio.create_task(backend.generate(request("late", prompt_of(5, 8))))
        await asyncio.sleep(0)  # lets it submit
        health = await backend.health()
        assert len(finished.token_ids) == 20
        assert (health.running, health.waiting) == (0, 1)
        assert not late.done()
        await backend.resume()
        assert len((await late).token_ids) == 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 1}, {"key": "version", "value": "newer"}),
        ({"kind": "bytes"}, {"key": "kind", "value": "'bytes'"}),
        (
            {"kind": "safetensors", "payload": ["/nowhere/model.safetensors"]},
            {"value": "does not fit"},
        ),
        ({"payload": {"embed": np.zeros(3)}}, {"value": "does not fit"}),
    ],
)
async def test_a_wrong_weight_update_is_refused_and_the_old_weights_serve(
    params, change: dict, named: dict
):
    update = {"version": 2, "kind": "arrays", "payload": params} | change
    prompt = prompt_of(1, 5)
    async with running(params) as backend:
        with raises(WeightUpdateError, **named):
            await backend.update_weights(WeightUpdate(**update))
        output = await backend.generate(request("r", prompt))
    assert list(output.token_ids) == greedy(params, prompt, 8, frozenset())
    assert backend.policy_version == 1


async def test_closing_fails_what_is_running_and_leaves_no_thread(params):
    earlier_threads = set(threading.enumerate())
    async with running(params) as backend:
        await backend.pause(PauseMode.KEEP)
        task = asyncio.create_task(backend.generate(request("r", prompt_of(1, 5))))
        await asyncio.sleep(0)
        await backend.close()
        with pytest.raises(BackendClosedError):
            await task
        with pytest.raises(BackendClosedError):
            await backend.generate(request("s", prompt_of(1, 5)))
        started_threads = set(threading.enumerate()) - earlier_threads
        assert THREAD_NAME not in {thread.name for thread in started_threads}
        assert not (await backend.health()).ok


async def test_lower_priority_values_run_first(params):
    finished_ids: list[str] = []

    async def run(backend, name: str, priority: int) -> None:
        base = request(name, prompt_of(1, 5))
        await backend.generate(
            GenerateRequest(
                request_id=name,
                prompt_ids=base.prompt_ids,
                sampling=base.sampling,
                priority=priority,
            )
        )
        finished_ids.append(name)

    async with running(params) as backend:
        await backend.pause(PauseMode.KEEP)
        names = [("low", 5)] * 1 + [(f"mid{i}", 3) for i in range(8)] + [("high", 1)]
        tasks = [asyncio.create_task(run(backend, name, priority)) for name, priority in names]
        await asyncio.sleep(0)
        await backend.resume()
        await asyncio.gather(*tasks)
    assert finished_ids.index("high") < 4
    assert finished_ids[-1] in {
        "low",
        *(f"mid{i}" for i in range(4, 8)),
    }


async def test_start_says_what_it_compiles(params):
    lines: list[str] = []
    small = EngineShapes(
        max_model_len=24,
        max_concurrent_decodes=1,
        kv_cache_tokens=32,
        decode_steps=2,
        prefill_buckets=(8,),
    )
    backend = JetStreamBackend(TINY, params, small, compile_ahead=True, print_line=lines.append)
    await backend.start()
    try:
        assert (await backend.metrics()).recompilations == 0
    finally:
        await backend.close()
    *earlier_lines, last = lines
    assert all(
        line.endswith(f"({i} of {len(earlier_lines)})") for i, line in enumerate(earlier_lines, 1)
    ), lines
    assert earlier_lines[0].startswith("compiling decode 1 slots of ")
    assert "from the compilation cache" in last


def test_a_program_found_in_the_cache_is_counted(tmp_path):
    first_start = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # or the folder is the one of the tests before
    try:
        for expected in (0, 1):
            with cache_hits() as hits:
                jax.jit(lambda x: x * 3 + 1).lower(np.float32(2)).compile()
            assert len(hits) == expected
            jax.clear_caches()
    finally:
        for name, value in zip(
            ("compilation_cache_dir", "persistent_cache_min_compile_time_secs"),
            first_start,
            strict=True,
        ):
            jax.config.update(f"jax_{name}", value)
        compilation_cache.reset_cache()
