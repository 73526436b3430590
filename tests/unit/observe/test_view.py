"""Trajectories in the terminal: which are shown and how, what makes no sense, and folders that are
damaged.
"""

import io
import json
import math
import tracemalloc
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.errors import DataError, JaxAgentRLError
from jax_agent_rl.observe import run_dir
from jax_agent_rl.observe.report.command import RunData, render_report
from jax_agent_rl.observe.run_dir import read_trajectories, restore_trajectory, trajectory_record
from jax_agent_rl.observe.schema import is_trajectory_record
from jax_agent_rl.observe.selection import TrajectoryFilter, group_of
from jax_agent_rl.observe.view import (
    COLOURS,
    best_and_worst,
    outline,
    render,
    render_group,
    view_run,
)
from jax_agent_rl.types import Fork
from tests.examples import examples
from tests.messages import raises
from tests.report_runs import CountedRecords, make_run
from tests.tiny_chat import tokenizer
from tests.trajectories import call, session, trajectory


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of four trajectories; its tokenizer is gone."""
    return make_run(tmp_path_factory.mktemp("view") / "run")


def view(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["view", str(run), *options], env={"COLUMNS": "200"})


def shown(run: Path, *options: str) -> list[str]:
    """Ids of the trajectories that are shown."""
    result = view(run, "--limit", "99", *options)
    assert result.exit_code == 0, result.output
    titles = (line for line in result.stdout.splitlines() if line.startswith("╭"))
    return [title.split()[1] for title in titles]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ("--text [900][901]", ["train-1-0-3", "train-2-0-3", "train-3-0-3"]),
        ("--text TRAIN-2-0-1", ["train-2-0-1"]),
        ("--min-step 2 --max-step 2 --max-reward 0", ["train-2-0-1", "train-2-0-2"]),
        ("--min-step 3 --tool-error timeout", ["train-3-0-2"]),
        ("--finish-reason response_length --step 1", ["train-1-0-3"]),
    ],
)
def test_it_filters_as_the_page_does(run, options, ids):
    assert shown(run, *options.split()) == ids


def test_what_a_limit_leaves_out_is_told(run):
    assert "2 of 12 trajectories; --limit 12 shows all" in view(run, "--limit", "2").stdout
    assert "shows all" not in view(run, "--limit", "12").stdout


def test_a_limit_below_one_is_refused(run):
    assert len(shown(run)) == 12
    for limit in ("0", "-1"):
        result = view(run, "--limit", limit)
        assert result.exit_code == 2 and "--limit" in result.output


def test_an_error_no_tool_had_is_a_message_with_those_they_had(run):
    error = view(run, "--tool-error", "foo").exception
    assert isinstance(error, JaxAgentRLError)
    assert "'foo'" in str(error)
    assert "any, none, timeout" in str(error)


@pytest.mark.parametrize("options", ["--sort worst", "--color gap", "--whole-prompt"])
def test_what_is_of_no_effect_on_trees_is_refused(run, options):
    assert view(run, "--tree").exit_code == 0
    error = view(run, "--tree", *options.split()).exception
    assert isinstance(error, JaxAgentRLError) and options in str(error)


def test_a_gap_between_engine_and_learner_is_coloured_where_it_is_known():
    record = {"rollout_logprobs": [-1.0] * 5, "old_logprobs": [-1.001, -1.05, -0.5, -3.0, None]}
    gap = COLOURS["gap"]
    assert [gap(record, at) for at in range(5)] == [
        "green",
        "yellow",
        "dark_orange",
        "bold red",
        "dim",
    ]
    assert gap({"rollout_logprobs": [-1.0]}, 0) == "dim"


def test_a_damaged_folder_is_shown_as_far_as_it_can_be_read(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    content = (run / "trajectories.jsonl").read_bytes()
    (run / "trajectories.jsonl").write_bytes(
        b'{"step": 1, \n\xff\xfe\n[]\n{"step": 1}\n' + content + content[:100]
    )
    (run / "config.json").write_text("{")
    result = view(run)
    assert result.exit_code == 0 and "[4][2]" in result.stdout
    for said in (
        "config.json cannot be read",
        "shown as ids",
        "trajectories.jsonl: 4 (cut off or damaged)",
    ):
        assert said in result.stderr
    (run / "config.json").unlink()
    assert "note: config.json" in view(run).stderr


def test_notes_do_not_steer_the_terminal(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (run / "config.json").write_text(json.dumps({"model": {"path": "\x1b[2Jnowhere"}}))
    assert "\\x1b[2Jnowhere" in view(run).stderr
    assert "\x1b" not in view(run).stderr


# --- groups as trees ---

STEM = trajectory([3], [10, 11, 7, 12], mask=[1, 1, 0, 1], reward=1.0, index=0)
FORK = Fork(tree_id="g-0", parent_id="g-0", turns=1)
BRANCH = replace(trajectory([3], [10, 11, 7, 13, 14], mask=[1, 1, 0, 1, 1], index=1), fork=FORK)


def records_of(*trajectories, step: int = 1):
    records = [trajectory_record(t, step=step, split="train") for t in trajectories]
    return [json.loads(json.dumps(record)) for record in records]


def test_a_record_is_read_back_with_its_fork():
    (record,) = records_of(BRANCH)
    again = restore_trajectory(record)
    assert again.fork == FORK
    for name in (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_logprobs",
        "policy_versions",
        "reward",
    ):
        assert getattr(again, name) == getattr(BRANCH, name)


def test_common_turns_stand_once_with_the_mean_reward_of_what_followed():
    console = Console(file=io.StringIO(), width=160)
    console.print(render_group(records_of(STEM, BRANCH), lambda ids: " ".join(map(str, ids))))
    head, first, *leaves = console.file.getvalue().splitlines()
    assert head.split("  ")[:2] == [
        "g",
        "2 trajectories, 1 tree, mean reward 0.50, 2 of 7 sampled tokens shared",
    ]
    assert "turn 1  2 tokens  mean reward 0.50 of 2  10 11" in first
    assert "turn 2  1 token  mean reward 1.00 of 1  g-0 (tree 1) answer  12" in leaves[0]
    assert "turn 2  2 tokens  mean reward 0.00 of 1  g-1 (tree 1) answer  13 14" in leaves[1]


def test_trajectories_that_are_equal_are_both_named():
    console = Console(file=io.StringIO(), width=160)
    twin = replace(STEM, trajectory_id="g-5")
    console.print(render_group(records_of(STEM, twin), str))
    assert "g-0 (tree 1) answer  g-5 (tree 2) answer" in console.file.getvalue()


def test_groups_of_different_steps_are_separate(run):
    heads = [line for line in view(run, "--tree").stdout.splitlines() if "trajectories, " in line]
    assert [head.split("  ")[0] for head in heads] == ["train-1-0", "train-2-0", "train-3-0"]
    assert all("4 trajectories" in head for head in heads)
    (head,) = [
        line
        for line in view(run, "--tree", "--limit", "1").stdout.splitlines()
        if "trajectories, " in line
    ]
    assert head.startswith("train-3-0 ")


def test_the_last_in_an_order_are_shown_ties_by_time(run):
    def last(sort: str, limit: int) -> list[str]:
        result = view(run, "--sort", sort, "--limit", str(limit))
        return [line.split()[1] for line in result.stdout.splitlines() if line.startswith("╭")]

    in_order = [f"train-{step}-0-{n}" for step in (1, 2, 3) for n in range(4)]
    of_member = [in_order[n::4] for n in range(4)]  # rewards 1, 0, -1, 0.25
    best = [*of_member[2], *of_member[1], *of_member[3], *of_member[0]]
    worst = [*of_member[0], *of_member[3], *of_member[1], *of_member[2]]
    for sort, names in (("time", in_order), ("best", best), ("worst", worst)):
        for limit in (1, 5, 12, 99):
            assert last(sort, limit) == names[-limit:]


@pytest.mark.parametrize(
    "options", [{"sort": "time"}, {"sort": "best"}, {"sort": "worst"}, {"trees": True}]
)
def test_few_trajectories_are_held_at_a_time_however_many_are_shown(options):
    group = [STEM, BRANCH]
    of_steps = chain.from_iterable(records_of(*group, step=step) for step in range(100))
    records = CountedRecords(list(of_steps))
    data = RunData(name="run", trajectories=records)
    view_run(
        data, TrajectoryFilter(), **{"sort": "time", "limit": 1000, "whole_prompt": False} | options
    )
    assert records.most <= 2 * len(group)


def test_the_best_and_the_worst_are_found_without_holding_others():
    of_steps = chain.from_iterable(records_of(STEM, BRANCH, step=step) for step in range(100))
    records = CountedRecords(list(of_steps))
    extremes = best_and_worst(record for record in records if record["split"] == "train")
    assert {name: (extreme["step"], extreme["reward"]) for name, extreme in extremes.items()} == {
        "best": (99, 1.0),
        "worst": (99, 0.0),
    }
    assert records.most <= 4


def test_a_file_that_is_replaced_while_it_is_read_is_said(run, tmp_path):
    copy = tmp_path / "trajectories.jsonl"
    copy.write_bytes((run / "trajectories.jsonl").read_bytes())
    records = read_trajectories(copy)
    all_records = list(records)
    assert list(records.read([11, 0, 11])) == [all_records[11], all_records[0], all_records[11]]
    copy.write_bytes(b"\n" + copy.read_bytes())
    with raises(DataError, fix="run the command again"):
        list(records.read([1]))


def test_a_file_that_cannot_be_read_is_a_message(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (run / "trajectories.jsonl").unlink()
    (run / "trajectories.jsonl").mkdir()
    for command in ("view", "report"):
        error = CliRunner().invoke(app, [command, str(run)]).exception
        assert isinstance(error, DataError)
        assert "trajectories.jsonl cannot be read" in str(error)
    assert not (run / "report.html").exists()


def test_a_line_without_end_is_left_out_and_not_held(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", steps=1)
    lines = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    limit = max(map(len, lines))
    monkeypatch.setattr(run_dir, "MAX_LINE_BYTES", limit)
    (run / "trajectories.jsonl").write_bytes(
        lines[0] + b"[" * 5 * limit + b"\n" + b"".join(lines[1:])
    )
    records = read_trajectories(run / "trajectories.jsonl")
    read = list(records)
    assert [record["trajectory_id"] for record in read] == [f"train-1-0-{n}" for n in range(4)]
    assert records.damaged == 1
    assert list(records.read(range(4))) == read


# --- sessions of several segments ---


def test_a_session_is_shown_as_a_graph_and_then_by_segment():
    (record,) = records_of(session())
    console = Console(file=io.StringIO(), width=200)
    console.print(render(record, lambda ids: " ".join(map(str, ids))))
    lines = [line.strip("│╭╮╰╯─ ") for line in console.file.getvalue().splitlines()]
    assert lines[1].endswith("sampled 7 of 9 response tokens")
    assert "turns 5" in lines[1]
    assert lines[2:6] == [
        "3 segments",
        "└── segment 1  calls 1, 5  3 trained tokens (43%)",
        (
            "├── segment 2  calls 2  2 trained tokens (29%)  leaves segment 1 after turn 1 (shared"
            " ids: 4)"
        ),
        (
            "└── segment 3  calls 3–4  2 trained tokens (29%)  leaves segment 1 in the prompt"
            " (shared ids: 1): message 1 of 1 (user) has 'help' where the recorded one (user) has"
            " 'question'"
        ),
    ]
    assert lines[6:12] == [
        "segment 1",
        "1 3«4 2»7«5»",
        "segment 2",
        "1 3 4 2 6«8 2»",
        "segment 3",
        "1 9«20»7«21»",
    ]


def test_a_call_that_was_spliced_says_so():
    session = trajectory([3], [10, 7, 11], mask=[1, 0, 1])
    first, second = session.turns
    session = replace(
        session,
        turns=(replace(first, number=0), replace(second, number=1, note="message 4 \x1b[2J")),
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(render(*records_of(session), str))
    assert "call 2 was spliced: message 4 \\x1b[2J" in console.file.getvalue()


def test_records_of_earlier_versions_are_shown_without_calls(tmp_path):
    (record,) = records_of(session())
    for part in (record, *record["segments"]):
        for turn in part["turns"]:
            del turn["number"], turn["note"]
    console = Console(file=io.StringIO(), width=160)
    console.print(render(record, str))
    assert "segment 1  turns: 1  2 trained tokens (29%)" in console.file.getvalue()


def test_a_note_on_a_turn_without_a_number_names_the_turn():
    session = trajectory([3], [10, 7, 11], mask=[1, 0, 1])
    first, second = session.turns
    session = replace(session, turns=(first, replace(second, note="message 4 was edited")))
    console = Console(file=io.StringIO(), width=160)
    console.print(render(*records_of(session), str))
    assert "turn 2 was spliced: message 4 was edited" in console.file.getvalue()


# --- folders of others ---

LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
NAMES = st.sampled_from(["a", "role", "name", "answer", "", "\x1b[2J"])
VALUES = st.recursive(
    LEAVES | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    """Paths of everything in a JSON value."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(record: dict, path: tuple, value) -> dict:
    copy = json.loads(json.dumps(record))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy


def test_a_turn_of_more_ids_than_there_are_is_no_record():
    record = json.loads(json.dumps(next(iter(records_of(trajectory([1, 3], [8, 2]))))))
    record["turns"][0]["appended"] = 20_000_000
    tracemalloc.start()
    try:
        assert not is_trajectory_record(record)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("logprob", [710.0, 1e308, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("colour", COLOURS)
def test_any_number_as_a_logprob_is_shown(logprob, colour):
    record = json.loads(json.dumps(next(iter(records_of(trajectory([1, 3], [8, 2]))))))
    record["rollout_logprobs"][0] = logprob
    assert is_trajectory_record(record)
    Console(file=io.StringIO()).print(render(record, str, colour=colour))


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_with_anything_in_it_is_shown_or_left_out(data, tmp_path):
    call_of = call(error="timeout")
    sample = trajectory([1, 3], [8, 2, 9, 2], mask=[1, 1, 0, 1], index=2, calls=[[call_of]])
    record = data.draw(st.sampled_from([*records_of(session(), BRANCH, sample)]))
    paths = [path for path in places(record) if path]
    bad = changed(record, data.draw(st.sampled_from(paths)), data.draw(VALUES | st.just(...)))
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps(bad) + "\n" + json.dumps(record) + "\n")
    records = read_trajectories(file)
    read = list(records)
    assert record in read
    console = Console(file=io.StringIO(), width=160)
    for entry in read:
        for colour in COLOURS:
            console.print(
                render(entry, lambda ids: " ".join(map(str, ids)), colour=colour, whole_prompt=True)
            )
        outline(entry, title="best")
    for _, members in groupby(read, key=group_of):
        console.print(render_group(list(members), str))
    for _ in render_report(
        RunData(name="run", trajectories=records), decode=lambda ids: " ".join(map(str, ids))
    ):
        pass


# --- outlines ---


def record(*, turns: int, messages: list[tuple[str, str]]) -> dict:
    said = [{"role": role, "content": content} for role, content in messages]
    facts = {"step": 7, "reward": 0.5, "trajectory_id": "t-1", "finish_reason": "answer"}
    return {
        **facts,
        "row": {"reward_model": {"ground_truth": "4"}},
        "turns": [{}] * turns,
        "messages": said,
    }


WORKED = [
    ("system", "Use tools."),
    ("user", "What is 1 plus 1?"),
    ("assistant", "[add()]"),
    ("tool", "2"),
]


def test_worked_examples_of_the_prompt_are_left_out():
    played = [
        ("user", "What is 2 plus 2?"),
        ("assistant", "[add()]"),
        ("tool", "4"),
        ("assistant", "= 4"),
    ]
    text = outline(record(turns=2, messages=[*WORKED, ("assistant", "= 2"), *played]), title="best")
    assert text.splitlines() == [
        "best: step 7, reward 0.50, truth 4, end answer, t-1",
        "       user  What is 2 plus 2?",
        "  assistant  [add()]",
        "       tool  4",
        "  assistant  = 4",
    ]


def test_long_messages_end_early_and_controls_are_spelt_out():
    long = outline(
        record(turns=1, messages=[("user", "a\n\nb"), ("assistant", "\x1b[2J" + "x" * 300)]),
        title="worst",
    )
    question, answer = long.splitlines()[1:]
    assert question.endswith("  a b")
    assert "\x1b" not in long
    assert "\\x1b[2J" in answer
    assert answer.endswith("x…")
    assert len(answer) == len("  assistant  ") + 100


def test_a_trajectory_that_was_never_sampled_shows_its_prompt():
    assert "What is 1 plus 1?" in outline(record(turns=0, messages=WORKED[:2]), title="worst")


def test_a_call_in_an_outline_does_not_steer_the_terminal():
    hostile = record(turns=1, messages=[("user", "q"), ("assistant", "")])
    function = {"name": "add\x1b[2J\u061c", "arguments": "{}\u200b\nbest: step 9"}
    hostile["messages"][1]["tool_calls"] = [{"function": function}]
    hostile["trajectory_id"] = "t\x07\n"
    text = outline(hostile, title="worst")
    assert "add\\x1b[2J\\u061c" in text and len(text.splitlines()) == 3
    assert not set(text) & set("\x1b\x07\u061c\u200b")


def test_a_model_folder_with_code_of_its_own_is_neither_run_nor_asked_about(tmp_path):
    folder = tmp_path / "model"
    ran = tmp_path / "ran"
    tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    run = make_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"]["path"] = str(folder)
    (run / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["view", str(run)], input="y\n")
    assert result.exit_code == 0 and not ran.exists()
    assert "auto_map" in result.stderr
    assert "trust_remote_code" not in result.stderr
