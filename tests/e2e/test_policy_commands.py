"""``eval``, ``rollout`` and ``doctor`` as users call them, on a run of a tiny model, its checkpoint
and its files.
"""

import json
import operator
import os
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import jax
import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from jax_agent_rl.cli import app
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_run import tiny_recipe
from tests.warm import python

REWARD = """
import itertools, os, time
from jax_agent_rl.rewards import register_reward

calls = itertools.count(1)

@register_reward("noise", override=True)  # a process may make several runs
def compute_score(solution_str, ground_truth):
    if os.environ.get("STALL") and next(calls) > 12:
        print("stalled", flush=True)
        time.sleep(600)
    return float(len(solution_str) % 3 == int(ground_truth))
"""


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def last_json(result: Result) -> dict:
    return json.loads(result.output.splitlines()[-1])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe; its run, two steps long, is in ``run`` beside it."""
    file = tiny_recipe(
        tmp_path_factory.mktemp("commands"), rollout={"eval_temperature": 1.0}, trainer={"steps": 2}
    )
    (file.parent / "reward.py").write_text(REWARD)  # in place of one that never stalls
    assert call("train", file).exit_code == 0
    return file


@pytest.fixture
def run(recipe: Path) -> Path:
    return recipe.parent / "run"


def sampled(folder: Path, *, step: int) -> dict[str, list[int]]:
    """Ids of the held-out trajectories after a step, by trajectory."""
    records = read_records(folder / "trajectories.jsonl")
    wanted = [r for r in records if r["split"] == "heldout" and r["step"] == step]
    return {r["trajectory_id"]: r["response_ids"] for r in wanted}


def test_eval_of_a_checkpoint_begins_with_the_samples_of_the_runs_evaluation(
    run: Path, tmp_path: Path
):
    result = call("eval", "--run", run, "-n", 2, "--out", tmp_path / "eval", "--json")
    expected = sampled(run, step=2)
    got = sampled(tmp_path / "eval", step=2)
    assert len(expected) == 3
    assert len(got) == 6
    assert {name: got[name] for name in expected} == expected
    summary = last_json(result)
    assert summary["policy_versions"] == [2]
    assert summary["temperature"] == 1.0
    assert summary == json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert [p for p in run.iterdir() if p.name.startswith("weights-")] == []


def test_the_average_that_a_run_evaluated_is_what_eval_and_export_give(tmp_path: Path):
    """``learner.ema_decay``: the same samples again; those of the last weights are others."""
    learner = {"ema_decay": 0.9, "learning_rate": 0.3}
    recipe = tiny_recipe(
        tmp_path, rollout={"eval_temperature": 1.0}, trainer={"steps": 2}, learner=learner
    )
    assert call("train", recipe).exit_code == 0
    run = tmp_path / "run"
    common = ("eval", "--run", run, "-n", 1, "--json")
    assert (
        last_json(call(*common, "--ema", "--out", tmp_path / "ema"))["policy"]
        == f"{run}, step 2, moving average"
    )
    call(*common, "--out", tmp_path / "last")
    expected = sampled(run, step=2)
    assert sampled(tmp_path / "ema", step=2) == expected != sampled(tmp_path / "last", step=2)
    folders = [tmp_path / "model"]  # the weights before training, after each step, and the average
    for options in (["--step", 1], ["--step", 2], ["--ema"]):
        folders.append(tmp_path / f"exported-{len(folders)}")
        call("export", run, folders[-1], *options)
    steps = zip(*(jax.tree.leaves(load_hf(folder)[1]) for folder in folders), strict=True)
    for base_weights, first, second, average in steps:
        wanted = (
            0.81 * np.float64(base_weights) + 0.09 * np.float64(first) + 0.1 * np.float64(second)
        )
        np.testing.assert_allclose(average, wanted, atol=1e-6)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["max_logprob_gap"] < 1e-4
    assert not summary["warnings"]


def test_eval_of_the_model_measures_what_the_run_did_before_its_first_step(
    recipe: Path, run: Path, tmp_path: Path
):
    scores = last_json(call("eval", recipe, "-n", 1, "--out", tmp_path / "eval", "--json"))[
        "scores"
    ]
    base_accuracy = json.loads((run / "summary.json").read_text())["heldout_accuracy_before"]
    assert (
        scores["noise"]["reward"]["mean"]
        == scores["noise"]["pass"]["1"]["mean"]
        == pytest.approx(base_accuracy)
    )
    assert sampled(tmp_path / "eval", step=0) == sampled(run, step=0)


def test_eval_of_a_folder_alone_is_that_of_its_recipe(recipe: Path, tmp_path: Path):
    folder = recipe.parent / "model"
    heldout = recipe.parent / "heldout.jsonl"
    keys = [
        f"reward.path={recipe.parent / 'reward.py'}",
        "rollout.max_model_len=64",
        "agent.max_prompt_length=32",
    ]
    keys += [
        "agent.tool_format=hermes",
        "agent.max_response_length=16",
        "rollout.max_in_flight=8",
        "rollout.jetstream.prefill_buckets=[32]",
    ]
    common = (
        "eval",
        "--model",
        folder,
        "--data",
        heldout,
        *keys,
        "-n",
        2,
        "--temperature",
        1,
        "--json",
    )
    alone = last_json(call(*common, "--out", tmp_path / "alone"))
    other_seed = last_json(call(*common, "seed=1", "--out", tmp_path / "other"))
    call("eval", recipe, "-n", 2, "--out", tmp_path / "recipe")
    assert sampled(tmp_path / "alone", step=0) == sampled(tmp_path / "recipe", step=0)
    assert sampled(tmp_path / "alone", step=0) != sampled(tmp_path / "other", step=0)
    assert (alone["seed"], other_seed["seed"]) == (0, 1)


def test_view_shows_what_eval_wrote(recipe: Path, tmp_path: Path):
    call("eval", recipe, "-n", 1, "--limit", 1, "--out", tmp_path / "eval")
    assert "heldout-0-0-0" in call("view", tmp_path / "eval").output


def test_rollout_collects_every_row_and_says_so_when_it_is_repeated(recipe: Path, tmp_path: Path):
    out = tmp_path / "out.parquet"
    first = last_json(call("rollout", recipe, "--out", out, "-n", 2, "--json"))
    assert (first["prompts"], first["started"], first["kept"], first["dropped"]) == (11, 22, 22, {})
    exported = pyarrow.parquet.read_table(out)
    assert exported["row"].to_pylist() == [row for row in range(11) for _ in range(2)]
    assert all(len(r["response_ids"]) == len(r["rollout_logprobs"]) == 16 or 2 in r["response_ids"]
               for r in exported.to_pylist())  # fmt: skip
    content = out.read_bytes()
    again = call("rollout", recipe, "--out", out, "-n", 2)
    assert "complete already" in again.output
    assert out.read_bytes() == content


def test_rollout_of_a_checkpoint_is_sampled_from_its_weights(run: Path, tmp_path: Path):
    call("rollout", "--run", run, "--step", 1, "--limit", 2, "-n", 1, "--out", tmp_path / "folder")
    (shard,) = (tmp_path / "folder" / "data").iterdir()
    versions = pyarrow.parquet.read_table(shard)["policy_versions"].to_pylist()
    assert {version for row in versions for version in row} == {1}


def test_doctor_is_content_with_it_and_fails_where_something_is_missing(recipe: Path):
    good = call("doctor", recipe, "--json")
    assert good.exit_code == 0
    assert last_json(good)["ok"]
    bad = call("doctor", recipe, "data.eval=missing.jsonl", "--json")
    failed = [f for f in last_json(bad)["findings"] if f["status"] == "fail"]
    assert bad.exit_code == 1
    assert [f["check"] for f in failed] == ["data.eval"]


def collected(file: Path) -> list[tuple]:
    """Everything but log-probs, whose last bits depend on which requests ran together."""
    names = (
        "row",
        "trajectory_id",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "reward",
        "messages",
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return list(map(operator.itemgetter(*names), rows))


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python(), "-m", "jax_agent_rl.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """The line that holds the word."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return line
    raise AssertionError("".join(lines))


def test_a_stopped_rollout_goes_on_to_the_same_trajectories(recipe: Path, tmp_path: Path):
    keys = ["rollout.max_in_flight=4"]
    out = tmp_path / "out.jsonl"
    process = start("rollout", recipe, *keys, "--out", out, STALL="1")
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    read_until(process, "stalled")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    watchdog.cancel()
    assert process.returncode == 130 and "what is complete is kept" in output, output
    partial_lines = (tmp_path / "out.jsonl.partial.jsonl").read_text()
    assert partial_lines.count('"row": ')
    assert not out.exists()

    result = call("rollout", recipe, *keys, "--out", out, "--json")
    summary = last_json(result)
    assert "continuing:" in result.output
    assert summary["kept"] == 44
    assert summary["started"] == 44 + sum(summary["dropped"].values())
    uninterrupted = tmp_path / "whole.jsonl"
    call("rollout", recipe, *keys, "--out", uninterrupted)
    assert collected(out) == collected(uninterrupted)


def test_a_checkpoint_is_served_to_openai_clients_until_told_to_stop(run: Path):
    process = start("serve", "--run", run, "--step", 1, "--port", 0)
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    said, _, url = read_until(process, "base_url=").strip().rpartition("base_url=")
    assert f"serving {run}, step 1 as 'policy'" in said
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "one plus two"}],
        "max_tokens": 4,
    }
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=120).json()
    assert answer["model"] == "policy"
    assert answer["usage"]["completion_tokens"] <= 4
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    watchdog.cancel()
    assert process.returncode == 0, output
    assert [p for p in run.iterdir() if p.name.startswith("weights-")] == []
