"""Collecting a step: groups as they finish, one failure loses one trajectory, everything is
counted.
"""

import asyncio
import threading
from dataclasses import replace

import pytest

from jax_agent_rl.agents import AgentContext, AgentLoop, register_agent
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards import register_reward, score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import DropReason, SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

SAMPLING = SamplingParams(max_tokens=50)
TRUTH = {"ground_truth": "3"}


@register_agent("raises_for_test")
class Raises(AgentLoop):
    async def play(self, request):
        raise KeyError("a bug in an agent")


@register_agent("awaits_cancelled_for_test")
class AwaitsCancelled(AgentLoop):
    async def play(self, request):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future


def row(text, **fields):
    return {
        "prompt": [{"role": "user", "content": text}],
        "agent_name": "single_turn_agent",
    } | fields


async def one_point(trajectory):
    return replace(trajectory, reward=1.0)


class Stage:
    def __init__(
        self, script=("hello there you",), *, score=one_point, max_in_flight=8, seed=0, **limits
    ):
        self.codec = FakeCodec()
        self.backend = ScriptedBackend(self.codec, script)
        context = AgentContext(
            client=LLMServerClient([AsyncServer(self.backend)]),
            codec=self.codec,
            limits=AgentConfig(**limits),
            max_model_len=1000,
        )
        self.collector = RolloutCollector(
            context, score=score, max_in_flight=max_in_flight, seed=seed
        )
        self.books = self.collector.accounting

    async def collect(self, rows, *, group_size=3, step=0, label="train"):
        return await self.collector.collect(
            rows, group_size=group_size, sampling=SAMPLING, step=step, label=label
        )


async def test_every_row_becomes_a_scored_group():
    stage = Stage()
    groups = await stage.collect([row("a"), row("b")])
    assert sorted(g.group_id for g in groups) == ["train-0-0", "train-0-1"]
    assert all(g.rewards == (1.0,) * 3 and not g.dropped for g in groups)
    assert [t.trajectory_id for t in groups[0].trajectories] == [
        f"{groups[0].group_id}-{i}" for i in range(3)
    ]
    assert stage.books.summary() == {"started": 6, "trained": 0, "in_flight": 6, "dropped": 0}
    stage.books.train(t.trajectory_id for g in groups for t in g.trajectories)
    assert stage.books.summary()["trained"] == 6


async def test_no_more_than_max_in_flight_run_at_once():
    stage = Stage(max_in_flight=4)
    await stage.collect([row(str(i)) for i in range(5)])
    assert stage.backend.max_running == 4


async def test_a_group_is_handed_over_while_others_still_run():
    def script(request):
        words = "short" if " quick" in stage.codec.decode(request.prompt_ids) else "word " * 200
        return stage.codec.reply_ids(words)

    stage = Stage(script, max_response_length=300, max_in_flight=64)
    arrived: asyncio.Queue = asyncio.Queue()
    collecting = asyncio.create_task(
        stage.collector.collect(
            [row("slow"), row("quick")],
            group_size=2,
            sampling=SAMPLING,
            step=0,
            arrived=arrived.put_nowait,
        )
    )
    first = await arrived.get()
    assert first.group_id == "train-0-1"
    assert len(stage.books.in_flight) == 4, "the slow ones are still running"
    stage.books.train(t.trajectory_id for t in first.trajectories)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert stage.books.dropped == {DropReason.CANCELLED: 2}, "only what was not resolved"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row("x", agent_name="raises_for_test"), DropReason.AGENT_ERROR),
        (row("x", agent_name="awaits_cancelled_for_test"), DropReason.AGENT_ERROR),
        (row("x", agent_name="no_such_agent"), DropReason.AGENT_ERROR),
        ({"agent_name": "single_turn_agent"}, DropReason.AGENT_ERROR),
        (row("much too long a prompt for this limit"), DropReason.PROMPT_TOO_LONG),
    ],
)
async def test_one_failure_never_kills_the_batch(bad, reason, caplog):
    stage = Stage(max_prompt_length=5)
    groups = {g.group_id: g for g in await stage.collect([row("a"), bad])}
    assert len(groups["train-0-0"].trajectories) == 3
    assert groups["train-0-1"].trajectories == ()
    assert groups["train-0-1"].dropped == {reason: 3}
    assert stage.books.dropped == {reason: 3}
    assert any("train-0-1-0 dropped" in record.message for record in caplog.records)
    stage.books.check()


async def test_an_agents_bug_is_logged_with_its_traceback(caplog):
    await Stage().collect([row("x", agent_name="raises_for_test")], group_size=1)
    assert "a bug in an agent" in caplog.text
    assert f'File "{__file__}"' in caplog.text


async def test_a_failed_reward_drops_its_trajectory_only():
    async def moody(trajectory):
        if trajectory.trajectory_id.endswith("-1"):
            raise RewardError("not today")
        return trajectory

    stage = Stage(score=moody)
    (group,) = await stage.collect([row("a")])
    assert [t.trajectory_id for t in group.trajectories] == ["train-0-0-0", "train-0-0-2"]
    assert group.dropped == {DropReason.REWARD_ERROR: 1}


async def test_a_reward_that_hangs_loses_its_trajectory_and_is_counted():
    released = threading.Event()

    @register_reward("hangs_for_test")
    def compute_score(*_):
        released.wait()

    rows = [
        row("a", data_source="hangs_for_test"),
        row("b", data_source="calculator", reward_model=TRUTH),
    ]

    def scored(trajectory):
        hangs = trajectory.row["data_source"] == "hangs_for_test"
        return score(trajectory, timeout=0.05 if hangs else 60)

    stage = Stage(score=scored)
    groups = {g.group_id: g for g in await stage.collect(rows, group_size=2)}
    released.set()
    assert groups["train-0-0"].dropped == {DropReason.REWARD_TIMEOUT: 2} == stage.books.dropped
    assert len(groups["train-0-1"].trajectories) == 2
    stage.books.check()


async def test_a_dead_engine_is_counted_not_raised():
    stage = Stage()
    stage.backend.die()
    (group,) = await stage.collect([row("a")])
    assert group.dropped == {DropReason.BACKEND_ERROR: 3}


async def test_cancellation_counts_everything_in_flight():
    stage = Stage(max_in_flight=4)
    stage.backend.unpaused.clear()
    task = asyncio.create_task(stage.collect([row(str(i)) for i in range(4)]))
    while stage.backend.max_running < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.books.summary() == {
        "started": 4,
        "trained": 0,
        "in_flight": 0,
        "dropped": 4,
        "dropped/cancelled": 4,
    }, "those that waited for a slot were never started"
    assert len(asyncio.all_tasks()) == 1


async def test_seeds_are_those_of_run_step_row_and_sample():
    def seeds(stage):
        return {(r.session_id, r.sampling.seed) for r in stage.backend.requests}

    rows = [row("a"), row("b")]
    first = Stage()
    again = Stage(max_in_flight=1)
    other_run = Stage(seed=1)
    other_step = Stage()
    await first.collect(rows)
    await again.collect(rows)
    await other_run.collect(rows)
    await other_step.collect(rows, step=1)
    assert seeds(first) == seeds(again), "the order of execution does not matter"
    drawn = [seed for stage in (first, other_run, other_step) for _, seed in seeds(stage)]
    assert len(set(drawn)) == len(drawn) == 18


async def test_evaluation_in_the_same_step_is_told_apart():
    stage = Stage()
    await stage.collect([row("a")], label="train")
    await stage.collect([row("a")], label="eval")
    with raises(ValueError, key="eval", value=("step 0", "in flight")):
        await stage.collect([row("a")], label="eval")


async def test_a_group_of_nobody_is_refused():
    with raises(ValueError, key="group_size", value=0):
        await Stage().collect([row("a")], group_size=0)


async def test_no_rows_give_no_groups():
    assert await Stage().collect([]) == []
