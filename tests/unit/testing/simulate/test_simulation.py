"""Whole runs in virtual time. Without spread everything can be worked out by hand:

rollout   256 / 512 steps of prefill and 400 of decoding, 10 ms each      4.005 s
learner   16 trajectories of 656 ids at 2624 a second                     4 s
publish   0.5 s to export, 0.5 s to load                                  1 s
"""

import io
import json

import pytest
from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.simulate.run import BUSY_RULES, POLICIES, run_command, simulate
from jax_agent_rl.testing.simulate.workload import load_assumptions
from tests.messages import raises

RECIPE = {
    "run_dir": "none",
    "model": {"path": "none"},
    "data": {"train": "none"},
    "rollout": {"prompts_per_step": 4, "group_size": 4},
}
SAME = [
    "agent.turns=1",
    "agent.turn_tokens=400",
    "agent.turn_sigma=0",
    "engines.count=2",
    "engines.slots=16",
]
BALANCED = [*SAME, "learner.tokens_per_second=2624", "steps=4"]
ROLLOUT = 4.005
LEARNER = 4.0
PUBLISH = 1.0


def outcome(policy, assumptions):
    return simulate(
        config.build(RECIPE), load_assumptions(None, assumptions), policy, POLICIES[policy]
    )


def test_a_synchronous_step_takes_the_sum_of_its_parts():
    result = outcome("sync", BALANCED)
    assert result.step_seconds == pytest.approx(ROLLOUT + LEARNER + PUBLISH, rel=1e-6)
    assert result.engines_busy == pytest.approx(ROLLOUT / result.step_seconds, rel=1e-3)
    assert result.learner_busy == pytest.approx(LEARNER / result.step_seconds, rel=1e-6)
    assert result.slots_used == pytest.approx(16 * 400 / (32 * 100 * result.step_seconds), rel=1e-3)
    assert result.staleness_max == 0 and result.dropped == 0


def environment_steps(warm_instances: int):
    """The synchronous run above, each of whose trajectories needs an environment of 30 s."""
    assumptions = [*BALANCED, "steps=12", "agent.environment_start_seconds=30"]
    return simulate(
        config.build(RECIPE),
        load_assumptions(None, assumptions),
        "sync",
        POLICIES["sync"],
        warm_instances=warm_instances,
    )


def test_a_step_waits_for_environments_that_are_started_when_they_are_needed():
    result = environment_steps(0)
    assert result.step_seconds == pytest.approx(30 + ROLLOUT + LEARNER + PUBLISH, rel=1e-6)
    assert result.environment_start_seconds == pytest.approx(30.0)
    assert result.environment_hit_rate == 0.0


def test_a_step_waits_less_for_environments_that_are_started_ahead():
    # 16 are taken at the begin of a step, and so many others begin to start.
    result = environment_steps(16)
    assert result.step_seconds == pytest.approx(30, rel=1e-2)


def test_with_enough_warm_environments_only_the_first_steps_wait():
    result = environment_steps(64)
    assert result.environment_hit_rate == pytest.approx(9 / 12)
    waits = result.step_seconds - (ROLLOUT + LEARNER + PUBLISH)
    assert waits * 12 < 2 * 30


def test_one_step_off_takes_the_slower_part_and_the_publication():
    result = outcome("one_step_off", BALANCED)
    assert result.step_seconds == pytest.approx(max(ROLLOUT, LEARNER) + PUBLISH, rel=1e-6)
    assert (result.staleness_mean, result.staleness_max) == (1.0, 1)


def test_the_asynchronous_learner_never_waits_for_fast_engines():
    result = outcome("fully_async 2", BALANCED)
    assert result.step_seconds == pytest.approx(LEARNER + PUBLISH, rel=1e-2)
    assert result.staleness_max <= 2


def test_the_ideal_is_the_slower_sides_own_rate():
    # The learner's: 2624 ids a second are 4 trajectories of 656; the engines': 32 slots, 400 ids at
    # 100 a second: 8.
    result = outcome("sync", BALANCED)
    assert result.share_of_ideal == pytest.approx(16 / result.step_seconds / 4.0, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_long_tails_keep_every_promise(policy):
    result = outcome(
        policy, ["steps=6", "engines.count=2", "learner.tokens_per_second=3000", "agent.turns=2"]
    )
    bound = {"sync": 0, "one_step_off": 1}.get(policy) or int(
        next((c for c in policy if c.isdigit()), 0)
    )
    assert result.staleness_max <= bound
    assert (
        0 < result.share_of_ideal <= 1.05
    )  # a few steps, not infinitely many: their lengths differ from the mean
    assert result.dropped == 0 or policy.endswith("drop")


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    runs = [outcome("fully_async 1", ["steps=3", f"seed={seed}"]) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_the_command_prints_every_policy_and_ends_with_json(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run_dir: x\nmodel: {path: none}\ndata: {train: none}\nrollout: {prompts_per_step: 2}\n"
    )
    assume = tmp_path / "assume.yaml"
    assume.write_text("agent: {turns: 1}\n")
    screen = Console(file=io.StringIO(), width=80)
    overrides = ["rollout.group_size=2", "assume.steps=2", "assume.engines.count=1"]
    run_command(recipe, overrides, assume, as_json=True, console=screen)
    printed = screen.file.getvalue()
    assert all(policy in printed for policy in POLICIES)
    assert "2 x 2 trajectories" in printed
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["assumptions"]["agent"]["turns"] == 1
    assert len(report["outcomes"]) == len(POLICIES)


def test_recipes_of_algorithms_that_take_groups_of_one_can_be_simulated():
    alone = {
        "rollout": {"prompts_per_step": 4, "group_size": 1},
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
    }
    result = simulate(
        config.build(RECIPE | alone), load_assumptions(None, ["steps=1"]), "sync", POLICIES["sync"]
    )
    assert result.samples_per_second == pytest.approx(4 / result.step_seconds)


def test_a_wrong_assumption_is_named(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run_dir: x\nmodel: {path: none}\ndata: {train: none}\n")
    with raises(ConfigError, key="engines.slot", fix="did you mean"):
        run_command(
            recipe,
            ["assume.engines.slot=3"],
            None,
            as_json=False,
            console=Console(file=io.StringIO()),
        )


def test_the_command_compares_cold_and_warm_environments(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run_dir: x\nmodel: {path: none}\ndata: {train: none}\nrollout: {prompts_per_step: 2}\n"
    )
    screen = Console(file=io.StringIO(), width=100)
    overrides = ["environments.warm_instances=32", "assume.agent.environment_start_seconds=9"]
    outcomes = run_command(
        recipe, [*overrides, "assume.steps=2"], None, as_json=False, console=screen
    )
    assert [outcome.policy for outcome in outcomes] == ["cold", "warm 32"]
    cold, warm = outcomes
    assert cold.environment_start_seconds == pytest.approx(9.0)
    assert warm.step_seconds < cold.step_seconds
    assert "hits" in screen.file.getvalue() and "ideal" not in screen.file.getvalue()


def rates_by_rule(*assumptions: str, engines: int) -> dict[str, float]:
    """Trajectories per second by each rule for sessions whose server is full; 14 trajectories for 8
    slots.
    """
    assumed = load_assumptions(
        None,
        [
            f"engines.count={engines}",
            "engines.slots=8",
            "engines.step_ms=20",
            "learner.tokens_per_second=1e9",
        ]
        + [
            "agent.turns=6",
            "agent.tool_seconds=2",
            "agent.tool_seconds_max=20",
            "agent.turn_tokens_max=600",
        ]
        + ["kv_cache.tokens=2000000", "steps=4", *assumptions],
    )
    rollout = {"prompts_per_step": engines * 3 // 2, "group_size": 8, "max_in_flight": engines * 14}
    recipe = config.build(RECIPE | {"rollout": rollout | {"max_in_flight_per_server": 8}})
    size = assumed.kv_cache.size(policy="expected_return", offloading_tokens=0)
    policy = POLICIES["fully_async 1"]
    return {
        name: simulate(recipe, assumed, name, policy, size, rule).samples_per_second
        for name, rule in BUSY_RULES.items()
    }


def test_a_session_whose_server_is_full_waits_where_its_context_is_dear():
    dear = (
        "agent.prompt_tokens=1024",
        "agent.observation_tokens=200",
        "agent.turn_tokens=60",
        "kv_cache.prefill_us=400",
    )
    rates = rates_by_rule(*dear, engines=16)
    assert rates["by cost"] > 1.05 * rates["migrate"]
    assert rates["by cost"] > 0.98 * rates["wait"]


def test_a_session_whose_server_is_full_moves_where_its_context_is_cheap():
    cheap = ("agent.prompt_tokens=64", "agent.turn_tokens=200", "kv_cache.prefill_us=10")
    rates = rates_by_rule(*cheap, engines=8)
    assert rates["by cost"] == rates["migrate"] > rates["wait"]
