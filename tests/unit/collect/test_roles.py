"""Agents of several roles: an episode yields a trajectory per role, and rewards compare within
group and role.
"""

from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.agents import AgentContext, AgentLoop, AgentSelector, FrozenModel, register_agent
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import select
from jax_agent_rl.config import AgentConfig, AlgorithmConfig, build
from jax_agent_rl.errors import ConfigError, TrajectoryError
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.trainer.step import recorded, update_role_baselines, with_role_baselines
from jax_agent_rl.types import DropReason, FinishReason, Group, SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises
from tests.trajectories import trajectory

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2 ?"}],
    "agent_name": "pair_for_test",
    "data_source": "sums",
}
SAMPLING = SamplingParams(max_tokens=9)


@register_agent("pair_for_test")
class Pair(AgentLoop):
    """A solver and a checker, one turn each; ``row["fails"]`` numbers the episodes whose checker
    fails.
    """

    roles = ("solver", "checker")

    async def play(self, request):
        row = request.row
        solver = self.start(request.as_role("solver"))
        await solver.generate(session_ends=True)
        if int(request.trajectory_id.rpartition("-")[2]) in row.get("fails", ()):
            raise TrajectoryError("the checker failed")
        answered = replace(request, row={**row, "prompt": solver.messages})
        checker = self.start(answered.as_role("checker"))
        await checker.generate(session_ends=True)
        return [episode.finish(FinishReason.ANSWER) for episode in (solver, checker)]


@register_agent("misnamed_for_test")
class Misnamed(AgentLoop):
    roles = ("solver",)

    async def play(self, request):
        self.start(request.as_role("slover"))


@register_agent("twice_for_test")
class Twice(Pair):
    async def play(self, request):
        first, _ = await super().play(request)
        return [first, first]


async def by_role(played):
    return replace(played, reward={"solver": 1.0, "checker": 0.25}[played.role])


class Stage:
    def __init__(self, *, frozen=(), **limits):
        self.codec = FakeCodec()
        self.other = FakeCodec()
        self.backend = ScriptedBackend(self.codec, ["four"])
        self.backend.capabilities = replace(self.backend.capabilities, lora=True)
        self.frozen = ScriptedBackend(self.other, ["wrong"])
        model = FrozenModel(client=LLMServerClient([AsyncServer(self.frozen)]), codec=self.other)
        context = AgentContext(
            client=LLMServerClient([AsyncServer(self.backend)]),
            codec=self.codec,
            limits=AgentConfig(**limits),
            max_model_len=1000,
            frozen=dict.fromkeys(frozen, model),
        )
        self.collector = RolloutCollector(context, score=by_role, max_in_flight=4, seed=0)
        self.books = self.collector.accounting

    async def group(self, row=ROW, size=3) -> Group:
        (group,) = await self.collector.collect([row], group_size=size, sampling=SAMPLING, step=0)
        return group


async def test_an_episode_yields_a_scored_trajectory_per_role():
    stage = Stage()
    group = await stage.group()
    expected = []
    for i in range(3):
        expected.append((f"train-0-0-{i}/solver", "solver", 1.0))
        expected.append((f"train-0-0-{i}/checker", "checker", 0.25))
    assert [(t.trajectory_id, t.role, t.reward) for t in group.trajectories] == expected
    assert {t.episode_id for t in group.trajectories} == {f"train-0-0-{i}" for i in range(3)}
    assert stage.books.summary() == {"started": 6, "trained": 0, "in_flight": 6, "dropped": 0}
    stage.books.train(t.trajectory_id for t in group.trajectories)
    assert not stage.books.is_open(group.group_id)
    assert stage.books.summary()["trained"] == 6


async def test_roles_sample_with_seeds_of_their_own():
    stage = Stage()
    await stage.group()
    assert len({request.sampling.seed for request in stage.backend.requests}) == 6


async def test_a_failure_of_one_role_drops_the_episode_and_nothing_else():
    stage = Stage()
    group = await stage.group({**ROW, "fails": [1]})
    assert [t.episode_id for t in group.trajectories] == ["train-0-0-0"] * 2 + ["train-0-0-2"] * 2
    assert group.dropped == {DropReason.AGENT_ERROR: 1}
    assert stage.books.summary() == {
        "started": 5, "trained": 0, "in_flight": 4, "dropped": 1, "dropped/agent_error": 1
    }  # fmt: skip


async def test_a_frozen_role_is_played_by_its_model_and_is_no_sample():
    stage = Stage(frozen=["checker"])
    group = await stage.group()
    assert [t.role for t in group.trajectories] == ["solver"] * 3
    assert [(t.role, t.reward) for t in group.frozen] == [("checker", 0.25)] * 3
    assert {stage.other.decode(t.response_ids).strip() for t in group.frozen} == {"wrong"}
    assert len(stage.backend.requests) == len(stage.frozen.requests) == 3
    assert stage.books.summary() == {"started": 3, "trained": 0, "in_flight": 3, "dropped": 0}
    assert [t.role for t in recorded([group])] == ["solver"] * 3 + ["checker"] * 3
    batch = scored_batch([group], turn_reward="none")
    assert [t.role for t in batch.trajectories] == ["solver"] * 3, "the learner never sees it"


async def test_an_adapter_plays_its_role_and_the_model_below_it_is_frozen():
    stage = Stage(role_adapters={"solver": "a"})
    group = await stage.group(size=1)
    assert [request.lora for request in stage.backend.requests] == ["a", None]
    assert [(t.role, t.adapter) for t in group.trajectories] == [("solver", "a")]
    assert [(t.role, t.adapter) for t in group.frozen] == [("checker", None)]


async def test_an_episode_without_a_trained_role_is_dropped():
    group = await Stage(frozen=["solver", "checker"]).group()
    assert group.trajectories == group.frozen == ()
    assert group.dropped == {DropReason.AGENT_ERROR: 3}


@pytest.mark.parametrize("agent", ["twice_for_test", "misnamed_for_test"])
async def test_an_agent_that_mixes_up_its_roles_loses_the_episode(agent):
    stage = Stage()
    group = await stage.group({**ROW, "agent_name": agent}, size=1)
    assert group.trajectories == ()
    assert group.dropped == {DropReason.AGENT_ERROR: 1}
    assert {"twice_for_test": "each role once", "misnamed_for_test": "starts role 'slover'"}[
        agent
    ] in (stage.collector.latest_losses[DropReason.AGENT_ERROR])


@pytest.mark.parametrize("key", ["role_models", "role_adapters"])
async def test_a_role_that_no_agent_has_is_refused_before_the_run(key):
    context = AgentContext(
        client=LLMServerClient([]),
        codec=FakeCodec(),
        limits=AgentConfig(**{key: {"cheker": "x"}}),
        max_model_len=9,
    )
    with raises(ConfigError, key=f"agent.{key}", value="'cheker'", fix="'checker'"):
        await AgentSelector(context).preflight([ROW])


# --- baselines ------------------------------------------------------------------------------------


def member(role: str, index: int, reward: float, group: str = "g"):
    member_trajectory = trajectory([5], [6, 7], reward=reward, index=index, group=group)
    return replace(
        member_trajectory,
        role=role,
        trajectory_id=f"{member_trajectory.trajectory_id}/{role}",
        row={"data_source": "sums"},
    )


SOLVER = (1.0, 0.0, 0.0, 1.0)
CHECKER = (0.25, 0.5, 1.0, 0.25)


def played() -> Group:
    pairs = enumerate(zip(SOLVER, CHECKER, strict=True))
    members = [m for i, (s, c) in pairs for m in (member("solver", i, s), member("checker", i, c))]
    return Group(group_id="g", trajectories=tuple(members))


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_baselines_are_those_of_group_and_role(estimator):
    batch = scored_batch([played(), replace(played())], turn_reward="none")
    got = compute_advantages(batch, AlgorithmConfig(adv_estimator=estimator)).advantages

    def by_hand(rewards):
        r = np.array(rewards, np.float64)
        if estimator == "rloo":
            return [x - (r.sum() - x) / (len(r) - 1) for x in r]
        return (r - r.sum() / 4) / (
            np.sqrt(((r - r.sum() / 4) ** 2).sum() / 3) + 1e-6 if estimator == "grpo" else 1.0
        )

    expected = np.stack([by_hand(SOLVER), by_hand(CHECKER)], axis=1).ravel()
    np.testing.assert_allclose(
        np.stack(got), np.tile(expected, 2)[:, None].repeat(2, axis=1), atol=1e-12
    )


def test_a_role_of_equal_rewards_is_left_out_and_the_other_is_trained():
    group = replace(
        played(),
        trajectories=tuple(
            replace(t, reward=1.0) if t.role == "solver" else t for t in played().trajectories
        ),
    )
    selection = select([group], AlgorithmConfig())
    assert [t.role for t in selection.groups[0].trajectories] == ["checker"] * 4
    assert selection.dropped == {DropReason.ZERO_VARIANCE: tuple(f"g-{i}/solver" for i in range(4))}


def test_rae_subtracts_the_running_mean_of_the_role_before_the_step():
    known = update_role_baselines({}, [played()])
    b = {"solver": 0.0, "checker": 0.0}  # the recurrence of the paper, by hand
    for s, c in zip(SOLVER, CHECKER, strict=True):
        b = {"solver": 0.95 * b["solver"] + 0.05 * s, "checker": 0.95 * b["checker"] + 0.05 * c}
    assert known == pytest.approx({f"sums/{role}": value for role, value in b.items()}, abs=1e-15)
    batch = scored_batch([with_role_baselines(played(), known)], turn_reward="none")
    got = compute_advantages(batch, AlgorithmConfig(adv_estimator="rae")).advantages
    expected = []
    for solver, checker in zip(SOLVER, CHECKER, strict=True):
        expected += [solver - b["solver"], checker - b["checker"]]
    np.testing.assert_allclose([a[0] for a in got], expected, atol=1e-15)
    later = update_role_baselines(
        known, [replace(played(), trajectories=(member("solver", 0, 1.0),))]
    )
    assert later == {**known, "sums/solver": pytest.approx(0.95 * b["solver"] + 0.05)}


# --- configuration --------------------------------------------------------------------------------

CONFIG = {"run_dir": "r", "data": {"train": "x"}, "model": {"path": "m"}}
ADAPTERS = {"role_adapters": {"solver": "a", "checker": "b"}}


def test_adapters_of_roles_need_lora():
    build(CONFIG | {"agent": ADAPTERS, "learner": {"lora": {"rank": 4}}})
    with raises(ConfigError, key="agent.role_adapters", fix="set learner.lora"):
        build(CONFIG | {"agent": ADAPTERS})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rollout": {"backend": "remote", "urls": ["http://127.0.0.1:1"]}},
            {"key": "rollout.backend", "value": "remote"},
        ),
        ({"rollout": {"deterministic": True}}, {"key": "rollout.deterministic", "value": "True"}),
        (
            {"algorithm": {"adv_estimator": "gae"}},
            {"key": "algorithm.adv_estimator", "value": "gae"},
        ),
        ({"agent": ADAPTERS | {"role_models": {"solver": "m"}}}, {"value": "['solver']"}),
    ],
)
def test_adapters_of_roles_are_refused_where_nothing_trains_or_serves_them(changes, named):
    with raises(ConfigError, **named):
        build(CONFIG | {"agent": ADAPTERS, "learner": {"lora": {"rank": 4}}} | changes)
