"""A user's synchronous functions run in processes, so that one which never returns costs its own
trajectory alone.
"""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl import rewards
from jax_agent_rl.errors import RewardError, RewardTimeoutError
from jax_agent_rl.rewards import registry
from jax_agent_rl.rewards.workers import FunctionWorkers
from tests.messages import raises
from tests.trajectories import trajectory

FILE = """\
import asyncio, os, re, subprocess
from pathlib import Path
from jax_agent_rl.rewards import register_reward

@register_reward("numbers")
def numbers(solution_str, ground_truth, extra_info, trajectory, weights):
    print("not an answer")
    subprocess.run(["echo", "nor is this"], check=True)
    return {"score": float(ground_truth in solution_str), "pid": os.getpid(),
            "weight": weights.sum(), "turns": extra_info["num_turns"],
            "ids": len(trajectory.response_ids), "note": "left out"}

@register_reward("stuck")
def stuck(solution_str):
    Path(__file__).with_suffix(".begun").touch()
    return float(re.match(r"(a+)+$", "a" * 64 + solution_str) is not None)

@register_reward("raises")
def raises(solution_str):
    return 1 / 0

@register_reward("no_number")
def no_number(solution_str):
    return "much"

@register_reward("endless")
def endless(solution_str):
    return {"score": 1.0, **{f"a part of the score, number {n}": 0.5 for n in range(450_000)}}

@register_reward("leaves")
def leaves(solution_str):
    raise SystemExit(3)

@register_reward("dies")
def dies(solution_str):
    os._exit(7)

@register_reward("later")
def later(solution_str):
    async def pid():
        await asyncio.sleep(0)
        return {"score": 1.0, "pid": os.getpid()}
    return pid()

@register_reward("asynchronous")
async def asynchronous(solution_str):
    return {"score": 1.0, "pid": os.getpid()}

@register_reward("judged")
def judged(solution_str, judge):
    return {"score": 1.0, "pid": os.getpid()}


@register_reward("refuses")
def refuses(solution_str):
    from jax_agent_rl.errors import RewardError
    raise RewardError("this row has no truth")
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    rewards.load_rewards(str(path))
    return str(path)


def row(data_source, **fields):
    about = {"data_source": data_source, "reward_model": {"ground_truth": "9"}, **fields}
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "answer 9"})
    return replace(trajectory([1], [2]), row=about, messages=messages)


async def test_scores_come_from_another_process_and_failures_cost_one_trajectory(user_file):
    workers = FunctionWorkers(user_file, size=1)

    async def score(data_source, timeout=60.0, **fields):
        services = {"judge": object()}
        return await rewards.score(
            row(data_source, **fields), workers=workers, timeout=timeout, services=services
        )

    try:
        scored = await score("numbers", weights=np.array([1.0, 2.0]))
        assert scored.reward == 1.0
        assert scored.reward_parts.keys() == {
            "pid",
            "weight",
            "turns",
            "ids",
        }
        assert (
            scored.reward_parts["weight"],
            scored.reward_parts["turns"],
            scored.reward_parts["ids"],
        ) == (3, 1, 1)
        process = scored.reward_parts["pid"]
        assert process != os.getpid()
        for data_source, message in (
            (
                "raises",
                r"'raises' raised ZeroDivisionError: division by zero \(.*my_rewards.py:\d+\)",
            ),
            (
                "no_number",
                (
                    r"'no_number' \(.*my_rewards.py:22\) .*its score must be a finite number, got"
                    r" 'much'"
                ),
            ),
            ("refuses", r"this row has no truth \(.*my_rewards.py:\d+\)"),
            ("leaves", "'leaves' raised SystemExit: 3"),
        ):
            with pytest.raises(RewardError, match=message):
                await score(data_source)
        with raises(RewardError, key="worker", fix="plain data"):
            await score("numbers", weights=threading.Lock())
        assert (await score("later")).reward_parts["pid"] == process, "the worker lives"
        assert (await score("asynchronous")).reward_parts["pid"] == os.getpid()
        assert (await score("judged")).reward_parts["pid"] == os.getpid()
        with raises(RewardError, value="16777216 bytes"):
            await score("endless")
        with pytest.raises(RewardError, match="the worker ended"):
            await score("dies")
        assert (await score("later")).reward_parts["pid"] not in (process, os.getpid())
    finally:
        workers.close()


async def test_a_pattern_that_backtracks_for_hours_is_killed_and_freezes_nothing(user_file):
    """``re`` does not let go of the interpreter: in a thread of this process, no line below would
    be reached.
    """
    workers = FunctionWorkers(user_file, size=2)
    try:
        stuck = asyncio.create_task(rewards.score(row("stuck"), workers=workers, timeout=0.5))
        assert (await rewards.score(row("later"), workers=workers)).reward == 1.0
        with raises(RewardTimeoutError, key=("'stuck'", "reward.timeout"), value=0.5):
            await stuck
    finally:
        workers.close()


async def test_waiting_for_a_worker_is_not_part_of_a_functions_time(user_file):
    workers = FunctionWorkers(user_file, size=1)
    try:
        stuck = asyncio.create_task(rewards.score(row("stuck"), workers=workers, timeout=3.0))
        await asyncio.sleep(0)
        assert (await rewards.score(row("later"), workers=workers, timeout=2.0)).reward == 1.0
        with pytest.raises(RewardTimeoutError):
            await stuck
    finally:
        workers.close()


async def test_closing_ends_a_function_that_is_stuck(user_file):
    workers = FunctionWorkers(user_file, size=1)
    stuck = asyncio.create_task(rewards.score(row("stuck"), workers=workers, timeout=600.0))
    while not Path(user_file).with_suffix(".begun").exists():
        await asyncio.sleep(0.001)
    workers.close()
    with pytest.raises(RewardError, match="the worker ended"):
        await stuck


async def test_a_file_that_a_worker_cannot_import_is_named(tmp_path):
    marker = tmp_path / "imported"
    path = tmp_path / "once.py"
    path.write_text(
        "from pathlib import Path\n"
        "from jax_agent_rl.rewards import register_reward\n"
        f"Path({str(marker)!r}).touch(exist_ok=False)\n"
        "@register_reward('once')\n"
        "def once(solution_str):\n"
        "    return 1.0\n"
    )
    rewards.load_rewards(str(path))
    workers = FunctionWorkers(str(path), size=1)
    try:
        with raises(RewardError, key="reward.path", value=("once.py", "FileExistsError")):
            await rewards.score(row("once"), workers=workers)
    finally:
        workers.close()
