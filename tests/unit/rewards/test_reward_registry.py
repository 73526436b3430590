"""Scoring: which function, which text, and what a bad score becomes."""

import asyncio
import math
import sys
import threading

import numpy as np
import pytest

from jax_agent_rl import rewards
from jax_agent_rl.errors import ConfigError, RewardError, RewardTimeoutError
from jax_agent_rl.rewards import registry, scorer
from jax_agent_rl.rewards.registry import MAX_FEEDBACK_CHARACTERS
from jax_agent_rl.tools.base import MARKER
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.plugins import load_user_module
from jax_agent_rl.utils.timeouts import DaemonThreads
from tests.messages import raises


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Registrations of one test do not reach another."""
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))


def trajectory(data_source="mine", *, extra_info=None, reason=FinishReason.ANSWER):
    output = TokenOutput(
        token_ids=(5, 2),
        log_probs=(-1.0, -1.0),
        policy_versions=(0, 0),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    call = ToolCallRecord(name="add", arguments={}, observation="tool says 9", reward=0.25)
    return Trajectory.from_turns(
        prompt_ids=[1],
        turns=[
            Turn(output=output, appended_ids=(6,), tool_calls=(call,), score=0.5),
            Turn(output=output),
        ],
        trajectory_id="t",
        group_id="g",
        agent_name="tool_agent",
        finish_reason=reason,
        row={
            "data_source": data_source,
            "reward_model": {"ground_truth": "9"},
            "extra_info": extra_info,
        },
        messages=(
            {"role": "user", "content": "example ?"},
            {"role": "assistant", "content": "example !"},
            {"role": "user", "content": "question ?"},
            {"role": "assistant", "content": "I ask the tool"},
            {"role": "tool", "content": "tool says 9"},
            {"role": "assistant", "content": "answer 9"},
        ),
        metrics={"tool_calls": 1},
    )


async def test_a_function_is_called_with_the_documented_arguments():
    seen = {}

    @rewards.register_reward("mine")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.update(locals())
        seen["thread"] = threading.get_ident()
        return 1

    scored = await rewards.score(trajectory(extra_info={"index": 3}))
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == (
        "mine",
        "answer 9",
        "9",
    )
    about = {"finish_reason": FinishReason.ANSWER, "num_turns": 2, "tool_rewards": [0.25]}
    assert seen["extra_info"] == {"index": 3, **about, "tool_scores": {}, "turn_scores": [0.5]}
    assert seen["thread"] != threading.get_ident(), "it may block"
    assert scored.reward == 1.0
    assert scored.metrics["tool_calls"] == 1
    assert scored.metrics["reward_seconds"] >= 0


async def test_an_async_function_and_a_dict_with_parts():
    @rewards.register_reward("mine")
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": np.float32(0.5), "format": 1.0, "note": "ignored"}

    scored = await rewards.score(trajectory())
    assert scored.reward == 0.5
    assert scored.reward_parts == {"format": 1.0}


@pytest.mark.parametrize("progress", [[np.float32(0.25), 1], np.array([0.25, 1.0])])
async def test_partial_scores_of_turns_are_parts_of_the_reward(progress):
    rewards.register_reward("mine")(lambda *_: {"score": 1.0, "progress": progress})
    scored = await rewards.score(trajectory())
    assert scored.reward_parts == {"progress/1": 0.25, "progress/2": 1.0}


async def test_a_text_of_feedback_stays_with_the_trajectory():
    rewards.register_reward("mine")(lambda *_: {"score": 0.0, "feedback": "The unit is missing."})
    scored = await rewards.score(trajectory())
    assert (scored.feedback, scored.reward_parts) == ("The unit is missing.", {})


async def test_a_long_feedback_loses_its_middle():
    text = "begins " + "x" * 1_000_000 + " ends"
    rewards.register_reward("mine")(lambda *_: {"score": 0.0, "feedback": text})
    scored = await rewards.score(trajectory())
    assert len(scored.feedback) == MAX_FEEDBACK_CHARACTERS
    assert scored.feedback.startswith("begins xxx")
    assert scored.feedback.endswith("xxx ends")
    assert MARKER in scored.feedback

    fits = "y" * MAX_FEEDBACK_CHARACTERS
    rewards.register_reward("mine", override=True)(lambda *_: {"score": 0.0, "feedback": fits})
    assert (await rewards.score(trajectory())).feedback == fits


@pytest.mark.parametrize("feedback", [["wrong unit"], 0.5, False, b"wrong unit", {"unit": "m"}])
async def test_a_feedback_that_is_not_a_text_is_refused(feedback):
    rewards.register_reward("mine")(lambda *_: {"score": 0.0, "feedback": feedback})
    with pytest.raises(RewardError, match="feedback") as refused:
        await rewards.score(trajectory())
    assert repr(feedback) in str(refused.value)
    assert "write it as one text" in str(refused.value)


async def test_none_is_no_feedback():
    rewards.register_reward("mine")(lambda *_: {"score": 0.5, "feedback": None})
    scored = await rewards.score(trajectory())
    assert (scored.reward, scored.feedback) == (0.5, "")


@pytest.mark.parametrize("progress", [[], [0.5], [0.5, 1, 1], [0.5, math.nan], [0.5, None]])
async def test_partial_scores_are_one_number_for_each_turn(progress):
    rewards.register_reward("mine")(lambda *_: {"score": 1.0, "progress": progress})
    if not progress:
        assert (await rewards.score(trajectory())).reward_parts == {}
        return
    with pytest.raises(RewardError, match="progress"):
        await rewards.score(trajectory())


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("last_turn", "answer 9"),
        ("assistant", "I ask the tool\n\nanswer 9"),
        ("conversation", "I ask the tool\n\ntool says 9\n\nanswer 9"),
    ],
)
def test_tool_output_is_part_of_the_solution_only_if_asked(which, text):
    assert rewards.solution_text(trajectory(), which) == text


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, None, "1.0", [1.0], {}, {"score": math.nan}, {"reward": 1.0}]
)
async def test_a_score_that_is_no_finite_number_is_an_error(bad):
    rewards.register_reward("mine")(lambda *_: bad)
    with pytest.raises(RewardError, match="'mine'"):
        await rewards.score(trajectory())


async def test_an_exception_in_the_function_is_a_reward_error():
    rewards.register_reward("mine")(lambda *_: 1 / 0)
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        await rewards.score(trajectory())


async def test_an_unknown_data_source_lists_the_known_ones():
    with raises(RewardError, value="'other'", fix=("'calculator'", "'gsm8k'")):
        await rewards.score(trajectory("other"))
    with pytest.raises(ConfigError, match="'None', 'other'"):
        rewards.require_rewards([{"data_source": "other"}, {}, {"data_source": "gsm8k"}])
    rewards.require_rewards([{"data_source": "calculator"}])


def test_a_data_source_is_registered_once():
    with pytest.raises(
        ConfigError, match=r"'gsm8k'.*rules.py:\d+ and .*test_reward_registry.py:\d+"
    ):
        rewards.register_reward("gsm8k")(lambda *_: 0.0)


async def test_a_users_file_registers_functions(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('mine')\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ground_truth in solution_str)\n"
    )
    rewards.load_rewards(str(path))
    rewards.load_rewards(str(path))
    assert (await rewards.score(trajectory())).reward == 1.0
    with raises(ConfigError, key="reward.path", value="'missing.py'"):
        rewards.load_rewards("missing.py")
    rewards.load_rewards(None)


async def test_a_file_written_for_verl_scores_every_row(tmp_path):
    """It registers nothing; its function has precedence over built-in ones, and reads tool results
    as in verl.
    """
    path = tmp_path / "verl_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': float('tool says' in solution_str),"
        " 'known': float(data_source == 'mine')}\n"
    )
    for _ in range(2):  # the second time it is imported already
        rewards.load_rewards(str(path))
        for data_source in ("mine", "calculator"):
            score = await rewards.score(trajectory(data_source))
            assert (score.reward, score.reward_parts["known"]) == (
                1.0,
                float(data_source == "mine"),
            )
        rewards.require_rewards([{"data_source": "anything"}])
    assert "" not in registry.known_data_sources()
    rewards.load_rewards(None)  # the next run of this process
    with raises(ConfigError, key="data_source", value="'mine'"):
        rewards.require_rewards([{"data_source": "mine"}])
    path.write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "register_reward('own')(lambda **_: 1.0)\n"
    )
    renamed = path.rename(tmp_path / "registers.py")
    renamed.write_text(renamed.read_text() + "def compute_score(**_):\n    return 0.0\n")
    rewards.load_rewards(str(renamed))
    with raises(ConfigError, key="data_source", value="'mine'"):
        rewards.require_rewards([{"data_source": "mine"}, {"data_source": "own"}])


@pytest.mark.parametrize(
    ("data_source", "guess"),
    [("gsm8k_", "gsm8k"), ("gsmk8", "gsm8k"), ("Calculator", "calculator"), ("chats", None)],
)
async def test_a_data_source_that_is_not_known_gets_a_guess(data_source, guess):
    with pytest.raises(ConfigError) as refused:
        rewards.require_rewards([{"data_source": data_source}])
    with pytest.raises(RewardError) as dropped:
        await rewards.score(trajectory(data_source))
    for error in (refused, dropped):
        assert f"data_source {data_source!r}" in str(error.value)
        assert ("did you mean" in str(error.value)) == (guess is not None)
        assert guess is None or f"did you mean {guess!r}?" in str(error.value)


def test_what_is_told_of_data_sources_is_short_however_long_they_are():
    with pytest.raises(ConfigError, match="no reward function") as refused:
        rewards.require_rewards([{"data_source": "x" * 100_000}])
    assert len(str(refused.value)) < 4000


async def test_a_later_run_of_the_process_gets_the_functions_of_its_own_file(tmp_path):
    """A file is imported once; another file replaced its function since, or ``agent.module`` had
    imported it before.
    """
    first = tmp_path / "first.py"
    second = tmp_path / "second.py"
    for path, value in ((first, 1.0), (second, 2.0)):
        path.write_text(
            "from jax_agent_rl.rewards import register_reward\n"
            "@register_reward('mine', override=True)\n"
            f"def compute_score(solution_str):\n    return {value}\n"
        )
    load_user_module(str(second), key="agent.module")
    for path, expected in ((second, 2.0), (first, 1.0), (second, 2.0), (first, 1.0)):
        rewards.load_rewards(str(path))
        assert (await rewards.score(trajectory())).reward == expected
        reward = registry.find_reward("mine")
        assert reward is not None and reward.path == str(path)
        assert registry.find_reward("calculator") is not reward


async def test_the_built_in_calculator_rule_scores_a_trajectory():
    assert (await rewards.score(trajectory("calculator"))).reward == 1.0
    cut = trajectory("calculator", reason=FinishReason.RESPONSE_LENGTH)
    assert (await rewards.score(cut)).reward == 0.0


@pytest.fixture
def released():
    """An event that ends the threads which a test left hanging."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_function_that_hangs_is_given_up_and_others_go_on(released, monkeypatch):
    threads = DaemonThreads(max_abandoned=2, kind="reward", error=RewardError)
    monkeypatch.setattr(scorer, "THREADS", threads)

    @rewards.register_reward("mine")
    def hang(*_):
        released.wait()

    rewards.register_reward("quick")(lambda *_: 1.0)
    for abandoned in (1, 2):
        with raises(RewardTimeoutError, key=("'mine'", "reward.timeout"), value=0.05) as caught:
            await rewards.score(trajectory(), timeout=0.05)
        assert caught.value.drop_reason is DropReason.REWARD_TIMEOUT
        while threads.abandoned < abandoned:  # the cancelled task has yet to run
            await asyncio.sleep(0)
        if abandoned == 1:
            assert (await rewards.score(trajectory("quick"))).reward == 1.0
    with raises(RewardError, value="2 earlier reward calls"):
        await rewards.score(trajectory("quick"))


async def test_an_async_function_that_ignores_its_cancellation_is_left_behind():
    go_on = asyncio.Event()

    @rewards.register_reward("mine")
    async def stubborn(*_):
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                pass

    with pytest.raises(RewardTimeoutError):
        await rewards.score(trajectory(), timeout=0.05)
    go_on.set()


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_function_that_exits_loses_its_trajectory_only(is_async):
    def leave(*_):
        sys.exit(3)

    async def leave_later(*_):
        sys.exit(3)

    rewards.register_reward("mine")(leave_later if is_async else leave)
    with pytest.raises(RewardError, match="3"):
        await rewards.score(trajectory())


async def test_a_function_that_cancels_itself_does_not_cancel_the_trajectory():
    @rewards.register_reward("mine")
    async def cancels(*_):
        raise asyncio.CancelledError

    with raises(RewardError, key="'mine'", value="cancelled itself"):
        await rewards.score(trajectory())
