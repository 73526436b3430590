"""Which trajectories are kept and shown."""

import io
import json
import shutil
import subprocess
import unicodedata
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe import report
from jax_agent_rl.observe.run_dir import RunDir, read_records, trajectory_record
from jax_agent_rl.observe.selection import TrajectoryFilter, sample
from jax_agent_rl.observe.view import COLOURS, render
from jax_agent_rl.trainer.observing import Phases
from jax_agent_rl.utils.text import printable
from tests.report_runs import decode, members
from tests.trajectories import trajectory

Item = namedtuple("Item", "number group reward")


def pick(items, limit, seed=0):
    return sample(items, limit, reward=lambda i: i.reward, group=lambda i: i.group, seed=seed)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-5, 5)), max_size=40),
    st.integers(2, 45),
    st.integers(0, 9),
)
def test_a_sample_has_the_best_the_worst_and_keeps_the_order(rows, limit, seed):
    items = [Item(number, *row) for number, row in enumerate(rows)]
    sample = pick(items, limit, seed)
    assert len(sample) == min(limit, len(items))
    assert sample == sorted(sample)
    if items:
        rewards = [i.reward for i in sample]
        assert {max(i.reward for i in items), min(i.reward for i in items)} <= set(rewards)


def test_groups_stay_whole_as_far_as_there_is_room():
    items = [
        Item(n, "abc"[n // 4], [0, 1, 2, 9][n % 4] + n / 100 if n < 8 else 3) for n in range(12)
    ]
    sample = pick(items, 8)  # the best is of b, the worst of a
    assert [i.number for i in sample] == list(range(8))


def test_all_or_none_can_be_kept():
    items = [Item(n, "a", n) for n in range(5)]
    assert pick(items, None) == items and pick(items, 0) == []


def test_a_run_writes_no_more_of_a_step_than_it_keeps(tmp_path):
    run_dir = RunDir(tmp_path, keep_trajectories=2)
    run_dir.add_trajectories(1, "train", members(1))
    assert [r["reward"] for r in read_records(run_dir.trajectories)] == [1.0, -1.0]


def test_numbers_per_token_are_laid_out_along_the_response_and_its_segments():
    session = trajectory([3], [4, 5, 6, 2], mask=[1, 0, 1, 1])
    segment = trajectory([3], [8, 9], mask=[0, 1])
    in_segments = replace(session, segments=(segment,))
    token_values = {"advantages": [0.1, 1.0, 2.0, float("nan")]}
    record = trajectory_record(in_segments, step=1, split="train", token_values=token_values)
    assert record["segments"][0]["advantages"] == [0.0, 0.1]
    assert record["advantages"] == [1.0, 0.0, 2.0, None]
    assert "advantages" not in trajectory_record(in_segments, step=1, split="train")


def records():
    return [
        trajectory_record(t, step=step, split="train") for step in (1, 2) for t in members(step)
    ]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, range(8)),
        ({"step": 2}, range(4, 8)),
        ({"min_step": 2}, range(4, 8)),
        ({"max_step": 1}, range(4)),
        ({"text": "HELLO", "step": 1}, [0, 1]),
        ({"text": "g-3"}, [3, 7]),
        ({"text": "question"}, []),  # stands in prompts alone
        ({"split": "heldout"}, []),
        ({"min_reward": 0.25}, [0, 3, 4, 7]),
        ({"max_reward": -0.5}, [2, 6]),
        ({"tool_error": "any"}, [2, 6]),
        ({"tool_error": "timeout", "step": 1}, [2]),
        ({"tool_error": "none", "step": 1}, [0, 1, 3]),
        ({"tool_error": "malformed"}, []),
        ({"finish_reason": "response_length"}, [3, 7]),
        ({"stop_reason": "eos"}, range(8)),
        ({"stop_reason": "length"}, []),
    ],
)
def test_filters_hold_together(wanted, numbers):
    keep = TrajectoryFilter(**wanted)
    assert [n for n, record in enumerate(records()) if keep(record, decode)] == list(numbers)


@pytest.mark.parametrize(
    "wrong", [{"split": "test"}, {"finish_reason": "done"}, {"stop_reason": "eso"}]
)
def test_a_filter_that_there_is_not_is_a_message(wrong):
    with pytest.raises(ConfigError, match="choose one of"):
        TrajectoryFilter(**wrong)


def test_a_filter_says_what_it_asks_for():
    assert TrajectoryFilter(step=3, tool_error="any").describe() == "step=3, tool_error=any"
    assert TrajectoryFilter().describe() == "no filter"


def shown(
    renderable: RenderableType, *, no_color: bool = True, force_terminal: bool = False
) -> str:
    """What a wide terminal gets of it."""
    out = io.StringIO()
    Console(file=out, width=400, no_color=no_color, force_terminal=force_terminal).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("colour", COLOURS)
def test_the_terminal_shows_the_same_text_in_every_colouring(colour):
    record = records()[0] | {"advantages": [1.0, -1.0, 0.0, 0.0, 2.0]}
    panel = render(record, decode, colour=colour)
    assert "«hello <|im_end|>»word7 «world <|im_end|>»" in shown(panel)
    assert "\x1b[" in shown(panel, force_terminal=True, no_color=False)


OWNED = "\x1b[2J\x1b]0;owned\x07 \u202e9\u200b\ud800"
SPELT = "\\x1b[2J\\x1b]0;owned\\x07 \\u202e9\\u200b\\ud800"


def steering(kind: str):
    """A record that would steer the terminal, and its ids as text."""
    record = records()[0]
    calls = [{"error": OWNED}]
    changes = {
        "text": {},
        "truth": {"row": {"reward_model": {"ground_truth": OWNED}}},
        "error": {"turns": [record["turns"][0] | {"tool_calls": calls}]},
        "end": {"finish_reason": OWNED},
        "id": {"trajectory_id": OWNED},
    }
    return record | changes[kind], (lambda ids: OWNED) if kind == "text" else decode


@pytest.mark.parametrize("kind", ["text", "truth", "error", "end", "id"])
def test_nothing_in_a_record_steers_the_terminal(kind):
    record, as_text = steering(kind)
    text = shown(render(record, as_text))
    assert SPELT in text
    assert not set(OWNED) & set(text) - set(SPELT)


def test_the_page_spells_out_what_the_terminal_does(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed on this machine")
    script = (Path(report.__file__).parent / "page" / "dom.js").read_text()
    begin = script.index("const PICTURES")
    end = script.index("const quoted")
    woman = "\U0001f469"
    computer = "\U0001f4bb"
    heart = "\u2764\ufe0f"
    fire = "\U0001f525"
    pictures = [
        f"{woman}\u200d{computer}",
        heart,
        "1\ufe0f\u20e3",
        f"{heart}\u200d{fire}",
        "1\ufe0f",
    ]
    known = [
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) != "Cn"
    ]  # to Python's Unicode
    texts = [*known, *pictures, *(f"a{mark}b" for mark in "\ufe0f\u200d\u061c")]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    asking = (
        f"const texts = require({str(tmp_path / 'texts.json')!r});"
        "console.log(JSON.stringify(texts.map(visible)));"
    )
    (tmp_path / "ask.js").write_text(script[begin:end] + asking)
    answer = subprocess.run(
        [node, tmp_path / "ask.js"], check=True, capture_output=True, text=True
    ).stdout
    spelt = json.loads(answer)
    assert [
        text for text, expected in zip(texts, spelt, strict=True) if printable(text) != expected
    ] == []


def test_phases_are_on_the_wall_clock_and_are_taken_once():
    now = iter([100.0, 101.0, 103.0, 103.0, 104.0])
    phases = Phases(lambda: next(now), wall=lambda: 5000.0)
    with phases.measure("learn"):
        pass
    phases.ended("engine", 2.5)
    assert phases.take() == [["learn", 5001.0, 5003.0], ["engine", 5001.5, 5004.0]]
    assert phases.take() == []


def test_a_phase_that_fails_counts():
    phases = Phases(iter(range(100)).__next__, wall=lambda: 0.0)
    with pytest.raises(KeyError), phases.measure("learn"):
        raise KeyError
    assert [name for name, *_ in phases.take()] == ["learn"]
