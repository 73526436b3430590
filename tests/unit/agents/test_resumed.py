"""Trajectories that another process continues, from what a checkpoint holds of them."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from jax_agent_rl.agents import EnvironmentAgent, SingleTurnAgent, TextToolAgent
from jax_agent_rl.agents.request import Prefix
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.groups import GroupRecord
from jax_agent_rl.collect.strategies import Chains
from jax_agent_rl.config import ToolClientConfig
from jax_agent_rl.environments import Environment, EnvironmentPools, Observation, base
from jax_agent_rl.environments.snapshots import EnvironmentSnapshot
from jax_agent_rl.errors import ReplayError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import Group, PauseMode, SamplingParams, Trajectory
from tests.agent_testbed import ROW, AgentHarness, episode_request
from tests.batching_engine import BatchingEngine
from tests.fakes import EOS, FakeCodec
from tests.http_service import JSONResponse, ToolServer
from tests.messages import raises

CODEC = FakeCodec()
"""Its words get their ids as they come, so all processes share it."""
SAMPLING = SamplingParams(max_tokens=100, seed=0)
CODE = "a b c <tool> print(3) </tool> junk"
REPLIES = [CODE, CODE, CODE, "so 3"]


class Streaming(BatchingEngine):
    """Streams the ids of one reply, each with its position as log-prob."""

    def __init__(self, codec, script, *, capabilities=None) -> None:
        modes = frozenset(PauseMode)
        super().__init__(
            Capabilities(max_model_len=1000, max_concurrent=4, pause_modes=modes), eos=EOS
        )
        self.reply = codec.reply_ids(script)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)

    async def stream(self, request):
        self.requests.append(request)
        async for chunk in self.chunks(request):
            yield chunk

    def sample(self, run):
        place = run.request.resumed + len(run.ids)
        return self.reply[place], -float(place)

    async def load(self, update) -> None: ...


def through_a_checkpoint(prefix: Prefix | None) -> Prefix:
    record = GroupRecord(running={3: lambda: prefix})
    return GroupRecord.restore(json.loads(json.dumps(record.state()))).partial[3]


def test_a_prefix_keeps_its_keys_in_checkpoints():
    prefix = Prefix(
        fork=None, prompt_ids=(1,), prompt_media={}, turns=(), partial_turn=None, messages=()
    )
    state = GroupRecord(running={3: lambda: prefix}).state()
    earlier_keys = {"fork", "prompt_ids", "prompt_media", "turns", "begun", "messages"}
    assert set(state["begun"]["3"]) == earlier_keys | {"snapshot"}
    del state["begun"]["3"]["snapshot"]
    restored = GroupRecord.restore(state).partial[3]
    assert restored == prefix, "an earlier version's checkpoint can be resumed"


async def resume(it: AgentHarness, prefix: Prefix, trajectory_id: str) -> Trajectory:
    return await it.agent.play(
        episode_request(ROW, SAMPLING, trajectory_id=trajectory_id, prefix=prefix)
    )


async def test_a_turn_goes_on_after_its_newest_id():
    first, second = (
        AgentHarness(SingleTurnAgent, "a b c d e f g h", backend=cast(Any, Streaming), codec=CODEC)
        for _ in range(2)
    )
    first.client.keeps_chunks = True
    for it in (first, second):
        await it.backend.start()
    running = asyncio.ensure_future(first.run())
    async with asyncio.timeout(30):
        part = None
        while part is None or len(part.token_ids) < 3:
            await asyncio.sleep(0)
            part = first.client.partial("t/0")
    prefix = through_a_checkpoint(first.context.episodes["t"].progress())
    running.cancel()
    await asyncio.wait({running})
    trajectory = await resume(second, prefix, "t")
    reply = cast(Any, second.backend).reply
    known = len(part.token_ids)
    assert [request.resumed for request in second.backend.requests] == [known]
    assert trajectory.response_ids == tuple(reply)
    assert trajectory.fork is None
    assert trajectory.rollout_logprobs == tuple(
        -float(place) for place in range(len(trajectory.response_ids))
    )
    for it in (first, second):
        await it.backend.close()


@pytest.fixture
async def server():
    """Answers with how many actions a trajectory has sent, or with ``refusal``."""
    counts: Counter[str] = Counter()

    async def count(payload):
        counts.update(payload["trajectory_ids"])
        said = [f" count {counts[trajectory_id]}" for trajectory_id in payload["trajectory_ids"]]
        return JSONResponse(
            {"observations": said, "dones": [False] * len(said), "valids": [True] * len(said)}
        )

    async with ToolServer() as tool_server:
        tool_server.respond = count
        yield tool_server


def with_tools(server: ToolServer) -> AgentHarness:
    config = ToolClientConfig(server_url=server.url, request_interval=0, retry_delay=0)
    it = AgentHarness(
        TextToolAgent,
        lambda request: it.codec.reply_ids(REPLIES[int(request.request_id.rpartition("/")[2])]),
        codec=CODEC,
        shared={"tool_config": config},
    )
    return it


async def interrupted(server: ToolServer, turn: int) -> Prefix:
    """Return what is known of a trajectory while it samples a turn."""
    it = with_tools(server)
    reached = asyncio.Event()

    def hold(request, sampled) -> bool:
        is_held = request.request_id == f"v/{turn}"
        if is_held:
            reached.set()
        return is_held

    it.backend.hold = hold
    running = asyncio.ensure_future(it.run(trajectory_id="v"))
    async with asyncio.timeout(30):
        await reached.wait()
    prefix = it.context.episodes["v"].progress()
    running.cancel()
    await asyncio.wait({running})
    return through_a_checkpoint(prefix)


@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_tools_are_called_again_and_the_rest_is_sampled_once(server, turn: int):
    uninterrupted = await with_tools(server).run(trajectory_id="u")
    prefix = await interrupted(server, turn)
    again = with_tools(server)
    trajectory = await resume(again, prefix, "w")
    assert (trajectory.response_ids, trajectory.response_mask) == (
        uninterrupted.response_ids,
        uninterrupted.response_mask,
    )
    assert trajectory.messages == uninterrupted.messages
    assert trajectory.finish_reason == uninterrupted.finish_reason
    assert [request.request_id for request in again.backend.requests] == [
        f"w/{n}" for n in range(turn, 4)
    ]


async def test_a_turn_that_was_not_answered_is_answered_and_not_sampled_again(server):
    uninterrupted = await with_tools(server).run(trajectory_id="u")
    prefix = await interrupted(server, 2)
    unanswered = Prefix(
        fork=None,
        prompt_ids=prefix.prompt_ids,
        prompt_media={},
        turns=prefix.turns[:1],
        partial_turn=prefix.turns[1].output,
        messages=prefix.messages_before(1),
    )
    again = with_tools(server)
    trajectory = await resume(again, through_a_checkpoint(unanswered), "w")
    assert trajectory.response_ids == uninterrupted.response_ids
    assert trajectory.messages == uninterrupted.messages
    assert [request.request_id for request in again.backend.requests] == ["w/2", "w/3"]


async def test_a_tool_that_answers_otherwise_refuses_the_continuation(server):
    prefix = await interrupted(server, 2)

    async def otherwise(payload):
        return JSONResponse({"observations": ["other"], "dones": [False], "valids": [True]})

    server.respond = otherwise
    with pytest.raises(ReplayError):
        await resume(with_tools(server), prefix, "w")


async def test_before_its_first_id_there_is_nothing_to_continue(server):
    with pytest.raises(KeyError):
        await interrupted(server, 0)


# --- environments that take snapshots -------------------------------------------------------------

MOVES = ["move a", "move b", "move c", "move d"]
ENVIRONMENT_ROW = {**ROW, "extra_info": {"environment_kwargs": {"name": "ledger"}}}


class Ledger(Environment):
    """Remembers all replies, and ends with the fourth; its snapshot is no UTF-8."""

    takes_snapshots = True
    replayable = False
    steps: list[int]

    async def reset(self):
        self.replies = 0
        return Observation.say("begin")

    async def step(self, reply):
        self.replies += 1
        self.steps.append(self.replies)
        return Observation.say(f"reply {self.replies}", score=1.0, done=self.replies == 4)

    async def snapshot(self):
        return bytes([255, self.replies])

    async def restore(self, snapshot):
        mark, self.replies = snapshot
        if mark != 255:
            raise ValueError("it is no snapshot of a ledger")


@pytest.fixture
def ledger(monkeypatch):
    cls = type("Ledger", (Ledger,), {"steps": []})
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "ledger": cls})
    return cls


def in_environment(**pools) -> AgentHarness:
    it = AgentHarness(
        EnvironmentAgent,
        lambda request: it.codec.reply_ids(MOVES[int(request.request_id.rpartition("/")[2])]),
        codec=CODEC,
        shared={"environments": EnvironmentPools(**pools), "in_checkpoints": True},
    )
    return it


async def interrupted_in_environment(turn: int) -> Prefix:
    """Return what a checkpoint holds of a trajectory that samples a turn."""
    it = in_environment()
    reached = asyncio.Event()

    def hold(request, sampled) -> bool:
        if request.request_id == f"v/{turn}":
            reached.set()
            return True
        return False

    it.backend.hold = hold
    running = asyncio.ensure_future(it.run(ENVIRONMENT_ROW, trajectory_id="v"))
    async with asyncio.timeout(30):
        await reached.wait()
    prefix = it.context.episodes["v"].progress()
    running.cancel()
    await asyncio.wait({running})
    return through_a_checkpoint(prefix)


async def resume_in_environment(it: AgentHarness, prefix: Prefix) -> Trajectory:
    request = episode_request(ENVIRONMENT_ROW, SAMPLING, trajectory_id="w", prefix=prefix)
    return await it.agent.play(request)


@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_an_environment_goes_on_from_its_newest_snapshot(ledger, turn: int):
    uninterrupted = await in_environment().run(ENVIRONMENT_ROW, trajectory_id="u")
    prefix = await interrupted_in_environment(turn)
    assert prefix.snapshot == EnvironmentSnapshot(turns=turn, data=bytes([255, turn]))

    ledger.steps.clear()
    again = in_environment()
    trajectory = await resume_in_environment(again, prefix)
    assert trajectory.response_ids == uninterrupted.response_ids
    assert trajectory.messages == uninterrupted.messages
    assert trajectory.turn_scores == uninterrupted.turn_scores
    assert ledger.steps == list(range(turn + 1, 5))
    assert trajectory.metrics["restored_turns"] == turn
    sampled = [request.request_id for request in again.backend.requests]
    assert sampled == [f"w/{number}" for number in range(turn, 4)]


@pytest.mark.parametrize(
    "snapshot",
    [
        EnvironmentSnapshot(turns=2, data=b"no"),
        EnvironmentSnapshot(turns=2, data=b""),
        EnvironmentSnapshot(turns=3, data=bytes([255, 3])),
        EnvironmentSnapshot(turns=2, data=bytes([255, 2]) * (1 << 20)),
        EnvironmentSnapshot(turns=1, data=bytes([255, 1])),
        None,
    ],
    ids=["foreign", "empty", "of the future", "too large", "too early to replay from", "missing"],
)
async def test_a_snapshot_of_a_file_that_does_not_fit_refuses_the_continuation(ledger, snapshot):
    prefix = replace(await interrupted_in_environment(2), snapshot=snapshot)
    with raises(ReplayError, key="'ledger'"):
        await resume_in_environment(in_environment(snapshot_mb=1), through_a_checkpoint(prefix))


def test_what_is_no_base64_in_a_checkpoint_is_refused():
    prefix = Prefix(
        fork=None,
        prompt_ids=(1,),
        prompt_media={},
        turns=(),
        partial_turn=None,
        messages=(),
        snapshot=EnvironmentSnapshot(turns=1, data=b"data"),
    )
    state = GroupRecord(running={3: lambda: prefix}).state()
    for wrong in ({"turns": 0, "data": "AAAA"}, {"turns": 1, "data": "A"}, {"data": "AAAA"}):
        state["begun"]["3"]["snapshot"] = wrong
        with pytest.raises(ValueError, match="snapshot"):
            GroupRecord.restore(state)


async def test_a_member_whose_environment_cannot_go_on_starts_again_under_its_number(ledger):
    prefix = replace(await interrupted_in_environment(2), snapshot=None)
    it = in_environment()
    collector = RolloutCollector(
        it.context, score=no_score, max_in_flight=4, seed=0, strategy=Chains()
    )
    row = {**ENVIRONMENT_ROW, "agent_name": "environment_agent"}
    group = await collector.collect_one(
        row,
        group_size=1,
        sampling=SAMPLING,
        step=0,
        index=0,
        record=GroupRecord(partial={0: prefix}),
    )
    (trajectory,) = group.trajectories
    assert trajectory.trajectory_id == "train-0-0-0"
    assert trajectory.num_turns == 4
    assert ledger.steps[-4:] == [1, 2, 3, 4]
    assert collector.accounting.summary()["started"] == 1


async def collect_group(it: AgentHarness, record: GroupRecord) -> Group:
    collector = RolloutCollector(
        it.context, score=no_score, max_in_flight=4, seed=0, strategy=Chains()
    )
    row = {**ENVIRONMENT_ROW, "agent_name": "environment_agent"}
    return await collector.collect_one(
        row, group_size=2, sampling=SAMPLING, step=0, index=0, record=record
    )


async def test_an_interrupted_group_continues_its_members_with_their_environments(ledger):
    uninterrupted = await collect_group(in_environment(), GroupRecord())

    it = in_environment()
    held = {"train-0-0-0/2", "train-0-0-1/3"}
    reached: set[str] = set()

    def hold(request, sampled) -> bool:
        if request.request_id in held:
            reached.add(request.request_id)
        return request.request_id in held

    it.backend.hold = hold
    record = GroupRecord()
    running = asyncio.ensure_future(collect_group(it, record))
    async with asyncio.timeout(30):
        while reached != held:
            await asyncio.sleep(0)
    saved = json.dumps(record.state())
    running.cancel()
    await asyncio.wait({running})

    ledger.steps.clear()
    again = in_environment()
    group = await collect_group(again, GroupRecord.restore(json.loads(saved)))
    assert sorted(ledger.steps) == [3, 4, 4]
    for one, other in zip(group.trajectories, uninterrupted.trajectories, strict=True):
        assert one.trajectory_id == other.trajectory_id
        assert one.turns == other.turns
        assert one.messages == other.messages
    assert again.context.environments.snapshots.num_bytes == 0


async def no_score(trajectory: Trajectory) -> Trajectory:
    return trajectory
