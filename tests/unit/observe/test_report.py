"""The report: what it reads, computes and writes, without a browser."""

import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config.task import CurriculumConfig
from jax_agent_rl.data.curriculum import DifficultyPools
from jax_agent_rl.errors import ConfigError, DataError, StorageError
from jax_agent_rl.observe import selection
from jax_agent_rl.observe.report import command
from jax_agent_rl.observe.report.charts import (
    MAX_PAUSE_SECONDS,
    MAX_POINTS,
    MAX_TRACES,
    TimeAxis,
    charts,
    thinned,
    timeline,
    zero_metrics,
)
from jax_agent_rl.observe.report.command import (
    RunData,
    page,
    read_run,
    render_report,
    to_json,
    write_report,
)
from jax_agent_rl.observe.report.trajectories import (
    COLUMNS,
    Forest,
    Prompts,
    Vocabulary,
    facts,
    tokens,
)
from jax_agent_rl.observe.run_dir import RunDir, read_traces, restore_trajectory, trajectory_record
from jax_agent_rl.observe.selection import MAX_TOKENS, Fact, FactTable, choose
from jax_agent_rl.trainer.curriculum import record_pass_rates
from tests.messages import raises
from tests.report_runs import HOSTILE, CountedRecords, decode, make_run, members, step_line
from tests.trajectories import call, group_of, session, trajectory


class Scripts(HTMLParser):
    """Contents of the script elements, as a browser's parser cuts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = tag == "script"
        if self._inside:
            self.found.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.found[-1] += data


def page_of(run: Path, *, limit: int = 0) -> tuple[dict, list[dict]]:
    """Index and trajectories of a run's page."""
    trajectories, index, _ = Scripts(
        "".join(render_report(read_run(run), limit=limit, decode=decode))
    ).found
    return json.loads(index), json.loads(trajectories)


def listed(index: dict, column: str) -> list:
    return [row[COLUMNS.index(column)] for row in index["rows"]]


def lines_of(chart: dict) -> dict[str, tuple[list, list]]:
    return {line["name"]: (list(line["x"]), list(line["y"])) for line in chart["lines"]}


def records_of(step: int = 1):
    return [
        json.loads(json.dumps(trajectory_record(t, step=step, split="train")))
        for t in members(step)
    ]


# --- charts ---------------------------------------------------------------------------------------


def test_a_chart_has_the_steps_that_have_its_metric():
    metrics = [
        step_line(1),
        {"kind": "step", "step": 2},
        step_line(3),
        {"kind": "evaluation", "step": 3, "accuracy": 1},
    ]
    by_title = {chart["title"]: chart for chart in charts(metrics)}
    assert lines_of(by_title["Entropy"]) == {"entropy": ([1, 3], [1.0, 0.333333])}
    assert by_title["Reward"]["lines"][0]["low"] == [-1, -1]
    assert lines_of(by_title["Held-out accuracy"]) == {"accuracy": ([3], [1])}
    assert "Staleness" not in by_title


def test_drops_are_drawn_for_each_step():
    metrics = [step_line(step) for step in (1, 2, 5)]
    (chart,) = [c for c in charts(metrics) if c["title"] == "Dropped trajectories"]
    assert chart["kind"] == "stack"
    assert lines_of(chart) == {"zero_variance": ([1, 2, 5], [1, 1, 3])}


def test_what_else_is_learned_from_has_charts_of_its_own():
    """Metrics of the observation loss, of feedback, and of a trainer with a curriculum."""
    pools = DifficultyPools(CurriculumConfig(enabled=True), seed=0, num_rows=1)
    pools.admits(0, pools.keys_of({}))
    group = group_of([replace(member, row={}) for member in members(1)])
    signals = {
        "observation_loss": 2.5,
        "feedback_share": 0.25,
        **record_pass_rates(pools, [group]),
    }
    shown = charts([step_line(1, **signals)])
    by_title = {chart["title"]: lines_of(chart) for chart in shown if not chart.get("more")}
    assert by_title["Observation loss"] == {"loss": ([1], [2.5])}
    assert by_title["Trajectories with feedback"] == {"with feedback": ([1], [0.25])}
    drawn = by_title["Curriculum: groups drawn"]
    assert drawn["new"] == ([1], [1])
    assert drawn["hard"] == ([1], [0])
    assert by_title["Curriculum: rows passed over"] == {"passed over": ([1], [0])}
    others = {chart["title"] for chart in shown if chart.get("more")}
    assert others == {"own_metric"}  # none of the signals is left over


def test_metrics_that_no_chart_names_are_shown_too():
    (chart,) = [c for c in charts([step_line(1)]) if c.get("more")]
    assert chart["title"] == "own_metric"
    assert lines_of(chart) == {"own_metric": ([1], [1])}


@pytest.mark.parametrize("value", [0.0, 1e-12, -1e-12])
@pytest.mark.parametrize(
    ("title", "key"),
    [
        ("KL", "kl"),
        ("Clipped tokens", "clip_fraction"),
        ("Staleness", "staleness_mean"),
        ("own", "own"),
    ],
)
def test_a_chart_of_what_a_run_does_not_have_is_hidden(title, key, value):
    def titles(*values: float) -> list[str]:
        lines = [step_line(n, **{key: value}) for n, value in enumerate(values, 1)]
        return [chart["title"] for chart in charts(lines)]

    assert title not in titles(value, value, value)
    assert title in titles(value, 0.01, value)
    assert title in titles(value, -0.01, value)


def test_zeros_that_mean_something_are_drawn():
    metrics = [step_line(1, reward_mean=0.0, tool_calls_mean=0.0, entropy=0.0)]
    by_title = {
        chart["title"]: chart
        for chart in charts([*metrics, {"kind": "evaluation", "step": 1, "accuracy": 0.0}])
    }
    assert {"Reward", "Turns and tool calls", "Entropy", "Held-out accuracy"} <= set(by_title)


def test_metrics_that_are_zero_throughout_are_named_once():
    metrics = [
        step_line(1, kl_loss=0.0, other=0.0, kl=0.0),
        step_line(2, kl_loss=0.0, other=1.0, kl=0.0),
    ]
    assert zero_metrics(metrics) == ["kl_loss"]
    assert not {"kl_loss", "KL"} & {chart["title"] for chart in charts(metrics)}


def test_the_hint_of_the_held_out_chart_says_what_is_drawn():
    (chart,) = charts([{"kind": "evaluation", "step": 1, "accuracy": 0.5}])
    assert chart["scale"] == "share"
    assert "share" in chart["hint"].lower()
    assert "accuracy" in chart["hint"]
    assert "reward on rows" not in chart["hint"]


def test_an_evaluation_is_a_phase_of_the_engines_that_lies_over_others():
    metrics = [
        {"kind": "evaluation", "step": 1, "phase_seconds": [["evaluate", 4, 6]]},
        step_line(2, phase_seconds=[["engine", 0, 10]]),
    ]
    lanes = timeline(metrics, [], {})
    assert lanes["engine"] == [
        {"name": "engine", "from": 0, "to": 10, "busy": 0.75, "step": 2},
        {"name": "evaluate", "from": 4, "to": 6, "step": 1},
    ]


def test_numbers_that_are_none_are_left_out():
    drawn = charts([step_line(1, entropy=float("nan"), own_metric=True, kl=float("inf"))])
    assert not {"Entropy", "own_metric", "KL"} & {chart["title"] for chart in drawn}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes_the_order_and_few_points(values):
    points = [(float(x), y) for x, y in enumerate(values)]
    thin = thinned(points)
    assert len(thin) <= max(MAX_POINTS, 1) + 2
    assert set(thin) <= set(points)
    assert thin == sorted(thin) and len(set(thin)) == len(thin)
    assert {max(values), min(values)} <= {y for _, y in thin}


def test_a_value_of_every_step_is_near_a_point_that_is_drawn():
    steps = range(1, 5001)
    metrics = [
        step_line(s, entropy=(s * 7919) % 1009 / 1009, reward_mean=(s * 104_729) % 997 / 997)
        for s in steps
    ]
    for line in [
        chart["lines"][0] for chart in charts(metrics) if chart["title"] in ("Entropy", "Reward")
    ]:
        assert len(line["x"]) < 700
        assert (line["x"][0], line["x"][-1]) == (1, 5000)
        assert max(min(abs(s - x) for x in line["x"]) for s in steps) == line["reach"] <= 20


def test_a_line_that_has_all_its_steps_has_no_value_between_them():
    metrics = [step_line(step) for step in range(100, 1000, 100)]
    assert all("reach" not in line for chart in charts(metrics) for line in chart["lines"])


def test_bars_of_many_steps_are_sums_that_lose_nothing():
    metrics = [
        step_line(s, tool_errors_by_kind={"timeout": s % 3, "raised": 1}) for s in range(1, 1001)
    ]
    (chart,) = [chart for chart in charts(metrics) if chart["title"] == "Tool errors"]
    assert chart["every"] == 4
    assert chart["hint"].endswith("Each bar is the sum of 4 steps.")
    bars = lines_of(chart)
    assert sum(bars["raised"][1]) == 1000
    assert sum(bars["timeout"][1]) == sum(s % 3 for s in range(1, 1001))
    assert bars["raised"] == ([*range(3, 1001, 4)], [4] * 250)
    assert chart["lines"][0]["reach"] == 2


# --- timeline -------------------------------------------------------------------------------------


def test_a_long_pause_is_cut_out_of_the_time_axis():
    axis = TimeAxis.from_intervals([(100, 110), (105, 120), (120 + MAX_PAUSE_SECONDS + 1000, 2000)])
    assert [axis(100), axis(120), axis(120 + MAX_PAUSE_SECONDS + 1000)] == [0, 20, 20]
    assert axis.cuts == (20,)


def test_a_short_pause_stays():
    axis = TimeAxis.from_intervals([(100, 110), (110 + MAX_PAUSE_SECONDS, 300)])
    assert axis(110 + MAX_PAUSE_SECONDS) == 10 + MAX_PAUSE_SECONDS
    assert axis.cuts == ()


def test_phases_updates_engine_and_traces_share_one_axis(tmp_path: Path):
    data = read_run(make_run(tmp_path / "run", steps=2))
    lanes = timeline(data.metrics, data.traces, {"train-1-0-0": 7})
    assert lanes["phases"][0] == {"name": "rollout", "from": 10, "to": 14, "step": 1}
    assert lanes["engine"] == [
        {"name": "engine", "from": 10, "to": 14, "busy": 0.75, "step": 1},
        {"name": "engine", "from": 20, "to": 24, "busy": 0.75, "step": 2},
    ]
    assert lanes["updates"] == [20, 30] and lanes["seconds"] == 30
    first, second = lanes["traces"]
    assert (first["id"], first["at"], second["at"]) == ("train-1-0-0", 7, -1)
    assert first["spans"][3] == {"name": "tool", "from": 2, "to": 3, "note": "add, timeout"}
    assert first["spans"][4]["note"] == "sums, ValueError: no"


def test_a_run_without_times_has_an_empty_timeline():
    lanes = timeline([{"kind": "step", "step": 1, "engine_busy_share": 0.5}], [], {})
    assert lanes["phases"] == lanes["traces"] == []
    assert lanes["seconds"] == 0


# --- tokens ---------------------------------------------------------------------------------------


def test_a_token_keeps_its_text_log_prob_advantage_and_version():
    record = records_of()[0] | {
        "advantages": [0.5, -0.5, 0, 1.25, 2],
        "old_logprobs": [-2, -2, 0, -2, None],
    }
    vocabulary = Vocabulary(decode)
    page = tokens(record, vocabulary, Prompts(vocabulary))
    assert [vocabulary.ids[place] for place in page["t"]] == record["response_ids"]
    assert [vocabulary.texts[place] for place in page["t"]] == [
        "hello ",
        "<|im_end|>",
        "word7 ",
        "world ",
        "<|im_end|>",
    ]
    assert page["l"] == [-1000] * 4
    assert page["a"] == [500, -500, 1250, 2000]
    assert page["o"] == [-2000, -2000, -2000, None]
    assert page["v"] == [[0, 4]]
    assert [(turn["s"], turn["i"]) for turn in page["turns"]] == [(2, 1), (2, 0)]


def test_a_gap_is_of_recorded_values_even_where_rounding_parts_or_joins_them():
    engine = [-0.1234995, -0.7, 0.0, -1.0, -1.0004]
    learner = [-0.1235005, -0.7, 0.0, None, -0.9996]
    vocabulary = Vocabulary(decode)
    record = records_of()[0] | {"rollout_logprobs": engine, "old_logprobs": learner}
    page = tokens(record, vocabulary, Prompts(vocabulary))
    assert (page["l"][0], page["o"][0]) == (-123, -124)
    assert (page["l"][3], page["o"][3]) == (
        -1000,
        -1000,
    )
    assert page["g"] == [1e-6, 0, None, 8e-4]


def test_an_advantage_that_all_tokens_share_is_one_number_also_if_it_is_zero():
    vocabulary = Vocabulary(decode)
    record = records_of()[0]
    pages = [
        tokens(record | {"advantages": [v] * 5}, vocabulary, Prompts(vocabulary))
        for v in (0.5, 0.0)
    ]
    assert [m["a"] for m in pages] == [500, 0]
    assert "a" not in tokens(record, vocabulary, Prompts(vocabulary))


def test_observations_that_were_trained_on_have_their_advantages():
    trained = trajectory([1], [4, 2, 7, 8, 5], mask=[1, 1, 0, 0, 1])
    trained = replace(
        trained, turns=tuple(replace(turn, learn_appended=True) for turn in trained.turns)
    )
    token_values = {"advantages": [0.5, 0.5, -1.0, -2.0, 0.5], "old_logprobs": [-1.0] * 5}
    record = trajectory_record(trained, step=1, split="train", token_values=token_values)
    vocabulary = Vocabulary(decode)
    page = tokens(record, vocabulary, Prompts(vocabulary))
    assert page["a"] == [500, 500, -1000, -2000, 500]
    assert len(page["l"]) == len(page["o"]) == 3
    assert [turn.get("learn") for turn in page["turns"]] == [True, True]
    assert dict(zip(COLUMNS, facts(record), strict=True))["advantage"] == -0.3


def test_constrained_tokens_are_shown_as_not_trained_on():
    trained = trajectory([1], [4, 2, 7, 8, 5], mask=[1, 1, 1, 0, 1])
    first = replace(
        trained.turns[0], output=replace(trained.turns[0].output, constrained=(True, False, True))
    )
    trained = replace(trained, turns=(first, trained.turns[1]))
    token_values = {"advantages": [0.5, -1.0], "old_logprobs": [-1.5, -1.0]}
    record = json.loads(
        json.dumps(trajectory_record(trained, step=1, split="train", token_values=token_values))
    )
    assert record["advantages"] == [None, 0.5, None, 0.0, -1.0]
    vocabulary = Vocabulary(decode)
    page = tokens(record, vocabulary, Prompts(vocabulary))
    assert page["a"] == [500, -1000]
    assert page["o"] == [None, -1500, None, -1000]
    assert [turn.get("c") for turn in page["turns"]] == [[1, 0, 1], None]
    assert restore_trajectory(record).loss_mask == trained.loss_mask == (0, 1, 0, 0, 1)


def test_a_letter_of_two_tokens_is_shown_once():
    vocabulary = Vocabulary(decode)
    page = tokens(records_of()[3], vocabulary, Prompts(vocabulary))
    assert page["x"] == {0: "é", 1: ""}
    assert [vocabulary.texts[p] for p in page["t"]] == [
        "\ufffd",
        "\ufffd",
        "world ",
    ]


def test_equal_prompts_are_written_once():
    vocabulary = Vocabulary(decode)
    prompts = Prompts(vocabulary)
    assert [tokens(record, vocabulary, prompts)["p"] for record in records_of()] == [0] * 4
    assert len(prompts.rows) == 1


def test_a_session_has_the_graph_of_its_segments_and_is_counted_as_a_whole():
    record = json.loads(json.dumps(trajectory_record(session(), step=1, split="train")))
    vocabulary = Vocabulary(decode)
    page = tokens(record, vocabulary, Prompts(vocabulary))
    graph = page["session"]
    assert [(s["at"], s["up"], s["shared"], s["after"]) for s in graph] == [
        (2, -1, 0, 0),
        (0, 0, 4, 1),
        (1, 0, 1, 0),
    ]
    assert [(s["calls"], s["turns"], s["trained"], s["share"]) for s in graph] == [
        ("1, 5", 2, 3, 0.4286),
        ("2", 1, 2, 0.2857),
        ("3–4", 2, 2, 0.2857),
    ]
    assert graph[2]["note"].startswith("message 1 of 1")
    assert "session" not in page["segments"][0]
    row = dict(zip(COLUMNS, facts(record), strict=True))
    assert (row["turns"], row["sampled"], row["inserted"]) == (5, 7, 2)


def test_a_trajectory_of_one_segment_has_no_graph():
    vocabulary = Vocabulary(decode)
    assert "session" not in tokens(records_of()[0], vocabulary, Prompts(vocabulary))


def test_the_list_shows_what_it_filters_by():
    row = dict(zip(COLUMNS, facts(records_of()[2]), strict=True))
    assert row["errors"] == ["timeout"]
    assert row["stops"] == ["eos"]
    assert row["finish"] == "answer"
    assert (row["reward"], row["sampled"], row["inserted"], row["calls"], row["advantage"]) == (
        -1,
        3,
        1,
        1,
        None,
    )


def trees_of(records) -> dict[str, list[dict]]:
    forest = Forest(decode)
    for record in records:
        forest.add(record)
    return forest.trees()


def test_every_group_has_a_tree_of_its_own_unless_it_has_one_member():
    trees = trees_of([*records_of(1), *records_of(2)[:3], *records_of(3)[:1]])
    assert list(trees) == ["train/1/g", "train/2/g"]
    assert sorted({at for node in trees["train/2/g"] for at in node["at"]}) == [4, 5, 6]


def test_a_group_is_a_tree_in_which_common_turns_stand_once():
    (nodes,) = trees_of(records_of()).values()
    first, *_ = nodes
    assert (first["up"], first["turn"], first["n"], first["at"]) == (-1, 1, 2, [0, 1])
    assert [n["ends"] for n in nodes if "ends" in n] == [[0], [1], [2], [3]]
    assert [n["up"] for n in nodes].count(0) == 2


# --- reading --------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="not a run folder"):
        write_report(tmp_path)


def test_a_negative_sample_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--limit -1"):
        write_report(make_run(tmp_path / "run"), limit=-1)


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert "not finished" in write_report(run).read_text()


def test_a_damaged_run_has_a_report_that_says_what_is_missing(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text("{")
    (run / "summary.json").write_text("[1")
    with (run / "trajectories.jsonl").open("ab") as stream:
        stream.write(
            b'{"step": 9, "split": "train", "group_id": "g", "reward": 0.5, "turns":'
            b' []}\n17\n\xff\n{"cut of'
        )
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step"}\n{"kind": "evaluation", "step": 3}\n')
        stream.write(json.dumps(step_line(4, reward_mean=float("nan"))) + "\n")
    with (run / "traces.jsonl").open("a") as stream:
        stream.write('{"trajectory_id": "t", "step": 1, "spans": []}\n')
    index, trajectories = page_of(run)
    assert len(trajectories) == index["run"]["total"] == 12
    notes = " ".join(index["notes"])
    assert "config.json cannot be read" in notes
    assert "summary.json cannot be read" in notes
    assert "trajectories.jsonl: 3 (cut off or damaged)" in notes
    for file in ("trajectories.jsonl", "metrics.jsonl", "traces.jsonl"):
        assert f"{file}: 1 (not as this version writes them)" in notes
    assert "tokens are shown as ids" in write_report(run).read_text()


@pytest.mark.parametrize(
    "config", [[], {}, {"model": None}, {"model": 3, "trainer": []}, {"model": {"path": 7}}]
)
def test_a_configuration_of_another_shape_is_said_and_harms_nothing(tmp_path: Path, config):
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text(json.dumps(config))
    assert "tokens are shown as ids" in write_report(run).read_text()


@pytest.mark.parametrize(("out", "obstacle"), [("folder", "folder"), ("file/report.html", "file")])
def test_a_place_that_cannot_be_written_is_said_with_what_helps(
    tmp_path: Path, out: str, obstacle: str
):
    run = make_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with raises(StorageError, key=f"/{obstacle}", fix="--out"):
        write_report(run, tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "run"]


def test_of_many_trajectories_every_step_keeps_its_best_and_worst(tmp_path: Path):
    index, trajectories = page_of(make_run(tmp_path / "run", steps=6), limit=14)
    assert index["run"]["total"] == 24 and len(trajectories) == 12
    assert listed(index, "step") == sorted([*range(1, 7)] * 2)
    assert listed(index, "reward") == [1.0, -1.0] * 6
    (note,) = index["notes"]
    assert "shown: 12 of 24 trajectories, from 6 of 6 steps" in note
    assert "--limit shows more" in note


def test_few_trajectories_of_many_steps_are_from_steps_equally_far_apart(tmp_path: Path):
    index, _ = page_of(make_run(tmp_path / "run", steps=9), limit=7)
    assert listed(index, "step") == [1, 1, 5, 5, 9, 9]
    assert "shown: 6 of 36 trajectories, from 3 of 9 steps" in index["notes"][0]


def test_members_of_a_group_follow_each_other_on_the_page(
    tmp_path: Path,
):
    run = make_run(tmp_path / "run", steps=2)
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    (run / "trajectories.jsonl").write_text("\n".join([*lines[::2], *lines[1::2]]) + "\n")
    index, trajectories = page_of(run)
    assert listed(index, "id") == [f"train-{step}-0-{n}" for step in (1, 2) for n in (0, 2, 1, 3)]
    assert [sum(turn["s"] for turn in entry["turns"]) for entry in trajectories] == listed(
        index, "sampled"
    )
    trees = index["forest"]
    assert list(trees) == ["train/1/train-1-0", "train/2/train-2-0"]
    assert sorted({at for node in trees["train/2/train-2-0"] for at in node["at"]}) == [4, 5, 6, 7]


def test_a_page_holds_few_trajectories_at_a_time_however_many_there_are():
    of_steps = chain.from_iterable(map(records_of, range(1, 51)))
    records = CountedRecords(list(of_steps))
    pieces = render_report(RunData(name="run", trajectories=records), decode=decode)
    assert sum('"turns":' in piece for piece in pieces) >= 200
    assert records.most <= 2


def test_the_timeline_has_the_newest_of_many_traces_in_order_of_their_start(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=1)
    trace, _ = read_traces(run / "traces.jsonl")
    began = random.Random(0).sample(range(1, 5000), 1000)
    with (run / "traces.jsonl").open("w") as stream:
        for seconds in began:
            span = trace["spans"][0] | {
                "start_ns": seconds * 10**9,
                "end_ns": (seconds + 1) * 10**9,
            }
            stream.write(
                json.dumps(trace | {"trajectory_id": f"t{seconds}", "spans": [span]}) + "\n"
            )
    index, _ = page_of(run)
    assert [lane["id"] for lane in index["timeline"]["traces"]] == [
        f"t{seconds}" for seconds in sorted(began)[-MAX_TRACES:]
    ]


def test_the_facts_of_many_trajectories_are_those_that_were_given():
    facts = [
        a_fact(step, split=("train", "heldout")[step % 2], group=f"g{step % 3}", reward=step)
        for step in range(20)
    ]
    fact_table = FactTable(facts)
    assert list(fact_table) == facts
    assert len(fact_table) == 20
    assert fact_table[7] == facts[7]
    assert choose(fact_table, 5) == choose(facts, 5)


def a_fact(
    step: int, *, split: str = "train", group: str = "g", tokens: int = 10, reward: float = 0.0
) -> Fact:
    return Fact(split=split, step=step, group=group, reward=reward, prompt=5, tokens=tokens)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 60))
def test_no_more_are_chosen_than_were_asked_for(sizes, limit):
    facts = []
    for step, size in enumerate(sizes):
        facts += [a_fact(step, split=("train", "heldout")[step % 2])] * size
    chosen, is_full = choose(facts, limit)
    assert 1 <= len(chosen) <= limit and not is_full
    assert len(chosen) == min(limit, len(facts)) or len(chosen) > limit // 4


def test_all_are_chosen_where_nothing_was_asked_for_or_there_are_no_more():
    facts = [a_fact(1, tokens=MAX_TOKENS), *[a_fact(2)] * 9]
    assert choose(facts, 0) == (set(range(10)), False)
    assert choose(facts[1:], 9) == (set(range(9)), False)
    assert choose([], 5) == (set(), False)


def test_long_trajectories_are_fewer_but_there_is_one():
    facts = []
    for step in range(10):
        facts += [a_fact(step, tokens=MAX_TOKENS // 20, group=f"{step}")] * 8
    chosen, is_full = choose(facts, 80)
    assert is_full and 10 <= len(chosen) < 20
    assert choose([a_fact(1, tokens=2 * MAX_TOKENS, reward=r) for r in (0, 1, 0)], 3) == ({1}, True)


def test_a_prompt_counts_once_for_its_group():
    alone = []
    together = []
    for n in range(4):
        fact = a_fact(1, tokens=0, group=f"{n}")._replace(prompt=MAX_TOKENS // 2)
        alone.append(fact)
        together.append(fact._replace(group="0"))
    assert choose(together, 4) == ({0, 1, 2, 3}, False)
    assert choose(alone, 4)[1]


def test_the_page_says_that_more_tokens_would_be_too_many(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(selection, "MAX_TOKENS", 30)
    index, trajectories = page_of(make_run(tmp_path / "run"), limit=12)
    assert 1 <= len(trajectories) < 12
    assert "--limit 0 shows all" in index["notes"][0]
    assert len(page_of(tmp_path / "run")[1]) == 12


# --- the page -------------------------------------------------------------------------------------


def test_what_a_model_wrote_stays_data(tmp_path: Path):
    text = write_report(make_run(tmp_path / "run", hostile=True), decode=decode).read_text(
        encoding="utf-8"
    )
    trajectories, index, _ = scripts = Scripts(text).found
    assert len(scripts) == 3 and "img" not in Scripts(text).tags
    assert set(HOSTILE) <= set(json.loads(index)["vocabulary"]["texts"])
    assert not re.search(r"[<>&\u2028\u2029]", index + trajectories)
    assert [len(json.loads(trajectories)), len(trajectories.splitlines())] == [15, 17]
    assert HOSTILE[0] in json.loads(index)["rows"][4][COLUMNS.index("errors")]


@given(st.text())
def test_json_in_the_page_ends_no_script_and_reads_as_it_was(text):
    encoded = to_json({"text": text})
    assert json.loads(encoded) == {"text": text}
    assert not set("<>&\u2028\u2029") & set(encoded)


def test_half_a_surrogate_pair_does_not_keep_the_page_from_being_written(tmp_path: Path):
    run = make_run(tmp_path / "run")
    bad = [[replace(call(error="unknown_tool"), name="\ud83d")]]
    RunDir(run).add_trajectories(
        4, "train", [trajectory([1], [4, 2, 9], mask=[1, 1, 0], calls=bad)]
    )
    trajectories, *_ = Scripts(write_report(run).read_text(encoding="utf-8")).found
    assert json.loads(trajectories)[-1]["turns"][0]["calls"][0]["name"] == "?"


def test_numbers_that_are_no_json_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))


def test_the_page_allows_its_own_script_only_and_loads_nothing():
    text = "".join(page(title="<b>run</b>", trajectories=[], index=dict))
    assert "&lt;b&gt;run&lt;/b&gt;" in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)


def luminance(colour: str) -> float:
    """Return the luminance by the formula of WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_colour_of_text_is_readable_on_every_ground_of_both_themes():
    css = (Path(command.__file__).parent / "page" / "page.css").read_text()
    light = dict(re.findall(r"--([\w-]+): (#\w{6})", css.partition("}")[0]))
    dark = dict(
        re.findall(
            r"--([\w-]+): (#\w{6})", css.split(':root[data-theme="dark"] {')[2].partition("}")[0]
        )
    )
    assert set(light) == set(dark)
    for theme in (light, dark):
        for text in ("ink", "soft", "faint", "accent", "good", "bad", "warn"):
            for ground in ("paper", "card", "hover", "accent-soft"):
                low, high = sorted((luminance(theme[text]), luminance(theme[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (theme is dark, text, ground)


def test_the_report_of_a_run_is_written_beside_it(tmp_path: Path):
    run = make_run(tmp_path / "run")
    assert write_report(run) == run / "report.html"
    assert write_report(run, tmp_path / "new" / "r.html").is_file()
