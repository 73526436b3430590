"""The asynchronous trainers on a scripted engine and a learner that learns nothing."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from jax_agent_rl.collect.buffer import versions
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import DropReason, PauseMode
from tests.fake_training import Versions, books, engine_of, finish, make_trainer, parity, steps_of
from tests.messages import raises
from tests.trajectories import trajectories_of

LONG = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen"
)


@pytest.mark.parametrize(
    ("mode", "first", "later"),
    [("one_step_off", {0}, {1}), ("fully_async", {0}, {0, 1})],
    ids=lambda x: str(x),
)
async def test_tokens_are_as_old_as_the_mode_says(
    tmp_path: Path, mode: str, first: set[int], later: set[int]
):
    learner = Versions()
    training = make_trainer(
        tmp_path, steps=6, trainer={"mode": mode}, learner=learner, prompts_per_step=2, rows=5
    )
    await finish(training)
    assert learner.ages[0] == first
    assert all(ages and ages <= later for ages in learner.ages[1:])
    accounting = books(training)
    assert (accounting.started, accounting.trained) == (
        24,
        24,
    ), "not one group more than the steps need"
    assert [r["staleness_max"] for r in steps_of(tmp_path)] == [max(ages) for ages in learner.ages]
    assert all(
        (r["servers_up"], r["servers_lost"], r["stale_served"]) == (1, 0, 0)
        for r in steps_of(tmp_path)
    )
    assert training.runtime.client.pool.servers[0].backend.policy_version == 6


async def test_one_step_off_rolls_out_the_next_batch_while_it_learns(tmp_path: Path):
    """The learner does not return before the next batch is complete."""
    complete = asyncio.Event()

    class Waits(Versions):
        def update(self, groups, *, masked, tick, cancellation, check):
            if len(self.steps) < 2:
                asyncio.run_coroutine_threadsafe(complete.wait(), loop).result(timeout=60)
                loop.call_soon_threadsafe(complete.clear)
            return super().update(
                groups, masked=masked, tick=tick, cancellation=cancellation, check=check
            )

    loop = asyncio.get_running_loop()
    training = make_trainer(tmp_path, steps=3, trainer={"mode": "one_step_off"}, learner=Waits())
    admitted = training.buffer.complete

    def tell(number, group):
        if number:  # the first batch is what the learner gets
            complete.set()
        return admitted(number, group)

    training.buffer.complete = tell
    await finish(training)
    assert books(training).trained == 6


async def test_each_token_keeps_its_version_when_weights_change(
    tmp_path: Path,
):
    """One group samples four tokens of each version, while the others are complete at once."""
    learner = Versions()
    training = make_trainer(
        tmp_path,
        steps=5,
        trainer={"mode": "fully_async", "max_staleness": 4},
        learner=learner,
        script=[LONG],
        prompts_per_step=2,
    )
    engine = engine_of(training)
    engine.hold = lambda r, sampled: (
        r.request_id.startswith("async-0-1") and engine.policy_version < sampled // 4
    )
    await finish(training)
    trajectories = []
    for groups in learner.steps:
        trajectories += [t for t in trajectories_of(groups) if t.group_id == "async-0-1"]
    assert [t.response_ids for t in trajectories] == [
        tuple(training.runtime.codec.reply_ids(LONG))
    ] * 2
    assert [t.policy_versions for t in trajectories] == [
        (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4)
    ] * 2
    last = steps_of(tmp_path)[-1]
    members = trajectories_of(learner.steps[4])
    assert last["mixed_version_share"] == sum(len(set(versions([t]))) > 1 for t in members) / 4
    assert last["staleness_max"] == 4, "it was trained on at its last chance"
    ages = Counter(str(4 - v) for v in versions(members))
    assert last["staleness_histogram"] == ages
    assert min(ages[age] for age in "123") >= 8
    assert books(training).trained == 20


@pytest.mark.parametrize("how", ["keep", "recompute"])
async def test_generations_go_on_after_every_kind_of_weight_update(tmp_path: Path, how: str):
    """Every other group waits in its middle for the weights to change; how many of those are in
    time is chance.
    """
    learner = Versions()
    training = make_trainer(
        tmp_path,
        steps=6,
        trainer={"mode": "fully_async", "max_staleness": 2, "in_flight_update": how},
        learner=learner,
        script=[LONG],
        prompts_per_step=2,
    )
    engine = engine_of(training)
    began = {}

    def hold(request, sampled):
        since = engine.policy_version - began.setdefault(request.request_id, engine.policy_version)
        return (
            request.request_id.startswith("async")
            and "-1-" in request.request_id[7:]
            and since < sampled // 9
        )

    engine.hold = hold
    await finish(training)
    ids = tuple(training.runtime.codec.reply_ids(LONG))
    members = trajectories_of(chain.from_iterable(learner.steps))
    assert [t.response_ids for t in members] == [ids] * 24
    assert {t.rollout_logprobs for t in members} == {tuple(-0.01 * (i % 7 + 1) for i in ids)}
    assert all(ages <= {0, 1, 2} for ages in learner.ages)
    held = [set(versions([t])) for t in members if t.group_id.endswith("-1")]
    assert len(held) >= 4
    assert all(len(held_versions) >= 2 for held_versions in held)
    prompt = min(len(r.prompt_ids) for r in engine.requests)
    resumed = [r for r in engine.requests if len(r.prompt_ids) > prompt]
    assert bool(resumed) == (how == "recompute")
    budget = engine.requests[0].sampling.max_tokens
    assert all(r.sampling.max_tokens + len(r.prompt_ids) - prompt == budget for r in resumed), (
        "budgets are exact"
    )


async def test_with_wait_a_generation_is_of_one_version(tmp_path: Path):
    learner = Versions()
    trainer = {"mode": "fully_async", "max_staleness": 2, "in_flight_update": "wait"}
    training = make_trainer(
        tmp_path, steps=6, trainer=trainer, learner=learner, script=[LONG], prompts_per_step=2
    )
    await finish(training)
    for member in trajectories_of(chain.from_iterable(learner.steps)):
        assert len(set(versions([member]))) == 1


async def test_an_update_that_the_engine_cannot_do_is_refused_at_the_start(tmp_path: Path):
    waits = Capabilities(
        max_model_len=99, max_concurrent=9, pause_modes=frozenset({PauseMode.WAIT})
    )
    trainer = {"mode": "fully_async", "in_flight_update": "keep"}
    with raises(ConfigError, key=("in_flight_update", "server-0"), value="keep", fix="auto, wait"):
        make_trainer(tmp_path, steps=1, trainer=trainer, capabilities=waits)


async def test_stragglers_that_get_too_old_are_dropped_with_their_reason(tmp_path: Path):
    """One group never ends."""
    learner = Versions()
    training = make_trainer(
        tmp_path,
        steps=4,
        trainer={"mode": "fully_async", "max_staleness": 1, "stragglers": "drop"},
        learner=learner,
        prompts_per_step=2,
    )
    engine_of(training).hold = lambda request, sampled: request.request_id.startswith("async-0-1")
    await finish(training)
    assert all(ages <= {0, 1} for ages in learner.ages)
    assert len(learner.ages) == 4
    accounting = books(training)
    assert (accounting.dropped, accounting.trained) == ({DropReason.STALE: 2}, 16)
    assert [r["groups_stale"] for r in steps_of(tmp_path)] == [
        0,
        0,
        1,
        1,
    ], "given up when version 2 begins"


async def test_spare_rows_are_given_up_at_the_end_of_the_step(tmp_path: Path):
    """With S = 0 this is over-sampling: the first 2 of 3 groups are trained on."""
    learner = Versions()
    training = make_trainer(
        tmp_path,
        steps=3,
        trainer={
            "mode": "fully_async",
            "max_staleness": 0,
            "stragglers": "drop",
            "oversample_prompts": 1,
        },
        learner=learner,
        prompts_per_step=2,
    )
    await finish(training)
    accounting = books(training)
    assert (accounting.started, accounting.trained, sum(accounting.dropped.values())) == (18, 12, 6)
    assert learner.ages == [{0}, {0}, {0}]


async def test_groups_that_are_left_out_are_replaced_within_the_bound(tmp_path: Path):
    """Every third row gives equal rewards."""
    learner = Versions()

    async def score(t):
        number = int(t.group_id.split("-")[1]) * 2 + int(t.group_id.split("-")[2])
        return replace(t, reward=1.0) if number % 3 == 0 else await parity(t)

    training = make_trainer(
        tmp_path,
        steps=4,
        algorithm={"max_resample_rounds": 5},
        score=score,
        trainer={"mode": "fully_async", "max_staleness": 1},
        learner=learner,
        prompts_per_step=2,
    )
    await finish(training)
    assert [len(groups) for groups in learner.steps] == [2] * 4
    assert all(ages <= {0, 1} for ages in learner.ages)
    accounting = books(training)
    assert accounting.trained == 16
    assert accounting.dropped[DropReason.ZERO_VARIANCE] >= 2
    assert accounting.dropped[DropReason.CANCELLED] == 0, "no group more than the steps need"
    assert (
        training.buffer.dropped[DropReason.ZERO_VARIANCE] * 2
        == accounting.dropped[DropReason.ZERO_VARIANCE]
    )


async def test_remax_gets_its_greedy_baseline(tmp_path: Path):
    async def greedy_earns_less(t):
        return replace(t, reward=0.25 if t.trajectory_id.startswith("greedy") else 1.0)

    remax = {"adv_estimator": "remax"}
    trainer = {"mode": "fully_async"}
    training = make_trainer(
        tmp_path, steps=2, algorithm=remax, trainer=trainer, score=greedy_earns_less, group_size=1
    )
    await finish(training)
    assert [g.greedy_reward for g in training.runtime.learner.groups] == [0.25, 0.25]
    assert (books(training).dropped, books(training).trained) == ({DropReason.GREEDY: 2}, 2)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
async def test_groups_of_trees_flow_like_any_others(tmp_path: Path, mode: str):
    learner = Versions()
    training = make_trainer(
        tmp_path,
        steps=3,
        algorithm={"adv_estimator": "treerl"},
        trainer={"mode": mode},
        learner=learner,
        script=[LONG],
        group_size=6,
        prompts_per_step=2,
        strategy={"name": "treerl", "treerl": {"m": 2, "n": 2, "l": 1, "t": 1}},
    )
    await finish(training)
    groups = list(chain.from_iterable(learner.steps))
    assert [len(group.trajectories) for group in groups] == [6] * 6
    assert all(ages <= {0, 1} for ages in learner.ages)
    assert (books(training).started, books(training).trained) == (36, 36)


async def test_a_step_of_groups_without_gradient_is_a_version_too(tmp_path: Path):
    """Else tokens would look older than they are, and with S = 0 nothing could be trained on any
    more.
    """

    async def equal(t):
        return replace(t, reward=1.0) if t.group_id == "async-0-0" else await parity(t)

    learner = Versions()
    trainer = {"mode": "fully_async", "max_staleness": 0}
    training = make_trainer(tmp_path, steps=3, trainer=trainer, score=equal, learner=learner)
    await finish(training)
    assert len(learner.steps) == 2
    assert [set(versions(s[0].trajectories)) for s in learner.steps] == [{1}, {2}]
