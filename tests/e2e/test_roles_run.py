"""Runs of an agent with two roles: adapters of their own, a frozen model, resumed, evaluated, in
every trainer.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_run import PAIR_AGENT, step_records, tiny_recipe
from tests.warm import python

ADAPTERS = {"role_adapters": {"solver": "one", "checker": "two"}}
LORA = {"pack_length": 64, "learning_rate": 1e-2, "lora": {"rank": 2}}


def recipe(folder: Path, *, agent=None, **sections) -> Path:
    folder.mkdir(parents=True)
    (folder / "agent.py").write_text(PAIR_AGENT)
    agent_keys = {
        "module": str(folder / "agent.py"),
        "default_agent": "pair_of_noise",
        "tool_format": "hermes",
    }
    limits = {"max_prompt_length": 32, "max_response_length": 16}
    return tiny_recipe(folder, agent={**agent_keys, **limits, **(agent or {})}, **sections)


def command(*arguments: object) -> str:
    line = [*python(), "-m", "jax_agent_rl.cli", *map(str, arguments)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_a_run_of_two_adapters_resumes_is_evaluated_and_exported(tmp_path: Path):
    file = recipe(tmp_path / "pair", agent=ADAPTERS, learner=LORA)
    run = tmp_path / "pair" / "run"
    command("train", file, "trainer.steps=2")
    command("train", file, "trainer.steps=4", "--resume")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["started"] == summary["trained"] == 4 * 2 * 4 * 2
    assert summary["token_drift"] == summary["recompilations_after_warmup"] == 0
    assert summary["max_logprob_gap"] <= 1e-3, (
        "engine and learner have the same adapters, also after the restart"
    )
    records = read_records(run / "trajectories.jsonl")
    assert {(r["role"], r["adapter"]) for r in records} == {("solver", "one"), ("checker", "two")}
    line = step_records(run)[-1]
    rewards = [
        r["reward"]
        for r in records
        if r["step"] == 4 and r["split"] == "train" and r["role"] == "checker"
    ]
    assert line["role/checker/reward_mean"] == np.mean(rewards)
    assert line["role/checker/trajectories"] == 8
    assert line["adapter/two/trained_tokens"] > 0

    command("export", run, tmp_path / "out", "--adapter")
    first_adapter, second_adapter = (
        load_file(tmp_path / "out" / name / "adapter_model.safetensors") for name in ("one", "two")
    )
    assert first_adapter.keys() == second_adapter.keys()
    assert any(np.any(first_adapter[key] != second_adapter[key]) for key in first_adapter)
    command("eval", "--run", run, "-n", 1, "--out", tmp_path / "eval")
    scores = json.loads((tmp_path / "eval" / "summary.json").read_text())["scores"]
    assert scores.keys() == {"noise/solver", "noise/checker", "all"}
    sampled = {
        r["trajectory_id"]: r["response_ids"]
        for r in read_records(tmp_path / "eval" / "trajectories.jsonl")
    }
    last = {
        r["trajectory_id"]: r["response_ids"]
        for r in records
        if r["split"] == "heldout" and r["step"] == 4
    }
    assert last and {name: sampled[name] for name in last} == last, (
        "with the adapters of the checkpoint"
    )


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_frozen_role_is_on_record_and_not_trained(mode: str, tmp_path: Path):
    model = tmp_path / "tiny" / "model"
    file = recipe(
        tmp_path / "tiny",
        agent={"role_models": {"checker": str(model)}},
        trainer={"mode": mode, "steps": 2},
    )
    command("train", file, "algorithm.adv_estimator=rae")
    run = tmp_path / "tiny" / "run"
    summary = json.loads((run / "summary.json").read_text())
    lines = step_records(run)
    records = [r for r in read_records(run / "trajectories.jsonl") if r["split"] == "train"]
    assert summary["trained"] == 2 * 2 * 4
    assert summary["token_drift"] == 0
    assert (
        [r["role"] for r in records].count("solver")
        == [r["role"] for r in records].count("checker")
        == 16
    )
    for record in records:
        assert ("advantages" in record) == (record["role"] == "solver"), (
            "a frozen role has no advantage"
        )
        if record["role"] == "checker":
            assert set(record["policy_versions"]) == {0}
    assert all(line["role/checker/trajectories"] == 8 for line in lines)
    if mode == "sync":
        command("diagnose", run)  # fails if it compares the frozen role with the learner
