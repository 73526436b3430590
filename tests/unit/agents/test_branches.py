"""Branches of every agent: exact ids, the state of its tools, server, environment or user, and
refusals.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from jax_agent_rl.agents import (
    AgentLoop,
    AgentSelector,
    EnvironmentAgent,
    InteractionAgent,
    ServerToolAgent,
    TextToolAgent,
)
from jax_agent_rl.agents.request import Prefix
from jax_agent_rl.config import ToolClientConfig
from jax_agent_rl.environments import Environment, EnvironmentPools, Observation, base
from jax_agent_rl.environments.snapshots import EnvironmentSnapshot
from jax_agent_rl.environments.users import BaseInteraction, Gsm8kInteraction, InteractionRegistry
from jax_agent_rl.errors import ConfigError, ReplayError
from jax_agent_rl.tools import ToolRegistry
from jax_agent_rl.types import Fork, SamplingParams, ToolCallRecord, Trajectory
from jax_agent_rl.utils.failures import FailureLog
from tests.agent_testbed import (
    ACT,
    ROW,
    STOP,
    AgentHarness,
    assert_forks_are_exact,
    branch_request,
    episode_request,
)
from tests.http_service import JSONResponse, ToolServer
from tests.messages import raises
from tests.unit.collect.test_branching import Counting

FORKS = [(1, 0), (2, 0), (2, 3), (0, 2)]


class Branching:
    """Runs a trajectory of four turns and a branch of it; a turn's words depend on its number
    alone.
    """

    def __init__(self, agent: type[AgentLoop], replies: list[str], **settings):
        self.replies = replies
        self.known_tokens = {}  # of a turn that a branch goes on with
        self.it = AgentHarness(agent, self.reply, **settings)

    def reply(self, request):
        turn = int(request.request_id.rpartition("/")[2])
        ids = self.it.codec.reply_ids(self.replies[min(turn, len(self.replies) - 1)])
        return ids[self.known_tokens.get(request.request_id, 0) :]

    async def parent(self, row: Mapping = ROW) -> Trajectory:
        return await self.it.run(row)

    async def branch(self, parent: Trajectory, turns: int, tokens: int = 0) -> Trajectory:
        """Branch, and check the ids."""
        self.known_tokens[f"b/{turns}"] = tokens
        fork = Fork(tree_id="t", parent_id="t", turns=turns, tokens=tokens)
        sampling = SamplingParams(max_tokens=1000, seed=1)
        branch = await self.it.agent.play(branch_request(parent, fork, sampling))
        assert branch.fork == fork
        assert branch.prompt_ids == parent.prompt_ids
        assert_forks_are_exact([parent, branch], self.it.backend.requests)
        return branch


def assert_same_course(parent: Trajectory, branch: Trajectory) -> None:
    """The replies are the same, so a branch whose state was restored goes the way of its parent."""
    assert branch.messages == parent.messages
    assert branch.finish_reason == parent.finish_reason
    assert (branch.response_ids, branch.response_mask) == (
        parent.response_ids,
        parent.response_mask,
    )
    assert branch.turn_scores == parent.turn_scores
    assert [call.observation for call in branch.tool_calls] == [
        call.observation for call in parent.tool_calls
    ]


# --- tool servers ---------------------------------------------------------------------------------


@pytest.fixture
async def counting_server():
    """A server that answers with how many actions a trajectory has sent."""
    counts: Counter[str] = Counter()

    async def count(payload):
        counts.update(payload["trajectory_ids"])
        said = [f" count {counts[trajectory_id]}" for trajectory_id in payload["trajectory_ids"]]
        return JSONResponse(
            {"observations": said, "dones": [False] * len(said), "valids": [True] * len(said)}
        )

    async with ToolServer() as server:
        server.respond = count
        yield server


def text_tools(server: ToolServer, **limits) -> Branching:
    config = ToolClientConfig(server_url=server.url, request_interval=0, retry_delay=0)
    code = "a b c <tool> print(3) </tool> junk"
    return Branching(
        TextToolAgent, [code, code, code, "so 3"], shared={"tool_config": config}, **limits
    )


def server_tools(server: ToolServer, **limits) -> Branching:
    return Branching(
        ServerToolAgent,
        [ACT, ACT, ACT, "so it is 3"],
        **{"tool_server_url": server.url, **STOP, **limits},
    )


MODES = {
    "text_tool": (text_tools, {}),
    "async": (server_tools, {}),
    "sync": (server_tools, {"rollout_mode": "sync"}),
    "observed_first": (server_tools, {"call_tool_first": True}),
    "messages": (server_tools, {"enable_mtrl": True}),
    "messages_observed_first": (server_tools, {"enable_mtrl": True, "call_tool_first": True}),
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_server_is_sent_the_inherited_actions_again(counting_server, mode, fork):
    make, limits = MODES[mode]
    stage = make(counting_server, **limits)
    parent = await stage.parent()
    branch = await stage.branch(parent, *fork)
    assert_same_course(parent, branch)
    assert counting_server.closed == {"t": 1, "b": 1}
    assert branch.metrics["replayed_calls"] == fork[0]
    sent = {name: [] for name in "tb"}
    for payload in counting_server.requests:
        sent[payload.pop("trajectory_ids")[0]].append(payload)
    assert sent["t"] == sent["b"]
    assert len(sent["t"]) >= 3


async def test_an_error_of_the_model_is_not_sent_again(counting_server):
    stage = text_tools(counting_server)
    stage.replies = ["oops </tool>", "<tool> 1 </tool>", "so 3"]
    parent = await stage.parent()
    assert parent.tool_calls[0].error == "malformed"
    assert_same_course(parent, await stage.branch(parent, 2))
    assert len(counting_server.requests) == 2


@pytest.mark.parametrize("make", [text_tools, server_tools])
async def test_a_tool_server_that_answers_differently_ends_the_branch(make):
    ticks = iter(range(100))
    async with ToolServer(lambda action: f" tick {next(ticks)}") as server:
        stage = make(server)
        parent = await stage.parent()
        with raises(ReplayError, key="turn 0", value=("tick 3", "tick 0")):
            await stage.branch(parent, 1)
        assert server.closed == {"t": 1, "b": 1}
    async with ToolServer(lambda action: f" tick {next(ticks)}") as server:
        stage = server_tools(server, call_tool_first=True)
        parent = await stage.parent()
        with raises(ReplayError, key="tool_server"):
            await stage.branch(parent, 0, 2)


# --- environments ---------------------------------------------------------------------------------


class Game(Environment):
    """Answers with the number of replies so far and rings a bell; ends with the fourth."""

    count = 0
    drift = 0

    def __init__(self):
        type(self).count += 1

    async def reset(self, *, start: int = 0) -> Observation:
        self.steps = start + self.drift
        return Observation.say("begin", metrics={"resets": 1})

    async def step(self, reply):
        self.steps += 1
        bell = ToolCallRecord(
            name="bell", arguments={}, observation=f"ding {self.steps}", reward=0.5
        )
        return Observation.say(
            f"{reply.content.strip()} {self.steps + self.drift}",
            score=float(self.steps),
            done=self.steps >= 4,
            tool_calls=(bell,),
            metrics={"steps": 1},
        )

    async def conclude(self, messages, reason):
        return {"score": 10.0, "messages": len(messages)}


@pytest.fixture
def game(monkeypatch):
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "counter": Game})
    monkeypatch.setattr(Game, "count", 0)
    return Game


def playing(**limits) -> Branching:
    words = [f"move number {n}" for n in range(4)]
    return Branching(
        EnvironmentAgent, words, shared={"environments": EnvironmentPools(timeout=60.0)}, **limits
    )


GAME = {**ROW, "extra_info": {"environment_kwargs": {"name": "counter"}}}


@pytest.mark.parametrize("fork", FORKS)
async def test_a_branch_has_an_environment_of_its_own_in_the_state_of_the_fork(game, fork):
    stage = playing()
    parent = await stage.parent(GAME)
    branch = await stage.branch(parent, *fork)
    assert_same_course(parent, branch)
    assert branch.turn_scores == (1.0, 2.0, 3.0, 14.0)
    assert game.count == 2
    assert parent.metrics["resets"] == 1 and "resets" not in branch.metrics, (
        "that reset is the parent's"
    )
    assert branch.metrics["steps"] == 4 - fork[0]
    assert branch.metrics["replayed_calls"] == fork[0]
    assert branch.metrics["messages"] == len(parent.messages)


async def test_long_observations_are_replayed_as_they_were_shown(game):
    stage = playing(max_tool_response_length=2, tool_response_truncate_side="right")
    parent = await stage.parent(GAME)
    assert_same_course(parent, await stage.branch(parent, 2))


async def test_an_environment_that_goes_another_way_ends_the_branch(game, monkeypatch):
    stage = playing()
    parent = await stage.parent(GAME)
    monkeypatch.setattr(game, "drift", 1)
    with raises(
        ReplayError,
        key="environment 'counter'",
        fix=("environment_kwargs", "`replayable`", "chain"),
    ):
        await stage.branch(parent, 1)

    async def other_opening(self):
        return Observation.say("another beginning")

    monkeypatch.setattr(game, "reset", other_opening)
    with raises(ReplayError, key="'counter'", value="another beginning"):
        await stage.branch(parent, 0, 1)


async def test_an_environment_that_cannot_be_replayed_is_refused_before_the_run(game, monkeypatch):
    selector = AgentSelector(playing().it.context)
    row = {**GAME, "agent_name": "environment_agent"}
    selector.require_branching([row])
    monkeypatch.setattr(game, "replayable", False)
    with raises(ConfigError, key="environment 'counter'", fix="rollout.strategy.name=chain"):
        selector.require_branching([row])


# --- environments that take snapshots -------------------------------------------------------------


class SavedGame(Game):
    """Cannot be replayed, but saved; ``restored`` lists what it was restored from."""

    replayable = False
    takes_snapshots = True
    restored: list[bytes]

    async def snapshot(self):
        return str(self.steps).encode()

    async def restore(self, snapshot):
        self.restored.append(snapshot)
        self.steps = int(snapshot)


@pytest.fixture
def saved_game(monkeypatch):
    cls = type("SavedGame", (SavedGame,), {"restored": [], "count": 0})
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "counter": cls})
    return cls


def playing_saved(pools: EnvironmentPools | None = None, **shared) -> Branching:
    words = [f"move number {n}" for n in range(4)]
    pools = pools or EnvironmentPools(timeout=60.0)
    settings = {"environments": pools, "keep_sessions": True, **shared}
    return Branching(EnvironmentAgent, words, shared=settings)


@pytest.mark.parametrize("fork", FORKS)
async def test_a_branch_begins_with_a_snapshot_instead_of_a_replay(saved_game, fork):
    stage = playing_saved()
    parent = await stage.parent(GAME)
    branch = await stage.branch(parent, *fork)
    assert_same_course(parent, branch)
    assert branch.turn_scores == (1.0, 2.0, 3.0, 14.0)
    assert branch.metrics["steps"] == 4 - fork[0]
    assert branch.metrics["replayed_calls"] == 0
    assert branch.metrics["restored_turns"] == fork[0]
    assert saved_game.restored == ([str(fork[0]).encode()] if fork[0] else [])


async def test_turns_after_the_newest_snapshot_are_replayed(saved_game, monkeypatch):
    monkeypatch.setattr(saved_game, "replayable", True)
    stage = playing_saved()
    parent = await stage.parent(GAME)
    snapshots = stage.it.context.environments.snapshots
    early = snapshots.newest("t", 1)
    snapshots.forget("t")
    snapshots.add("t", early)
    branch = await stage.branch(parent, 3)
    assert_same_course(parent, branch)
    assert (branch.metrics["restored_turns"], branch.metrics["replayed_calls"]) == (1, 2)


async def test_a_branch_leaves_a_branch_where_that_began(saved_game):
    stage = playing_saved()
    parent = await stage.parent(GAME)
    await stage.branch(parent, 2)
    assert stage.it.context.environments.snapshots.newest("b", 2).data == b"2"


async def test_a_resumed_branch_begins_with_its_own_snapshot_or_its_parents_at_the_fork(
    saved_game, monkeypatch
):
    monkeypatch.setattr(saved_game, "replayable", True)
    stage = playing_saved()
    parent = await stage.parent(GAME)
    fork = Fork(tree_id="t", parent_id="t", turns=1)
    three_turns = replace(Prefix.of(parent, replace(fork, turns=3)), fork=fork)
    own_snapshot = EnvironmentSnapshot(turns=2, data=b"2")
    for snapshot in (own_snapshot, None):
        prefix = replace(three_turns, snapshot=snapshot)
        sampling = SamplingParams(max_tokens=1000, seed=1)
        request = episode_request(GAME, sampling, trajectory_id="b", prefix=prefix)
        await stage.it.agent.play(request)
    assert saved_game.restored == [b"2", b"1"]


async def test_a_trajectory_that_starts_again_has_no_snapshots_of_the_attempt_before(
    saved_game, monkeypatch
):
    async def no_snapshot(self):
        raise OSError("disk full")

    monkeypatch.setattr(saved_game, "replayable", True)
    monkeypatch.setattr(saved_game, "snapshot", no_snapshot)
    stage = playing_saved()
    earlier = EnvironmentSnapshot(turns=1, data=b"77")
    stage.it.context.environments.snapshots.add("t", earlier)
    parent = await stage.parent(GAME)
    branch = await stage.branch(parent, 1)
    assert_same_course(parent, branch)
    assert saved_game.restored == []


async def test_without_room_for_snapshots_the_branch_is_replayed_or_lost(saved_game, monkeypatch):
    stage = playing_saved(EnvironmentPools(timeout=60.0, snapshot_mb=0))
    parent = await stage.parent(GAME)
    selector = AgentSelector(stage.it.context)
    row = {**GAME, "agent_name": "environment_agent"}
    with raises(ConfigError, key="environment 'counter'", fix="environments.snapshot_mb"):
        selector.require_branching([row])
    with raises(ReplayError, key="'counter'", fix="environments.snapshot_mb"):
        await stage.branch(parent, 2)
    monkeypatch.setattr(saved_game, "replayable", True)
    selector.require_branching([row])
    branch = await stage.branch(parent, 2)
    assert_same_course(parent, branch)
    assert branch.metrics["replayed_calls"] == 2


async def test_an_environment_that_takes_snapshots_can_branch_though_it_cannot_be_replayed(
    saved_game,
):
    selector = AgentSelector(playing_saved().it.context)
    selector.require_branching([{**GAME, "agent_name": "environment_agent"}])


@pytest.mark.parametrize("wrong", ["5", None, ValueError("disk full")])
async def test_a_snapshot_that_fails_is_told_and_loses_no_trajectory(
    saved_game, monkeypatch, wrong
):
    async def snapshot(self):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    told = []
    monkeypatch.setattr(saved_game, "snapshot", snapshot)
    monkeypatch.setattr(saved_game, "replayable", True)
    stage = playing_saved(failures=FailureLog(emit=told.append))
    parent = await stage.parent(GAME)
    assert "'counter'" in told[0] and "snapshot" in told[0]
    assert_same_course(parent, await stage.branch(parent, 2))


async def test_a_snapshot_that_cannot_be_restored_loses_the_branch(saved_game, monkeypatch):
    stage = playing_saved()
    parent = await stage.parent(GAME)

    async def restore(self, snapshot):
        raise ValueError("it is damaged")

    monkeypatch.setattr(saved_game, "restore", restore)
    with raises(ReplayError, key="'counter'", value="it is damaged"):
        await stage.branch(parent, 2)


async def test_no_snapshots_are_taken_of_what_nothing_goes_on_from(saved_game, monkeypatch):
    taken = []
    kept_bytes = []

    async def snapshot(self):
        taken.append(self.steps)
        kept_bytes.append(pools.snapshots.num_bytes)
        return b"x"

    pools = EnvironmentPools(timeout=60.0)

    monkeypatch.setattr(saved_game, "snapshot", snapshot)
    await playing_saved(keep_sessions=False).parent(GAME)
    assert taken == []
    await playing_saved(pools, keep_sessions=False, in_checkpoints=True).parent(GAME)
    assert taken == [1, 2, 3]
    assert kept_bytes == [0, 1, 1], "a checkpoint needs the newest alone"
    assert pools.snapshots.num_bytes == 0, "it is over"


# --- simulated users ------------------------------------------------------------------------------


class Teacher(BaseInteraction):
    """Says how often it was asked; stays until the fourth question."""

    drift = 0

    def __init__(self):
        super().__init__({})
        self.asked: Counter[str] = Counter()
        self.heard: dict[str, list] = {}

    async def generate_response(self, instance_id, messages, **kwargs):
        self.asked[instance_id] += 1
        self.heard.setdefault(instance_id, []).append([dict(m) for m in messages])
        count = self.asked[instance_id]
        return count == 4, f"question {count + self.drift}", float(count), {"asked": 1}


class Indifferent(Teacher):
    """The same, if one looks at the conversation alone."""

    stateful = False

    async def generate_response(self, instance_id, messages, **kwargs):
        self.asked[instance_id] += 1
        count = sum(m["role"] == "assistant" for m in messages)
        return count == 4, f"question {count}", float(count), {}


def talking(user: BaseInteraction, words: list[str], *tools) -> Branching:
    shared = {"interactions": InteractionRegistry({"user": user}), "tools": ToolRegistry(tools)}
    return Branching(InteractionAgent, words, shared=shared)


WORDS = [f"this is answer {n}" for n in range(4)]


@pytest.mark.parametrize("fork", FORKS)
async def test_a_stateful_user_is_asked_again_and_hears_the_same_conversation(fork):
    user = Teacher()
    stage = talking(user, WORDS)
    parent = await stage.parent()
    branch = await stage.branch(parent, *fork)
    assert_same_course(parent, branch)
    assert user.heard["b"] == user.heard["t"]
    assert branch.turn_scores == (1.0, 2.0, 3.0, 4.0)
    assert branch.metrics["replayed_calls"] == fork[0]
    assert branch.metrics["interaction/asked"] == branch.metrics["interaction_turns"] == 4 - fork[0]


@pytest.mark.parametrize("fork", FORKS)
async def test_a_stateless_user_is_not_asked_again(fork):
    user = Indifferent()
    stage = talking(user, WORDS)
    parent = await stage.parent()
    assert_same_course(parent, await stage.branch(parent, *fork))
    assert user.asked == {"t": 4, "b": 4 - fork[0]}


async def test_tools_and_a_user_are_replayed_in_turn():
    user = Teacher()
    tool = Counting()
    words = [
        "<call>count {}</call>",
        "is it 1 ?",
        "<call>count {}</call>",
        "then 2",
        "yes",
        "yes",
        "yes",
    ]
    stage = talking(user, words, tool)
    parent = await stage.parent()
    branch = await stage.branch(parent, 3, 1)
    assert_same_course(parent, branch)
    assert [call.observation for call in branch.tool_calls] == ["1", "2"]
    assert tool.counts["b"] == 2
    assert branch.metrics["replayed_calls"] == 3


async def test_a_user_that_answers_differently_ends_the_branch():
    user = Teacher()
    stage = talking(user, WORDS)
    parent = await stage.parent()
    user.drift = 1
    with raises(
        ReplayError, key="interaction 'user'", value=("question 2", "question 1"), fix="`stateful`"
    ):
        await stage.branch(parent, 1)


async def test_the_user_with_the_answer_sheet_scores_a_branch():
    stage = talking(Gsm8kInteraction({}), ["#### 1", "#### 2", "#### 3"])
    parent = await stage.parent(
        {**ROW, "extra_info": {"interaction_kwargs": {"ground_truth": "3"}}}
    )
    stage.replies = ["#### 1", "it must be #### 3"]
    branch = await stage.branch(parent, 1)
    assert parent.turn_scores == (0.0, 0.0, 1.0)
    assert branch.turn_scores == (0.0, 1.0)
