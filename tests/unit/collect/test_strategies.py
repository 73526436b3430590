"""What each strategy starts, and from where. The counts and rules are those of the papers' formulas
and code.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.collect.strategies import (
    Arpo,
    Chains,
    Growth,
    Outcome,
    Start,
    Strategy,
    TreeGrpo,
    TreeRL,
    make_strategy,
)
from jax_agent_rl.config.rollout import ArpoConfig, StrategyConfig, TreeGrpoConfig, TreerlConfig
from jax_agent_rl.types import Fork, Trajectory
from tests.trajectories import call, trajectory

ASKED = [[call()], [call()], [call()]]


def of_turns(number: int, *logprobs: list[float], fork: Fork | None = None) -> Trajectory:
    """A trajectory with these log-probs per turn, each but the last a tool call with a one-id
    result.
    """
    response = []
    mask = []
    flat = []
    for turn, values in enumerate(logprobs):
        result = turn < len(logprobs) - 1
        response += [10 * (turn + 1) + i for i in range(len(values))] + [7] * result
        mask += [1] * len(values) + [0] * result
        flat += [*values, 0.0] if result else values
    built = trajectory(
        [3], response, mask=mask, logprobs=flat, index=number, calls=ASKED[: len(logprobs) - 1]
    )
    return replace(built, fork=fork)


def grow(strategy: Strategy, make, *, group_size: int = 8, seed: int = 0) -> Growth:
    """Ask for waves until none is left; ``make(number, start)`` plays a start, None loses it."""
    growth = Growth(group_size=group_size, seed=seed)
    while starts := strategy.next_wave(growth):
        wave = []
        for start in starts:
            number = growth.started + len(wave)
            wave.append(
                Outcome(
                    trajectory_id=f"g-{number}",
                    start=start,
                    trajectories=tuple(filter(None, [make(number, start)])),
                )
            )
        growth = replace(growth, waves=(*growth.waves, wave))
    return growth


def three_turns(number: int, start: Start) -> Trajectory:
    return of_turns(number, [-1.0, -1.0], [-1.0, -1.0], [-1.0], fork=start.fork)


def starts_of(growth: Growth) -> list[Start]:
    return [outcome.start for wave in growth.waves for outcome in wave]


def test_chains_all_start_at_the_prompt_in_one_wave():
    growth = grow(Chains(), three_turns, group_size=5)
    assert [starts_of(growth), len(growth.waves)] == [[Start()] * 5, 1]


@given(
    m=st.integers(1, 4),
    n=st.integers(1, 4),
    rounds=st.integers(1, 3),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_tree_grpo_grows_m_trees_of_one_and_n_leaves_per_round_and_keeps_k(
    m, n, rounds, data, seed
):
    k = data.draw(st.integers(1, 1 + rounds * n))
    strategy = TreeGrpo(TreeGrpoConfig(m=m, n=n, l=rounds, k=k))
    growth = grow(strategy, three_turns, seed=seed)
    assert [len(wave) for wave in growth.waves] == [m] + [m * n] * rounds
    selected = strategy.select(growth)
    assert len({t.trajectory_id for t in selected}) == len(selected) == m * k
    assert Counter(t.tree_id for t in selected) == {f"g-{tree}": k for tree in range(m)}
    known = {o.trajectory_id: o for wave in growth.waves for o in wave}
    for fork in (start.fork for start in starts_of(growth)[m:]):
        assert fork is not None
        assert fork.tokens == 0
        parent = known[fork.parent_id]
        assert parent.tree_id == fork.tree_id
        assert fork.turns < parent.trajectory.num_turns


def test_tree_grpo_draws_each_inner_node_and_the_prompt_alike():
    """A chain of three turns has three: each gets a third, within four standard deviations."""
    drawn = []
    for seed in range(300):
        growth = grow(TreeGrpo(TreeGrpoConfig(m=1, n=1, k=1)), three_turns, seed=seed)
        drawn += [start.fork.turns for start in starts_of(growth)[1:]]
    for turns in range(3):
        assert abs(drawn.count(turns) - 100) < 4 * math.sqrt(300 * 2 / 9)


def test_tree_grpo_continues_the_prompt_where_nothing_can_be_continued():
    """Chains of one turn, and a tree whose only chain was lost."""

    def make(number, start):
        return None if number == 1 else of_turns(number, [-1.0], fork=start.fork)

    growth = grow(TreeGrpo(TreeGrpoConfig()), make)
    assert [s.fork for s in starts_of(growth)[2:]] == [
        Fork(tree_id=tree, parent_id=tree, turns=0) for tree in ("g-0", "g-0", "g-1", "g-1")
    ]
    assert [t.trajectory_id for t in TreeGrpo(TreeGrpoConfig()).select(growth)] == [
        "g-0",
        "g-2",
        "g-3",
        "g-4",
        "g-5",
    ]


def test_treerl_forks_the_least_likely_tokens_of_each_tree():
    def make(number, start):
        logprobs = (
            ([-0.1, -3.0, -0.2], [-0.1, -2.0]) if number == 0 else ([-0.5, -0.1], [-0.6, -0.1])
        )
        return of_turns(number, *logprobs, fork=start.fork)

    growth = grow(TreeRL(TreerlConfig(m=2, n=2, l=1, t=2)), make)
    forks = [(s.fork.parent_id, s.fork.turns, s.fork.tokens) for s in starts_of(growth)[2:]]
    assert (
        forks
        == [("g-0", 0, 1)] * 2 + [("g-0", 1, 1)] * 2 + [("g-1", 1, 0)] * 2 + [("g-1", 0, 0)] * 2
    )


def test_treerl_forks_where_branches_sampled_themselves_and_never_twice():
    def make(number, start):
        if number == 0:
            return of_turns(0, [-0.1, -3.0, -0.2, -0.3])
        return of_turns(
            number, [-0.1, -9.0, -4.0], fork=start.fork
        )  # it took over the first id; -9 is its own

    growth = grow(TreeRL(TreerlConfig(m=1, n=1, l=2, t=1)), make)
    assert [(s.fork.parent_id, s.fork.tokens) for s in starts_of(growth)[1:]] == [
        ("g-0", 1),
        ("g-1", 1),
    ]

    def inherits_the_worst(number, start):
        return of_turns(number, [-9.0, -1.0, -0.5], fork=start.fork)

    again = grow(TreeRL(TreerlConfig(m=1, n=1, l=3, t=1)), inherits_the_worst)
    forks = [s.fork for s in starts_of(again)[1:]]
    assert len(set(forks)) == 3
    assert forks[0].at_prompt


@given(
    m=st.integers(1, 3),
    n=st.integers(1, 3),
    rounds=st.integers(1, 3),
    t=st.integers(1, 3),
    lost=st.sets(st.integers()),
)
def test_treerl_has_its_counts_and_survives_losses(m, n, rounds, t, lost):
    def make(number, start):
        return None if number in lost else of_turns(number, [-1.0] * 12, fork=start.fork)

    growth = grow(TreeRL(TreerlConfig(m=m, n=n, l=rounds, t=t)), make)
    if not lost & set(range(growth.started)):
        assert growth.started == m * (1 + rounds * n * t)
    selected = TreeRL(TreerlConfig()).select(growth)
    assert len(selected) == growth.started - len(lost & set(range(growth.started)))


CERTAIN = ArpoConfig(initial_rollouts=2, branch_probability=1.0)
NEVER = ArpoConfig(initial_rollouts=2, branch_probability=0.0, entropy_weight=0.0)


def test_arpo_branches_after_tool_results_earlier_turns_first():
    growth = grow(Arpo(CERTAIN), three_turns, group_size=5)
    assert [
        [(s.fork.parent_id, s.fork.turns) for s in starts_of(growth)[2:]],
        len(growth.waves),
    ] == [
        [("g-0", 1), ("g-1", 1), ("g-0", 2)],
        2,
    ]


def test_arpo_lets_branches_branch_but_not_where_they_began():
    growth = grow(Arpo(CERTAIN), three_turns, group_size=8)
    assert [(s.fork.parent_id, s.fork.turns) for s in starts_of(growth)[6:]] == [
        ("g-2", 2),
        ("g-3", 2),
    ]


def test_arpo_makes_up_for_branches_that_did_not_come_about_with_new_chains():
    growth = grow(Arpo(NEVER), three_turns, group_size=5)
    assert starts_of(growth) == [Start()] * 2 + [Start(topped_up=True)] * 3
    without_tools = grow(
        Arpo(CERTAIN), lambda number, start: of_turns(number, [-1.0], fork=start.fork), group_size=4
    )
    assert starts_of(without_tools) == [Start()] * 2 + [Start(topped_up=True)] * 2


@pytest.mark.parametrize(
    ("rise", "share"), [(0.0, 0.5), (1.0, 0.7), (-1.0, 0.3), (9.0, 1.0), (-9.0, 0.0)]
)
def test_arpo_branches_as_often_as_its_rule_says(rise: float, share: float):
    """clip(u - .2 dH, 0, 1) <= .5 has probability clip(.5 + .2 dH, 0, 1)."""

    def make(number, start):
        return of_turns(number, [-10.0] * 3, [-10.0 - rise] * 3, fork=start.fork)

    config = ArpoConfig(initial_rollouts=1)
    count = sum(
        starts_of(grow(Arpo(config), make, group_size=2, seed=seed))[1].fork is not None
        for seed in range(400)
    )
    assert abs(count / 400 - share) <= 4 * math.sqrt(share * (1 - share) / 400)


def test_arpo_reads_the_first_tokens_only():
    """The rest of the turn is so uncertain that it would branch for sure."""
    config = ArpoConfig(
        initial_rollouts=1, entropy_weight=1.0, entropy_tokens=2, branch_probability=0.0
    )

    def make(number, start):
        return of_turns(number, [-1.0, -1.0], [-1.0, -1.0, -50.0, -50.0], fork=start.fork)

    assert starts_of(grow(Arpo(config), make, group_size=2))[1].topped_up


def test_a_beam_of_three_goes_on_in_three_ways():
    growth = grow(
        Arpo(ArpoConfig(initial_rollouts=1, beam_size=3, branch_probability=1.0)),
        three_turns,
        group_size=4,
    )
    assert [s.fork.turns for s in starts_of(growth)[1:]] == [1, 1, 2]


@given(st.sets(st.integers(0, 15)), st.integers(2, 12), st.integers(0, 50))
def test_arpo_starts_exactly_the_group_whatever_is_lost(lost, group_size, seed):
    def make(number, start):
        return None if number in lost else three_turns(number, start)

    growth = grow(Arpo(ArpoConfig(initial_rollouts=1)), make, group_size=group_size, seed=seed)
    assert growth.started == group_size


@pytest.mark.parametrize(
    "strategy",
    [TreeGrpo(TreeGrpoConfig()), TreeRL(TreerlConfig()), Arpo(ArpoConfig())],
    ids=lambda s: type(s).__name__,
)
def test_a_seed_fixes_what_is_started(strategy: Strategy):
    grown = [grow(strategy, three_turns, seed=seed) for seed in (1, 1, *range(2, 12))]
    assert starts_of(grown[0]) == starts_of(grown[1])
    assert isinstance(strategy, TreeRL) or any(starts_of(g) != starts_of(grown[0]) for g in grown)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("chain", Chains), ("tree_grpo", TreeGrpo), ("treerl", TreeRL), ("arpo", Arpo)],
)
def test_strategies_are_made_by_name(name, kind):
    assert type(make_strategy(StrategyConfig(name=name))) is kind
