"""Groups that branch: exact ids at every fork, tools as they stood there, every loss counted, the
same every time.
"""

import asyncio
import itertools
from collections import Counter

import pytest

from jax_agent_rl.agents import AgentContext, ToolAgent, branching_agents, get_agent
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.strategies import Arpo, Strategy, TreeGrpo, TreeRL
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.config.rollout import ArpoConfig, TreeGrpoConfig, TreerlConfig
from jax_agent_rl.errors import BackendError, ConfigError, RewardError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import BaseTool, ToolRegistry
from jax_agent_rl.types import DropReason, SamplingParams, Trajectory
from tests.agent_testbed import assert_forks_are_exact
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

SAMPLING = SamplingParams(max_tokens=50)
COUNT = "<call>count {}</call>"


def row(agent: str = "tool_agent", text: str = "count to three") -> dict:
    return {"prompt": [{"role": "user", "content": text}], "agent_name": agent}


class Counting(BaseTool):
    """Answers with how often its trajectory has called it."""

    def __init__(self) -> None:
        super().__init__(
            name="count", description="Counts.", parameters={"type": "object", "properties": {}}
        )
        self.counts: dict[str, int] = {}
        self.created: list[str] = []
        self.released: list[str] = []

    async def create(self, instance_id: str, **_) -> None:
        self.created.append(instance_id)
        self.counts[instance_id] = 0

    async def execute(self, instance_id: str, arguments, **_):
        self.counts[instance_id] += 1
        return str(self.counts[instance_id]), 0.5

    async def calc_reward(self, instance_id: str, **_) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **_) -> None:
        self.released.append(instance_id)


class WatchedClient(LLMServerClient):
    """Remembers which sessions were ended."""

    def __init__(self, servers) -> None:
        super().__init__(servers)
        self.ended: set[str] = set()

    def end_session(self, session_id: str) -> None:
        self.ended.add(session_id)
        super().end_session(session_id)


class Stage:
    """A collector over an engine whose model calls the tool twice and then says words drawn by the
    request's seed.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        tool: BaseTool | None = None,
        score=None,
        servers: int = 1,
        script=None,
        backend: type[ScriptedBackend] = ScriptedBackend,
        codec: FakeCodec | None = None,
        max_in_flight: int = 8,
        **limits: int,
    ) -> None:
        self.codec = codec or FakeCodec()
        self.tool = tool or Counting()
        self.backends = [backend(self.codec, script or self.print_line) for _ in range(servers)]
        self.client = WatchedClient(
            [
                AsyncServer(backend, name=f"s{number}")
                for number, backend in enumerate(self.backends)
            ]
        )
        context = AgentContext(
            client=self.client,
            codec=self.codec,
            limits=AgentConfig(tool_prompt="none", **limits),
            max_model_len=1000,
            tools=ToolRegistry([self.tool]),
        )
        self.environments = context.environments
        self.collector = RolloutCollector(
            context, score=score or no_score, max_in_flight=max_in_flight, seed=0, strategy=strategy
        )
        self.books = self.collector.accounting

    def print_line(self, request) -> list[int]:
        text = self.codec.decode(request.prompt_ids, skip_special_tokens=False)
        if text.endswith("assistant:") and text.count("tool:") < 2:
            return self.codec.reply_ids(COUNT)
        return self.codec.reply_ids(f"that was {request.sampling.seed}")

    @property
    def requests(self):
        return [request for backend in self.backends for request in backend.requests]

    async def collect(self, *rows, group_size: int = 6, step: int = 0):
        return await self.collector.collect(
            list(rows) or [row()], group_size=group_size, sampling=SAMPLING, step=step
        )


async def no_score(trajectory):
    return trajectory


STRATEGIES = [
    (TreeGrpo(TreeGrpoConfig(m=2, n=4, k=5)), 10),
    (TreeRL(TreerlConfig(m=2, n=2, t=2)), 10),
    (Arpo(ArpoConfig(initial_rollouts=2, branch_probability=0.9)), 6),
]
NAMES = ["tree_grpo", "treerl", "arpo"]


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES, ids=NAMES)
async def test_a_group_is_a_tree_of_exact_ids(strategy: Strategy, size: int):
    stage = Stage(strategy)
    (group,) = await stage.collect(group_size=size)
    trajectories = group.trajectories
    assert [t.trajectory_id for t in trajectories] == [f"train-0-0-{n}" for n in range(size)]
    assert any(t.fork and t.num_inherited for t in trajectories)
    assert_forks_are_exact(trajectories, stage.requests)
    assert sum(t.num_sampled - t.num_inherited for t in trajectories) == stage.backends[0].sampled
    assert stage.books.summary() == {"started": size, "trained": 0, "in_flight": size, "dropped": 0}
    assert group.metrics["branches"] == sum(t.fork is not None for t in trajectories)


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES, ids=NAMES)
async def test_every_trajectory_has_a_seed_of_its_own_and_the_run_can_be_repeated(
    strategy: Strategy, size: int
):
    codec = FakeCodec()  # the same words are the same ids in both runs
    groups = []
    for in_flight in (8, 1):
        stage = Stage(strategy, max_in_flight=in_flight, codec=codec)
        groups.append(await stage.collect(row(text="a"), row(text="b"), group_size=size))
        seeds = [request.sampling.seed for request in stage.requests]
        assert len(set(seeds)) == len(seeds)
    first, again = (sorted(g, key=lambda group: group.group_id) for g in groups)
    for first_group, second_group in zip(first, again, strict=True):
        assert [_ids(t) for t in first_group.trajectories] == [
            _ids(t) for t in second_group.trajectories
        ]
        responses = [t.response_ids for t in first_group.trajectories]
        assert len(set(responses)) == len(responses), "nothing is there twice"


def _ids(t: Trajectory):
    return t.trajectory_id, t.prompt_ids, t.response_ids, t.fork


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES, ids=NAMES)
async def test_a_stateful_tool_stands_where_it_stood_at_the_fork(strategy: Strategy, size: int):
    stage = Stage(strategy)
    (group,) = await stage.collect(group_size=size)
    for t in group.trajectories:
        assert [call.observation for call in t.tool_calls] == [
            str(n + 1) for n in range(len(t.tool_calls))
        ]
        assert t.tool_scores == {"count": float(len(t.tool_calls))}
        assert t.metrics.get("replayed_calls", 0.0) == (t.fork.turns if t.fork else 0)
    assert (
        sorted(stage.tool.created)
        == sorted(stage.tool.released)
        == [f"train-0-0-{n}" for n in range(size)]
    )


async def test_messages_of_a_branch_are_those_of_its_ids():
    stage = Stage(TreeGrpo(TreeGrpoConfig(m=1, n=6, k=7)))
    few_shot = {
        "prompt": [
            {"role": "user", "content": "an example"},
            {"role": "assistant", "content": "like this"},
            {"role": "user", "content": "now you"},
        ],
        "agent_name": "tool_agent",
    }
    (group,) = await stage.collect(few_shot, group_size=7)
    assert {t.fork.turns for t in group.trajectories if t.fork} == {0, 1, 2}
    for t in group.trajectories:
        roles = [
            "user",
            "assistant",
            "user",
            *["assistant", "tool"] * (t.num_turns - 1),
            "assistant",
        ]
        assert [m["role"] for m in t.messages] == roles
        spoken = [m["content"] for m in t.messages[3:] if m["role"] == "assistant"]
        assert spoken == [stage.codec.decode(turn.output.token_ids) for turn in t.turns]


class Stateless(Counting):
    """Its answers depend on nothing but the call."""

    stateful = False

    async def execute(self, instance_id: str, arguments, **_):
        self.counts[instance_id] += 1
        return "counted"


async def test_a_stateless_tool_is_not_called_again():
    stage = Stage(TreeGrpo(TreeGrpoConfig(m=1, n=5, k=6)), tool=Stateless())
    (group,) = await stage.collect()
    for t in group.trajectories:
        inherited = t.fork.turns if t.fork else 0
        assert stage.tool.counts[t.trajectory_id] == len(t.tool_calls) - inherited


class Fickle(Counting):
    """Never answers twice alike."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = itertools.count()

    async def execute(self, instance_id: str, arguments, **_):
        return f"tick {next(self.ticks)}"


async def test_a_branch_whose_tool_answers_differently_is_dropped_with_the_reason():
    stage = Stage(TreeGrpo(TreeGrpoConfig(m=1, n=5, k=6)), tool=Fickle())
    (group,) = await stage.collect()
    lost = group.dropped[DropReason.REPLAY_MISMATCH]
    assert lost >= 1
    assert group.dropped == {DropReason.REPLAY_MISMATCH: lost}
    assert len(group.trajectories) == 6 - lost
    assert all(t.fork is None or t.fork.at_prompt for t in group.trajectories)
    assert "answered 'tick" in stage.collector.latest_losses[DropReason.REPLAY_MISMATCH]
    assert sorted(stage.tool.released) == sorted(stage.tool.created)
    stage.books.check()


async def test_what_a_tool_reports_while_calls_are_made_again_is_not_counted_twice():
    class Reporting(Counting):
        async def execute(self, instance_id: str, arguments, **_):
            return "x", 0.0, {"calls": 1}

    stage = Stage(TreeGrpo(TreeGrpoConfig(m=1, n=5, k=6)), tool=Reporting())
    (group,) = await stage.collect()
    for t in group.trajectories:
        own_calls = len(t.tool_calls) - (t.fork.turns if t.fork else 0)
        assert t.metrics.get("tool/count/calls", 0.0) == own_calls


async def test_a_lost_branch_takes_nobody_with_it():
    async def second_branch_fails(trajectory):
        if trajectory.trajectory_id.endswith("-3"):
            raise RewardError("not today")
        return trajectory

    stage = Stage(TreeGrpo(TreeGrpoConfig()), score=second_branch_fails)
    (group,) = await stage.collect()
    assert [t.trajectory_id[-1] for t in group.trajectories] == list("01245")
    assert group.dropped == {DropReason.REWARD_ERROR: 1} == stage.books.dropped


async def test_nothing_branches_from_what_was_lost():
    async def first_fails(trajectory):
        if trajectory.trajectory_id.endswith("-0"):
            raise RewardError("not today")
        return trajectory

    for strategy, size in STRATEGIES:
        (group,) = await Stage(strategy, score=first_fails).collect(group_size=size)
        assert len(group.trajectories) >= size / 2
        forks = [t.fork for t in group.trajectories if t.fork and not t.fork.at_prompt]
        assert all(fork.parent_id != "train-0-0-0" for fork in forks)


async def test_leaves_a_strategy_does_not_keep_are_counted():
    stage = Stage(TreeGrpo(TreeGrpoConfig(m=2, n=3, k=2)))
    (group,) = await stage.collect(group_size=4)
    assert len(group.trajectories) == 4
    assert group.dropped == {DropReason.NOT_SELECTED: 4}
    assert Counter(t.tree_id for t in group.trajectories) == {"train-0-0-0": 2, "train-0-0-1": 2}
    assert stage.books.summary() == {
        "started": 8, "trained": 0, "in_flight": 4, "dropped": 4, "dropped/not_selected": 4
    }  # fmt: skip


async def test_chains_that_make_up_for_missing_branches_are_counted():
    stage = Stage(Arpo(ArpoConfig(initial_rollouts=2)), script=["no tools today"])
    (group,) = await stage.collect(group_size=5)
    assert group.metrics == {"branches": 0, "topped_up": 3}
    assert [t.fork for t in group.trajectories] == [None] * 5


async def test_branches_go_to_their_parents_server_and_leave_no_session():
    stage = Stage(TreeGrpo(TreeGrpoConfig(m=2, n=4, k=5)), servers=3)
    (group,) = await stage.collect(group_size=10)
    where = {r.session_id: number for number, b in enumerate(stage.backends) for r in b.requests}
    branched = [t for t in group.trajectories if t.fork and t.fork.turns]
    assert branched
    assert all(where[t.trajectory_id] == where[t.fork.parent_id] for t in branched)
    assert not any(request.session_ends for request in stage.requests), (
        "their KV may be wanted by a branch"
    )
    assert stage.client.ended == {t.trajectory_id for t in group.trajectories}


async def test_cancelling_stops_branches_and_counts_them():
    def hold_branches(request):
        if request.session_id[-1] in "2345":
            backend.unpaused.clear()
        return stage.print_line(request)

    stage = Stage(TreeGrpo(TreeGrpoConfig()), script=hold_branches)
    (backend,) = stage.backends
    task = asyncio.create_task(stage.collect())
    while backend.unpaused.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    summary = stage.books.summary()
    assert (summary["started"], summary["dropped/cancelled"], summary["in_flight"]) == (6, 6, 0)
    assert sorted(stage.tool.created) == sorted(stage.tool.released)
    assert stage.client.ended == {f"train-0-0-{n}" for n in range(6)}
    assert len(asyncio.all_tasks()) == 1


async def test_branches_run_before_further_groups_begin():
    """While the engine still holds what their parents computed."""
    stage = Stage(TreeGrpo(TreeGrpoConfig()), max_in_flight=2)
    await stage.collect(*(row(text=str(n)) for n in range(4)))
    sessions = list(dict.fromkeys(request.session_id for request in stage.requests))
    first_branch = next(
        place for place, name in enumerate(sessions) if name.rpartition("-")[2] == "2"
    )
    assert sessions.index("train-0-3-0") > first_branch


async def test_a_dead_engine_ends_the_group_not_the_batch():
    stage = Stage(TreeGrpo(TreeGrpoConfig()))
    stage.backends[0].die()
    (group,) = await stage.collect()
    assert group.trajectories == ()
    assert group.dropped == {DropReason.BACKEND_ERROR: 6}


class TurnsOnly(ScriptedBackend):
    """Fails every request that goes on within a turn."""

    async def generate(self, request):
        if not self.codec.decode(request.prompt_ids, skip_special_tokens=False).endswith(
            "assistant:"
        ):
            raise BackendError("no")
        return await super().generate(request)


async def test_one_kind_of_branch_that_fails_leaves_the_others():
    stage = Stage(TreeRL(TreerlConfig(m=2, n=2, t=2)), backend=TurnsOnly)
    (group,) = await stage.collect(group_size=10)
    lost = group.dropped.get(DropReason.BACKEND_ERROR, 0)
    assert 0 < lost <= 8
    assert len(group.trajectories) == 10 - lost


async def test_forks_within_a_turn_keep_to_the_budgets():
    words = ["one two three four five six seven eight"]
    stage = Stage(TreeRL(TreerlConfig(m=1, n=3, t=2)), script=words, max_response_length=6)
    (group,) = await stage.collect(row("single_turn_agent"), group_size=7)
    assert [len(t.response_ids) for t in group.trajectories] == [6] * 7
    assert {t.fork.tokens for t in group.trajectories if t.fork} != {0}


OWN_AGENTS = {
    "tool_agent",
    "single_turn_agent",
    "text_tool_agent",
    "search_agent",
    "server_tool_agent",
    "interaction_agent",
    "environment_agent",
}


async def test_agents_that_cannot_branch_are_refused_before_the_run():
    assert set(branching_agents()) >= OWN_AGENTS
    assert not get_agent("react_agent").can_branch()
    stage = Stage(TreeGrpo(TreeGrpoConfig()))
    stage.collector.require_branching([row(), row("single_turn_agent")])
    with raises(ConfigError, key="agent 'react_agent'", fix=("tool_agent", "strategy.name=chain")):
        stage.collector.require_branching([row(), row("react_agent")])


async def test_a_loop_with_a_play_of_its_own_branches_only_if_it_says_so():
    class Mine(ToolAgent):
        async def play(self, request):
            return await super().play(request)

    class MyBranches(Mine):
        continues_prefix = True

        async def play(self, request):
            return await super().play(request)

    class MyTools(ToolAgent):
        pass

    assert not Mine.can_branch()
    assert MyBranches.can_branch()
    assert MyTools.can_branch()
