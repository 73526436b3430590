"""The policy of the chaos runs: tokens that can be proven, and proofs that fail where something is
wrong.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from jax_agent_rl.agents import derive_seed
from jax_agent_rl.errors import BackendClosedError, BackendError, WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import (
    FinishReason,
    PauseMode,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from tests.chaos import engine as chaos_engine
from tests.chaos.engine import EOS, HashPolicy, PacedBackend, context_key, hash_policy
from tests.chaos.invariants import problems
from tests.messages import raises

SEED = 7
NAME = "async-3-1-2"
PROMPT = (1, 50, 60)
OWN_SEED = derive_seed(SEED, "async", 3, 1, 2)


def request(turn=0, *, prompt=PROMPT, max_tokens=40, name=None):
    sampling = SamplingParams(max_tokens=max_tokens, seed=derive_seed(OWN_SEED, turn))
    return GenerateRequest(
        request_id=name or f"{NAME}/{turn}", prompt_ids=prompt, sampling=sampling
    )


def update(tmp_path, version):
    file = tmp_path / f"{version}.safetensors"
    hash_policy(SEED, version).save(file)
    return WeightUpdate(version=version, kind="safetensors", payload=[str(file)])


@pytest.fixture
async def engine():
    backend = PacedBackend(hash_policy(SEED, -1), version=-1, tick_seconds=0.0)
    await backend.start()
    yield backend
    await backend.close()


async def two_turns(client, *, between=lambda: asyncio.sleep(0)):
    """A trajectory of the real client: turn, tool, turn."""
    first = await client.generate(
        f"{NAME}/0", prompt_ids=PROMPT, sampling_params=request().sampling
    )
    await between()
    context = PROMPT + first.token_ids + (9, 9)
    second = await client.generate(
        f"{NAME}/1", prompt_ids=context, sampling_params=request(1).sampling
    )
    call = ToolCallRecord(name="tally", arguments={}, observation="ok", reward=1.0)
    turns = (Turn(output=first, appended_ids=(9, 9), tool_calls=(call,)), Turn(output=second))
    return Trajectory.from_turns(
        trajectory_id=NAME,
        group_id="async-3-1",
        agent_name="server_tool_agent",
        prompt_ids=PROMPT,
        turns=turns,
        finish_reason=FinishReason.MAX_USER_TURNS,
        messages=(),
    )


async def test_a_trajectory_over_two_versions_is_proven(engine, tmp_path):
    client = LLMServerClient([AsyncServer(engine)])
    trajectory = await two_turns(
        client, between=lambda: client.pool.update_weights(update(tmp_path, 4))
    )
    assert [{*turn.output.policy_versions} for turn in trajectory.turns] == [{-1}, {4}]
    assert list(problems(trajectory, seed=SEED)) == []


def first_id_twice(output: TokenOutput) -> dict[str, tuple]:
    doubled = {}
    for key in ("token_ids", "log_probs", "policy_versions"):
        value = getattr(output, key)
        doubled[key] = value[:1] + value
    return doubled


async def test_a_proof_fails_where_anything_differs(engine):
    good = await two_turns(LLMServerClient([AsyncServer(engine)]))
    first, second = good.turns

    def with_turn(turn):
        fields = {
            name: getattr(good, name)
            for name in ("trajectory_id", "group_id", "agent_name", "finish_reason")
        }
        return Trajectory.from_turns(prompt_ids=PROMPT, turns=(turn, second), messages=(), **fields)

    def with_first(**changed):
        return with_turn(replace(first, output=replace(first.output, **changed)))

    ids = first.output.token_ids
    n = len(first.output.token_ids)
    wrong = {
        "another id": with_first(token_ids=(ids[0] ^ 1, *ids[1:])),
        "an id twice": with_first(**first_id_twice(first.output)),
        "another log-prob": with_first(
            log_probs=(first.output.log_probs[0] - 1e-9, *first.output.log_probs[1:])
        ),
        "another version": with_first(policy_versions=(5,) * n),
        "another observation": with_turn(replace(first, appended_ids=(9, 8))),
        "another prompt": replace(good, prompt_ids=(1, 50, 61)),
        "another seed": replace(good, trajectory_id="async-3-1-3"),
        "a tool that acted twice": with_turn(
            replace(first, tool_calls=(replace(first.tool_calls[0], reward=2.0),))
        ),
        "a mask of its own": replace(good, response_mask=(0, *good.response_mask[1:])),
        "log-probs of its own": replace(good, rollout_logprobs=(-9.0, *good.rollout_logprobs[1:])),
        "ids of its own": replace(good, response_ids=(*good.response_ids[:-1], 9)),
    }
    for what, trajectory in wrong.items():
        assert list(problems(trajectory, seed=SEED)), what


def test_ids_are_drawn_with_the_probabilities_they_report():
    """Against an independent count: 20 000 draws from one row, each probability within five
    standard deviations.
    """
    policy = hash_policy(SEED, 0)
    draws = 20_000
    sampled = [policy.sample(11, seed=seed, position=3) for seed in range(draws)]
    counts = Counter(token for token, _ in sampled)
    for token, log_prob in set(sampled):
        probability = np.exp(log_prob)
        assert abs(counts[token] - draws * probability) < 5 * np.sqrt(draws * probability) + 1


def test_weights_come_back_from_their_file_and_others_are_refused(tmp_path):
    hash_policy(SEED, 2).save(tmp_path / "w.safetensors")
    assert np.array_equal(
        HashPolicy.read(tmp_path / "w.safetensors").logits, hash_policy(SEED, 2).logits
    )
    (tmp_path / "half.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:1000])
    with raises(ValueError, value="no policy"):
        HashPolicy.read(tmp_path / "half.safetensors")
    with raises(ValueError, fix="finite float32"):
        HashPolicy(np.full_like(hash_policy(SEED, 2).logits, np.nan))


async def test_an_interrupted_request_goes_on_as_if_nothing_had_happened(engine):
    prompts = ((1, number) for number in count(3))
    uninterrupted = None
    prompt = ()
    while (
        uninterrupted is None or len(uninterrupted.token_ids) < 4
    ):  # one that does not end at once
        prompt = next(prompts)
        uninterrupted = await engine.generate(request(prompt=prompt))
    part = await engine.generate(request(prompt=prompt, max_tokens=2))
    continued = await engine.generate(request(prompt=prompt + part.token_ids, max_tokens=38))
    assert part.stop_reason is StopReason.LENGTH
    assert part.token_ids + continued.token_ids == uninterrupted.token_ids
    assert uninterrupted.token_ids[-1] == EOS


async def test_a_hung_engine_answers_nothing_and_goes_on_where_it_stood(engine):
    engine.hang(True)
    running = asyncio.ensure_future(engine.generate(request()))
    pausing = asyncio.ensure_future(engine.pause(PauseMode.KEEP))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    assert not pausing.done()
    assert (await engine.health()).ok
    engine.hang(False)
    await pausing
    await engine.resume()
    assert (await running).stop_reason is StopReason.EOS


async def test_a_paused_engine_hands_out_what_it_has_or_keeps_it(engine, tmp_path):
    await engine.pause(PauseMode.KEEP)
    paused_request = asyncio.ensure_future(engine.generate(request()))
    await engine.update_weights(update(tmp_path, 0))
    with raises(WeightUpdateError, value="newer than 0"):
        await engine.update_weights(update(tmp_path, 0))
    await engine.resume()
    assert {*(await paused_request).policy_versions} == {0}


async def test_what_the_engine_cannot_do_it_refuses_and_closing_ends_requests(engine):
    with raises(BackendError, value="stops"):
        await engine.generate(
            replace(request(), sampling=SamplingParams(max_tokens=3, seed=1, stop=("x",)))
        )
    await engine.pause(PauseMode.KEEP)
    running = asyncio.ensure_future(engine.generate(request()))
    await asyncio.sleep(0)
    with raises(BackendError, value="already running"):
        await engine.generate(request())
    await engine.close()
    with pytest.raises(BackendClosedError):
        await running


def test_the_key_of_a_context_depends_on_every_id_and_their_order():
    assert len({context_key(ids) for ids in [(1, 2, 3), (1, 3, 2), (1, 2), (2, 2, 3), ()]}) == 5


async def test_an_engine_that_declares_no_streaming_does_not_stream(engine):
    assert not engine.capabilities.streaming
    with raises(NotImplementedError, value="stream"):
        await anext(engine.stream(request()))
    assert (await engine.generate(request())).token_ids


async def test_the_engine_reads_each_id_of_a_context_once(engine, monkeypatch):
    read = []
    monkeypatch.setattr(
        chaos_engine, "context_key", lambda ids, key=0: read.extend(ids) or context_key(ids, key)
    )
    output = await engine.generate(request())
    assert tuple(read) == PROMPT + output.token_ids
    assert not engine.keys
