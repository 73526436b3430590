"""What an evaluation prints: names of a user's data as they are, and no mean with a certainty that
it has not.
"""

import io

import pytest
from rich.console import Console

from jax_agent_rl.cli.evaluate import score_table
from jax_agent_rl.evaluate.evaluation import scores
from jax_agent_rl.types import DropReason, Group
from tests.trajectories import trajectory

SETTINGS = {"samples": 2, "ks": (1,), "pass_reward": 1.0, "seed": 0}


def printed(*rewards: float, source: str = "x", dropped: dict | None = None) -> str:
    """The line of an evaluation of prompts that got these rewards for both samples."""
    groups = []
    for number, reward in enumerate(rewards):
        group_id = str(number)
        first = trajectory([1], [5], reward=reward, index=0, group=group_id)
        second = trajectory([1], [5], reward=reward, index=1, group=group_id)
        group = Group(group_id=group_id, trajectories=(first, second), dropped=dropped or {})
        groups.append(group)
    console = Console(file=io.StringIO(), width=200)
    console.print(score_table(scores(groups, [source] * len(groups), **SETTINGS)))
    return console.file.getvalue().splitlines()[1]


@pytest.mark.parametrize("source", ["a[/b]", "math [hard]", "[red]", "back\\slash", "[link=x]"])
def test_a_data_source_is_shown_as_it_is(source: str):
    assert printed(1.0, source=source).startswith(source + "  ")


def test_what_was_lost_is_named():
    assert (
        printed(1.0, dropped={DropReason.TOOL_SERVER_ERROR: 3})
        .rstrip()
        .endswith("tool_server_error 3")
    )


def test_rewards_that_all_agree_stand_without_an_interval():
    cells = printed(1.0, 1.0, 1.0).split()
    assert cells[2:6] == ["100.0%", "[43.9%,", "100.0%]", "1.000"] and cells[6] == "1.0", (
        "turns follow"
    )


def test_rewards_that_differ_have_one():
    assert "0.500 [0.000, 1.000]" in printed(0.0, 1.0)
