"""Generation through a real vLLM engine, against transformers."""

import asyncio
import contextlib

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.types import PauseMode, StopReason, digest_ids
from tests.gpu_backend.conftest import MAX_MODEL_LEN, Engine, prompt_of, request, to_text

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_output_equals_transformers_for_many_requests_at_once(engine: Engine):
    prompts = [prompt_of(i, 1 + (7 * i) % 40) for i in range(11)]
    outputs = await asyncio.gather(
        *(engine.backend.generate(request(f"r{i}", p)) for i, p in enumerate(prompts))
    )
    assert isinstance(engine.backend, RolloutBackend)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == engine.reference(0).greedy(prompt, 8)
        assert output.stop_reason is StopReason.LENGTH
        assert output.context_digest == digest_ids([*prompt, *output.token_ids])
        assert set(output.policy_versions) == {engine.backend.policy_version}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_log_probs_are_of_the_distribution_sampled_from(engine: Engine, temperature: float):
    """vLLM's default is the log-prob before temperature."""
    prompt = prompt_of(5, 20)
    output = await engine.backend.generate(
        request("r", prompt, max_tokens=20, temperature=temperature, seed=1)
    )
    expected = engine.reference(0).logprobs(prompt, output.token_ids, temperature or 1.0)
    np.testing.assert_allclose(output.log_probs, expected, atol=5e-5)


async def test_truncated_sampling_has_log_probs_of_what_is_left(engine: Engine):
    prompt = prompt_of(6, 20)
    output = await engine.backend.generate(
        request("r", prompt, max_tokens=1, temperature=1.0, top_k=2, seed=3)
    )
    scores = engine.reference(0).logits(prompt)[-1]
    best = np.sort(scores)[-2:]
    expected = scores[output.token_ids[0]] - np.log(np.exp(best).sum())
    assert output.token_ids[0] in np.argsort(scores)[-2:]
    np.testing.assert_allclose(output.log_probs[0], expected, atol=5e-5)


async def test_a_greedy_request_among_random_ones_keeps_its_own_log_probs(engine: Engine):
    prompt = prompt_of(7, 20)
    greedy = request("g", prompt, max_tokens=10, top_k=1)
    random_requests = [
        request(f"o{i}", prompt_of(i, 9), max_tokens=30, temperature=0.5, top_p=0.8)
        for i in range(5)
    ]
    output, *_ = await asyncio.gather(
        *(engine.backend.generate(r) for r in [greedy, *random_requests])
    )
    np.testing.assert_allclose(
        output.log_probs, engine.reference(0).logprobs(prompt, output.token_ids), atol=5e-5
    )


async def test_a_seed_reproduces_a_request_whatever_runs_beside_it(engine: Engine):
    backend = engine.backend
    prompt = prompt_of(6, 10)
    alone = await backend.generate(request("a", prompt, temperature=1.0, seed=42))
    crowd = [backend.generate(request(f"c{i}", prompt_of(i, 9), temperature=1.0)) for i in range(6)]
    again, *_ = await asyncio.gather(
        backend.generate(request("b", prompt, temperature=1.0, seed=42)), *crowd
    )
    other_seed = await backend.generate(request("d", prompt, temperature=1.0, seed=43))
    assert alone.token_ids == again.token_ids != other_seed.token_ids


async def test_the_next_turn_reuses_whole_blocks_of_its_prefix(engine: Engine):
    prompt = prompt_of(7, 70)
    first = await engine.backend.generate(request("t0", prompt))
    longer = [*prompt, *first.token_ids, 11, 12, 13]
    second = await engine.backend.generate(request("t1", longer))
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert list(second.token_ids) == engine.reference(0).greedy(longer, 8)
    await engine.backend.reset_prefix_cache()
    assert (await engine.backend.generate(request("t2", longer))).cached_tokens == 0


async def test_eos_ends_a_generation_and_is_kept_with_its_log_prob(engine: Engine):
    reference = engine.reference(0)
    for seed in range(300):
        prompt = prompt_of(seed, 5)
        expected = reference.greedy(prompt, 12, frozenset({2}))
        if expected[-1] == 2:
            break
    output = await engine.backend.generate(request("r", prompt, max_tokens=12, ignore_eos=False))
    assert list(output.token_ids) == expected
    assert output.stop_reason is StopReason.EOS
    np.testing.assert_allclose(output.log_probs, reference.logprobs(prompt, expected), atol=5e-5)


async def test_a_stop_string_ends_at_the_id_that_completes_it(engine: Engine):
    prompt = prompt_of(9, 10)
    expected = engine.reference(0).greedy(prompt, 30)
    stop = to_text(expected[2:4])
    output = await engine.backend.generate(request("r", prompt, max_tokens=30, stop=(stop,)))
    cut = next(n for n in range(1, 30) if stop in to_text(expected[:n]))
    assert list(output.token_ids) == expected[:cut]
    assert (output.stop_reason, output.stop_match) == (StopReason.STOP, stop)
    assert (await engine.backend.health()).running == 0


async def test_an_extra_stop_id_ends_a_generation(engine: Engine):
    prompt = prompt_of(10, 10)
    expected = engine.reference(0).greedy(prompt, 8)
    output = await engine.backend.generate(request("r", prompt, stop_token_ids=(expected[3],)))
    assert list(output.token_ids) == expected[: expected.index(expected[3]) + 1]
    assert output.stop_match == str(expected[3])


async def test_the_context_limit_ends_a_generation(engine: Engine):
    output = await engine.backend.generate(
        request("r", prompt_of(1, MAX_MODEL_LEN - 5), max_tokens=50)
    )
    assert len(output.token_ids) == 5
    assert output.stop_reason is StopReason.LENGTH


async def test_bad_requests_are_refused_and_the_engine_lives_on(engine: Engine):
    with pytest.raises(PromptTooLongError, match=rf"{MAX_MODEL_LEN} ids"):
        await engine.backend.generate(request("r", prompt_of(1, MAX_MODEL_LEN)))
    with pytest.raises(BackendError, match=r"\[0, 97\)"):
        await engine.backend.generate(request("r", [5, 97]))
    assert len((await engine.backend.generate(request("r", [5, 96]))).token_ids) == 8


async def test_chunks_put_together_are_the_output(engine: Engine):
    chunks = [
        chunk async for chunk in engine.backend.stream(request("r", prompt_of(2, 6), max_tokens=30))
    ]
    final = chunks[-1].final
    assert final is not None
    assert all(chunk.final is None for chunk in chunks[:-1])
    assert len(chunks) > 1
    assert sum((chunk.token_ids for chunk in chunks), ()) == final.token_ids
    assert sum((chunk.log_probs for chunk in chunks), ()) == final.log_probs
    assert sum((chunk.policy_versions for chunk in chunks), ()) == final.policy_versions


async def test_abort_returns_what_there_is_and_the_rest_follows_seamlessly(engine: Engine):
    backend = engine.backend
    prompt = prompt_of(3, 8)
    expected_ids = engine.reference(0).greedy(prompt, 100)
    stream = backend.stream(request("r", prompt, max_tokens=100))
    await anext(stream)
    assert await backend.abort("r")
    async for chunk in stream:
        part = chunk.final
    assert part.stop_reason is StopReason.ABORTED
    assert 0 < len(part.token_ids) < 100
    continuation = await backend.generate(
        request("r", [*prompt, *part.token_ids], max_tokens=100 - len(part.token_ids))
    )
    assert list(part.then(continuation).token_ids) == expected_ids
    assert not await backend.abort("r")


async def test_a_request_can_be_aborted_before_it_ran(engine: Engine):
    await engine.backend.pause(PauseMode.KEEP)
    task = asyncio.create_task(engine.backend.generate(request("r", prompt_of(3, 8))))
    while not await engine.backend.abort("r"):
        await asyncio.sleep(0)
    output = await task
    await engine.backend.resume()
    assert output.token_ids == ()
    assert output.stop_reason is StopReason.ABORTED


async def test_cancelling_a_caller_frees_its_slot(engine: Engine):
    backend = engine.backend
    tasks = [
        asyncio.create_task(backend.generate(request(f"r{i}", prompt_of(i, 4), max_tokens=200)))
        for i in range(12)
    ]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    output = await backend.generate(request("after", prompt_of(1, 4)))
    health = await backend.health()
    assert len(output.token_ids) == 8
    assert (health.running, health.waiting) == (0, 0)


async def test_two_living_requests_cannot_share_a_name(engine: Engine):
    stream = engine.backend.stream(request("same", prompt_of(1, 4), max_tokens=100))
    await anext(stream)
    with pytest.raises(BackendError, match="already running"):
        await engine.backend.generate(request("same", prompt_of(1, 4)))
    await stream.aclose()


async def test_lower_priority_values_run_first(engine: Engine):
    finished: list[str] = []

    async def run(name: str, priority: int) -> None:
        await engine.backend.generate(
            request(name, prompt_of(1, 5), max_tokens=20, priority=priority)
        )
        finished.append(name)

    await engine.backend.pause(PauseMode.KEEP)
    names = [("low", 5), *((f"mid{i}", 3) for i in range(14)), ("high", 1)]
    tasks = [asyncio.create_task(run(name, priority)) for name, priority in names]
    while (await engine.backend.health()).waiting < len(names):
        await asyncio.sleep(0.01)
    await engine.backend.resume()
    await asyncio.gather(*tasks)
    assert finished.index("high") < 8 and finished.index("low") >= 8


async def test_pausing_with_wait_lets_running_requests_finish_and_holds_new_ones(engine: Engine):
    backend = engine.backend
    stream = backend.stream(request("r", prompt_of(4, 8), max_tokens=40))
    await anext(stream)
    await backend.pause(PauseMode.WAIT)
    async for chunk in stream:
        finished = chunk.final
    late = asyncio.create_task(backend.generate(request("late", prompt_of(5, 8))))
    await asyncio.sleep(0.1)
    assert len(finished.token_ids) == 40 and not late.done()
    await backend.resume()
    assert len((await late).token_ids) == 8


async def test_pausing_with_abort_returns_partial_outputs(engine: Engine):
    backend = engine.backend
    stream = backend.stream(request("r", prompt_of(4, 8), max_tokens=200))
    await anext(stream)
    await backend.pause(PauseMode.ABORT)
    async for chunk in stream:
        part = chunk.final
    await backend.resume()
    assert part.stop_reason is StopReason.ABORTED
    assert 0 < len(part.token_ids) < 200


async def test_freezing_and_going_on_changes_nothing(engine: Engine):
    backend = engine.backend
    prompt = prompt_of(11, 8)
    stream = backend.stream(request("r", prompt, max_tokens=100))
    await anext(stream)
    await backend.pause(PauseMode.KEEP)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.1)
    await backend.resume()
    async for chunk in stream:
        output = chunk.final
    assert list(output.token_ids) == engine.reference(0).greedy(prompt, 100)


async def test_capabilities_are_honest_about_the_platform(engine: Engine):
    capabilities = engine.backend.capabilities
    assert capabilities.weight_payloads == {"safetensors"}
    assert not capabilities.sleep
    assert not capabilities.lora
    with pytest.raises(NotImplementedError):
        await engine.backend.sleep()
    with pytest.raises(BackendError, match="image"):
        await engine.backend.generate(request("r", [5], multi_modal={"image": (object(),)}))


async def test_metrics_count_ids_and_requests(engine: Engine):
    old_metrics = await engine.backend.metrics()
    await engine.backend.generate(request("r", prompt_of(12, 40), max_tokens=6))
    new_metrics = await engine.backend.metrics()
    assert new_metrics.generated_tokens - old_metrics.generated_tokens == 6
    assert new_metrics.requests_finished - old_metrics.requests_finished == 1
    assert new_metrics.prefill_tokens - old_metrics.prefill_tokens == 40
    assert new_metrics.busy_seconds > old_metrics.busy_seconds
