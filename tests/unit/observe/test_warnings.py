"""Warnings begin and end when they should, are said once, and advise what would help."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config import Config, build
from jax_agent_rl.observe.warnings import overlap_gain, rules
from jax_agent_rl.observe.watch import Rule, SinceLast, SinceStart, Watch
from jax_agent_rl.trainer.observing import missing_agent_warning

HEALTHY = {
    "kind": "step",
    "reward_mean": 0.5,
    "zero_variance_share": 0.1,
    "repeated_failure_share": 0.1,
    "truncated_share": 0.0,
    "tool_error_share": 0.05,
    "tool_calls_mean": 1.2,
    "clip_fraction": 0.01,
    "logprob_gap_mean": 0.001,
    "entropy": 0.6,
    "trained_tokens": 900.0,
    "learner_idle_share": 0.9,
    "engine_busy_share": 0.98,
    "recompilations_after_warmup": 0,
}
TOOLS = {"tools": {"function_tool_path": "jax_agent_rl.tools.calculator"}}


def conf(*overrides: str, **sections: dict) -> Config:
    return build(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}} | sections, overrides
    )


def watched(config: Config, *records: dict) -> tuple[list[str], Watch]:
    """What is said over these steps, each a change to a healthy one."""
    said: list[str] = []
    watch = Watch(rules(config), said.append)
    for step, record in enumerate(records, 1):
        watch.update({**HEALTHY, "step": step, **record})
    return said, watch


def one_rule(**changes) -> tuple[list[str], Watch]:
    said: list[str] = []
    rule = Rule(
        name="bad",
        value=lambda record: record.get("value"),
        begins=0.5,
        ends=0.3,
        message="{value:.1f}",
        advice="do",
        **changes,
    )
    return said, Watch([rule], said.append)


def see(watch: Watch, *values: float | None, silent: bool = False) -> None:
    for step, value in enumerate(values, 1):
        watch.update({"kind": "step", "step": step, "value": value}, silent=silent)


# --- when -----------------------------------------------------------------------------------------


def test_a_warning_is_said_once_when_it_has_held_for_some_steps():
    said, watch = one_rule()
    see(watch, 0.9, 0.1, 0.9, 0.9, 0.6, 0.9, 0.9)
    assert said == ["  warning (bad): 0.6. What to do: do"]
    (warned,) = watch.warnings
    assert (warned.first_step, warned.last_step, warned.steps, warned.active) == (5, 7, 3, True)


def test_between_its_two_thresholds_a_warning_neither_begins_nor_ends():
    said, watch = one_rule(steps=1)
    see(watch, 0.4, 0.5, 0.4, 0.3, 0.4)
    assert len(said) == 1 and watch.active == ["bad"]
    see(watch, 0.29)
    assert watch.active == []
    assert [warned.name for warned in watch.warnings] == ["bad"]


def test_a_warning_that_comes_back_is_said_again_and_stays_one_entry():
    said, watch = one_rule(steps=1)
    see(watch, 0.9, 0.1, 0.8)
    assert len(said) == 2
    (warned,) = watch.warnings
    assert (warned.first_step, warned.last_step, warned.steps, warned.active) == (1, 3, 2, True)


def test_steps_that_say_nothing_about_a_rule_and_evaluations_change_nothing():
    said, watch = one_rule(steps=2)
    see(watch, 0.9, None)
    watch.update({"kind": "evaluation", "step": 2, "value": 0.0})
    see(watch, 0.9)
    assert len(said) == 1


def test_what_was_said_before_a_restart_is_counted_but_not_said_again():
    said, watch = one_rule(steps=1)
    see(watch, 0.9, silent=True)
    see(watch, 0.9)
    assert said == [] and watch.warnings[0].steps == 2


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 4))
def test_beginnings_and_ends_alternate_and_each_takes_its_steps(values: list[float], steps: int):
    said, watch = one_rule(steps=steps)
    states = [False]
    for at, value in enumerate(values, 1):
        see(watch, value)
        states.append(bool(watch.active))
        if states[-1] != states[-2]:
            recent = values[at - steps : at]
            assert len(recent) == steps
            assert all(v >= 0.5 if states[-1] else v < 0.3 for v in recent)
    assert len(said) == sum(now and not previous for previous, now in pairwise(states))


def test_a_metric_is_compared_with_the_first_steps_that_learnt_something():
    value = SinceStart("x", lambda now, start: now / start, steps=2)
    steps = [{"x": 9.0}, {"x": 1.0, "trained_tokens": 5}, {"x": 3.0, "trained_tokens": 5}]
    assert [value(step) for step in steps] == [None, None, None]
    assert value({"x": 8.0, "trained_tokens": 5}) == 4.0
    assert value({"x": 0.0}) is None


# --- what -----------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_warnings():
    said, watch = watched(conf(**TOOLS), *[{}] * 10)
    assert said == [] and watch.warnings == []


@pytest.mark.parametrize(
    ("name", "change", "advice"),
    [
        ("zero_variance", {"zero_variance_share": 0.7}, "algorithm.max_resample_rounds=3"),
        ("repeated_failures", {"repeated_failure_share": 0.6}, "rollout.temperature=1"),
        ("truncated", {"truncated_share": 0.3}, "agent.max_response_length=512"),
        ("program_timeouts", {"program_timeout_share": 0.5}, "agent.run_timeout=600"),
        ("no_reward", {"reward_max": 0.0}, "jax-agent-rl doctor"),
        ("tool_errors", {"tool_error_share": 0.4}, "agent.tool_timeout"),
        ("clipped", {"clip_fraction": 0.3}, "learner.learning_rate"),
        ("nonfinite_updates", {"nonfinite_updates": 1.0}, "learner.learning_rate"),
        (
            "nonfinite_updates",
            {"nonfinite_updates": 0.0, "critic_nonfinite_updates": 2.0},
            "learner.learning_rate",
        ),
        ("logprob_gap", {"logprob_gap_mean": 0.06}, "rollout.deterministic"),
        ("tools_unused", {"tool_calls_mean": 0.0}, "agent.default_agent"),
        (
            "learner_idle",
            {"learner_idle_share": 0.6, "engine_busy_share": 0.2},
            "trainer.mode=one_step_off",
        ),
    ],
)
def test_what_goes_wrong_is_said_with_what_to_do(name: str, change: dict, advice: str):
    said, watch = watched(conf(**TOOLS), *[change] * 3)
    assert watch.active == [name]
    (line,) = said
    assert line.startswith(f"  warning ({name}): ")
    assert advice in line.partition("What to do: ")[2]


@pytest.mark.parametrize(
    ("sections", "is_named"),
    [
        ({}, True),
        ({"rollout": {"backend": "vllm"}}, True),
        ({"rollout": {"deterministic": True}}, False),
        ({"learner": {"mesh": {"expert": 2}}}, False),
        ({"learner": {"multihost": {"coordinator": "auto"}}}, False),
        ({"rollout": {"top_p": 0.9}}, False),
    ],
)
def test_one_program_is_named_where_it_would_not_be_refused(sections: dict, is_named: bool):
    said, _ = watched(conf(**{**TOOLS, **sections}), *[{"logprob_gap_mean": 0.06}] * 3)
    (line,) = said
    assert ("rollout.deterministic=true" in line) == is_named
    assert "precision" in line or "rollout.jetstream.dtype" in line


@pytest.mark.parametrize(
    ("sections", "is_named"),
    [
        ({}, True),
        ({"agent": {"constrain_tool_calls": True, "default_agent": "tool_agent"}}, False),
        ({"rollout": {"deterministic": True}}, False),
        ({"rollout": {"jetstream": {"engine_factory": "maxtext:make"}}}, False),
        ({"rollout": {"backend": "vllm"}}, False),
        ({"rollout": {"backend": "remote", "urls": ["http://10.0.0.5:8100"]}}, True),
    ],
)
def test_the_key_against_wrong_calls_is_named_where_it_helps(sections: dict, is_named: bool):
    said, _ = watched(conf(**{**TOOLS, **sections}), *[{"tool_error_share": 0.6}] * 3)
    assert any("agent.constrain_tool_calls=true" in line for line in said) == is_named


def test_the_limit_that_cuts_most_off_is_named():
    ends = {"answer": 2, "max_user_turns": 1, "response_length": 3}
    said, _ = watched(conf(), *[{"truncated_share": 0.6, "finish_reasons": ends}] * 3)
    assert "60% of the trajectories" in said[0]
    assert "(response_length)" in said[0]


def test_rewards_that_nothing_learns_from_are_not_watched():
    config = conf(
        "algorithm.adv_estimator=none", "algorithm.kl.coef=0.1", "algorithm.kl.where=loss"
    )
    assert watched(config, *[{"reward_max": 0.0, "reward_mean": 0.0}] * 3)[0] == []


def test_steps_without_reward_are_another_matter_once_something_was_earned():
    said, watch = watched(
        conf(), {"reward_max": 0.0}, {"reward_max": 0.5}, *[{"reward_max": 0.0}] * 3
    )
    assert len(said) == 1
    assert watch.active == []
    assert watch.warnings[0].steps == 1


def test_a_reward_that_only_punishes_is_a_reward():
    assert watched(conf(), *[{"reward_max": 0.0, "reward_min": -3.0}] * 3)[0] == []


def test_a_policy_that_an_update_broke_is_said_before_its_symptoms():
    """A run with a hundred times the learning rate: good for a step, then repeated tokens to the
    limit.
    """
    broken = {
        "reward_mean": 0.0,
        "truncated_share": 1.0,
        "zero_variance_share": 1.0,
        "tool_calls_mean": 0.0,
    }
    said, _ = watched(
        conf("learner.learning_rate=0.003", **TOOLS), {"reward_mean": 0.75}, *[broken] * 3
    )
    assert "(reward_collapse)" in said[0]
    assert "learner.learning_rate=0.003" in said[0]
    assert len(said) == 4


def test_rewards_that_are_not_earned_by_right_answers_are_told():
    """A run whose calls were paid: it called to the limit and answered nothing."""
    steps = [(0.46, 0.38), (0.45, 0.25), (0.45, 0.02), (0.37, 0.0)]
    said, watch = watched(
        conf(), *[{"reward_mean": reward, "reward/accuracy": right} for reward, right in steps]
    )
    assert watch.active == ["reward_hacking"]
    assert "algorithm.turn_reward=none" in said[0]
    metrics = [
        {"reward_mean": 0.5, "reward/accuracy": 0.5},
        *[{"reward_mean": 0.0, "reward/accuracy": 0.0}] * 3,
    ]
    assert watched(conf(), *metrics)[1].active == ["reward_collapse"]


@pytest.mark.parametrize(
    "rewards", [[0.0] * 6, [0.05, 0.0, 0.0, 0.0], [0.8, 0.1, 0.7, 0.1], [-1.0, -2.0, -3.0]]
)
def test_low_and_changing_rewards_are_no_collapse(rewards: list[float]):
    assert watched(conf(), *[{"reward_mean": reward} for reward in rewards])[0] == []


def test_recompilations_are_told_in_their_steps():
    totals = (0, 1, 1, 4, 6, 6)
    said, watch = watched(conf(), *[{"recompilations_after_warmup": total} for total in totals])
    first, later = said
    assert "1 programs" in first
    assert "rollout.jetstream.prefill_buckets" in first
    assert "3 programs" in later
    (warned,) = watch.warnings
    assert (warned.first_step, warned.last_step, warned.steps, warned.active) == (2, 5, 3, False)


def test_a_total_may_begin_anew_with_a_resumed_run():
    grown = SinceLast("x")
    assert [grown(record) for record in ({"x": 2}, {"x": 5}, {}, {"x": 1}, {"x": 1})] == [
        2,
        3,
        None,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("name", "change"),
    [("logprob_gap_growing", {"logprob_gap_mean": 0.03}), ("entropy_collapse", {"entropy": 0.05})],
)
def test_what_was_so_from_the_start_is_no_growth_and_no_collapse(name: str, change: dict):
    assert watched(conf(), *[{}] * 3, *[change] * 3)[1].active == [name]
    assert name not in watched(conf(), *[change] * 6)[1].active


def test_a_gap_within_rounding_does_not_count_as_growing():
    tiny = {"logprob_gap_mean": 1e-6}
    small = {"logprob_gap_mean": 1e-3}
    assert watched(conf(), *[tiny] * 3, *[small] * 5)[0] == []


def test_ratios_of_sequences_are_clipped_more_often_when_all_is_well():
    gspo = conf(
        "algorithm.policy_loss.loss_mode=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean"
    )
    assert watched(gspo, *[{"clip_fraction": 0.3}] * 5)[1].active == []
    assert watched(gspo, *[{"clip_fraction": 0.5}] * 5)[1].active == ["clipped"]


def test_stale_tokens_and_groups_without_a_baseline_are_not_taken_for_faults():
    change = {"logprob_gap_mean": 0.2, "zero_variance_share": 1.0}
    config = conf("trainer.mode=fully_async", "algorithm.adv_estimator=reinforce_plus_plus")
    assert watched(config, *[change] * 6)[0] == []


def test_errors_of_tools_are_no_matter_where_none_is_called():
    assert watched(conf(), *[{"tool_error_share": 1.0, "tool_calls_mean": 0.0}] * 5)[0] == []


@pytest.mark.parametrize(
    ("mode", "advice"),
    [("one_step_off", "trainer.mode=fully_async"), ("fully_async", "trainer.max_staleness=1")],
)
def test_an_idle_learner_is_advised_by_the_mode_it_has(mode: str, advice: str):
    config = conf(f"trainer.mode={mode}", "rollout.placement=separate")
    (line,) = watched(config, *[{"learner_idle_share": 0.7}] * 3)[0]
    assert advice in line and "waits 70% of the time" in line


# --- whether another mode would help --------------------------------------------------------------


def test_a_mode_is_worth_trying_where_the_engine_leaves_time():
    def line(idle: float, busy: float) -> dict:
        return {"learner_idle_share": idle, "engine_busy_share": busy}

    assert overlap_gain(line(0.9, 1.0), own_devices=False) == 0  # one device that is always busy
    assert overlap_gain(line(0.5, 0.2), own_devices=False) == pytest.approx(
        0.4
    )  # it waits for tools
    assert overlap_gain(line(0.9, 1.0), own_devices=True) == pytest.approx(
        0.1
    )  # learning is the shorter part
    assert overlap_gain(line(0.3, 1.0), own_devices=True) == pytest.approx(0.3)  # rollout is


@pytest.mark.parametrize(
    ("overrides", "has_own_devices"),
    [
        ([], False),
        (["rollout.jetstream.device_offset=1"], True),
        (["rollout.placement=separate"], True),
        (["rollout.backend=remote", "rollout.urls=[http://127.0.0.1:1]"], True),
        (["rollout.backend=vllm"], False),
    ],
)
def test_an_engine_has_devices_of_its_own_beside_the_learner_or_elsewhere(
    overrides: list[str], has_own_devices: bool
):
    assert conf(*overrides).engines_have_own_devices is has_own_devices


# --- before the first step ------------------------------------------------------------------------


def test_rows_without_an_agent_are_counted_where_tools_would_go_unused():
    rows = [{"agent_name": "tool_agent"}, {}, {"agent_name": None}]
    warned = missing_agent_warning(conf(**TOOLS), rows)
    assert warned and "2 of 3 rows" in warned.message and warned.active
    said, watch = watched(conf(**TOOLS))
    watch.add(warned)
    assert watch.active == ["agent_name_missing"] and said == []
    assert missing_agent_warning(conf(), rows) is None  # no tools


@pytest.mark.parametrize(
    ("overrides", "row", "expected"),
    [
        ([], {}, False),
        ([], {"agent_name": "environment_agent"}, False),
        ([], {"agent_name": "search_agent"}, True),
        (["tools.tool_config_path=tools.yaml"], {}, True),
        (["tool_config.enabled=true"], {}, True),
        (["tool_config.enabled=true"], {"agent_name": "single_turn_agent"}, False),
        (["agent.enable_search=true"], {}, True),
        (["agent.tool_server_url=http://localhost:1"], {}, True),
        (["agent.tool_server_url=http://localhost:1", "agent.enable_agent=false"], {}, False),
        (["agent.enable_agent=false"], {"agent_name": "server_tool_agent"}, False),
    ],
)
def test_calls_are_missed_wherever_rows_run_on_tools(
    overrides: list[str], row: dict, expected: bool
):
    names = [rule.name for rule in rules(conf(*overrides), [row])]
    assert ("tools_unused" in names) is expected


@pytest.mark.parametrize(("share", "warned"), [(0.0, 1), (0.45, 1), (0.9, 0)])
def test_a_mixture_that_learns_without_the_engines_experts_is_warned_of(share: float, warned: int):
    said: list[str] = []
    watch = Watch(
        [rule for rule in rules(conf()) if rule.name == "router_replay_missing"], said.append
    )
    for step in range(1, 5):
        watch.update({"kind": "step", "step": step, "router_replay_share": share})
    assert sum("router_replay_missing" in line for line in said) == warned
