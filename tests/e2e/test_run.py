"""Runs as a user starts them: what is left in the folder, resuming, interrupting, reproducing, bad
input.
"""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_run import step_records
from tests.warm import python

COMMAND = ["-m", "jax_agent_rl.cli"]


def run(*arguments: object, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), *COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )


def same_trajectories(a: Path, b: Path, *, splits: Sequence[str] = ("train", "heldout")) -> bool:
    """Equal but for wall times, and for the rounding of log-probs: what is decoded side by side
    depends on the time.
    """

    def comparable(folder: Path) -> tuple[list[dict], list[list[float]]]:
        records = [r for r in read_records(folder / "trajectories.jsonl") if r["split"] in splits]
        logprobs = []
        for record in records:
            logprobs.append(record.pop("rollout_logprobs"))
            for timed in ("metrics", "turns"):
                record.pop(timed, None)
        return records, logprobs

    exact_a, logprobs_a = comparable(a)
    exact_b, logprobs_b = comparable(b)
    if not exact_a or exact_a != exact_b:
        return False
    return all(np.allclose(x, y, atol=1e-4) for x, y in zip(logprobs_a, logprobs_b, strict=True))


def test_a_run_leaves_a_complete_folder_and_can_be_viewed_and_exported(
    recipe: Path, tmp_path: Path
):
    result = run("train", recipe, "trainer.steps=2")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["token_drift"] == 0
    assert summary["recompilations_after_warmup"] == 0
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values()) == 8
    assert summary["max_logprob_gap"] <= 1e-3
    assert {
        "heldout_accuracy_before",
        "heldout_accuracy_after",
        "train_seconds",
        "warnings",
    } <= summary.keys()
    steps = step_records(folder)
    assert len(steps) == 2
    assert all(r["weight_update_seconds"] > 0 for r in steps)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_text())["trainer"]["steps"] == 2
    assert "held-out accuracy" in result.stdout
    assert "report.html" in result.stdout
    assert "every reward is the same: step " in result.stdout
    assert "  assistant  " in result.stdout
    for record in read_records(folder / "trajectories.jsonl"):
        count = len(record["response_ids"])
        assert len(record["response_mask"]) == len(record["rollout_logprobs"]) == count
        versions = [
            v
            for v, sampled in zip(record["policy_versions"], record["response_mask"], strict=True)
            if sampled
        ]
        assert set(versions) == {
            record["step"] - 1 if record["split"] == "train" else record["step"]
        }

    viewed = run("view", folder, "--sort", "worst", "--limit", "1", "--whole-prompt")
    assert viewed.returncode == 0
    assert "What is 23 plus 45?" in viewed.stdout

    exported = run("export", folder, tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template


def test_stopping_and_resuming_gives_the_trajectories_of_an_uninterrupted_run(
    recipe: Path, tmp_path: Path
):
    uninterrupted = tmp_path / "whole"
    interrupted = tmp_path / "halves"
    assert run("train", recipe, f"run_dir={uninterrupted}").returncode == 0
    assert run("train", recipe, f"run_dir={interrupted}", "trainer.steps=2").returncode == 0
    resumed = run("train", recipe, f"run_dir={interrupted}", "--resume")
    assert resumed.returncode == 0
    assert "resumed after step 2" in resumed.stdout
    trained = [r["step"] for r in step_records(interrupted)]
    assert trained == [1, 2, 3, 4]
    assert same_trajectories(
        interrupted, uninterrupted, splits=["train"]
    )  # what is evaluated, and when, differs


def test_the_same_seed_gives_the_same_trajectories_and_another_does_not(
    recipe: Path, tmp_path: Path
):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert (
            run(
                "train", recipe, f"run_dir={tmp_path / name}", f"seed={seed}", "trainer.steps=1"
            ).returncode
            == 0
        )
    assert same_trajectories(tmp_path / "a", tmp_path / "b")
    assert not same_trajectories(tmp_path / "a", tmp_path / "c")


def test_ctrl_c_leaves_a_checkpoint_that_resumes(recipe: Path, tmp_path: Path):
    command = [
        *python(),
        *COMMAND,
        "train",
        str(recipe),
        "trainer.steps=400",
        "trainer.checkpoint_every=0",
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["3/400"]:
            process.send_signal(signal.SIGINT)
            break
    output = process.stdout.read()
    assert process.wait() == 130, output
    watchdog.cancel()
    assert "--resume" in output
    assert "Traceback" not in output
    saved = re.search(r"a checkpoint of step (\d+) is saved", output)
    assert saved, output
    resumed = run("train", recipe, f"trainer.steps={int(saved[1]) + 3}", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumed after step {saved[1]}" in resumed.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lr=1", "unknown key"),
        ("model.path=/nowhere", "no model at '/nowhere'"),
        ("data.train=/nowhere.jsonl", "dataset file '/nowhere.jsonl' does not exist"),
        ("agent.default_agent=tool_agnet", "did you mean 'tool_agent'?"),
        ("tools.function_tool_path=/nowhere.py", "/nowhere.py"),
        ("learner.mesh.data=64", "64"),
    ],
)
def test_bad_input_is_one_message_and_no_traceback(recipe: Path, override: str, message: str):
    result = run("train", recipe, override)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_row_of_an_unknown_agent_is_found_before_anything_runs(recipe: Path, tmp_path: Path):
    rows = (tmp_path / "data" / "train.jsonl").read_text().replace("tool_agent", "tool_agnet", 1)
    (tmp_path / "typo.jsonl").write_text(rows)
    result = run("train", recipe, f"data.train={tmp_path / 'typo.jsonl'}")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    said = " ".join(result.stderr.split())
    assert "line 1: agent_name 'tool_agnet' is not known; did you mean 'tool_agent'?" in said


def test_prompts_over_the_budget_are_dropped_with_their_reason(recipe: Path, tmp_path: Path):
    # Three batches are lost: the step's, and the held-out ones before and after it.
    settings = ("agent.max_prompt_length=20", "trainer.max_failed_batches=4")
    result = run("train", recipe, *settings, "trainer.steps=1", "trainer.checkpoint_every=0")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["dropped"] == {"prompt_too_long": 4}
    assert summary["started"] == 4
    assert "agent.max_prompt_length=20" in result.stderr
