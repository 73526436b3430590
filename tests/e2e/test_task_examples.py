"""Each example prepares its data and trains two steps, on a model of random weights with the real tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=4",
    "rollout.jetstream.max_concurrent_decodes=4",
    "rollout.jetstream.prefill_buckets=[64, 256]",
    "algorithm.filter_zero_variance=false",  # a random model earns nothing: without the filter the learner still runs
    "trainer.steps=2",
]
EXAMPLES = {
    "gsm8k_tool": ([], None, []),
    "reasoning_gym": (["--train", "8", "--heldout", "2"], "reasoning_gym", ["agent.max_response_length=16"]),
    "textworld": (["--train", "2", "--heldout", "1"], "textworld", ["agent.max_response_length=300"]),
}


def run(*command, cwd=ROOT):
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, small_model: Path):
    options, package, overrides = EXAMPLES[name]
    if package is not None:
        pytest.importorskip(package)
    run(f"examples/{name}/prepare.py", "--out", tmp_path / "data", *options)
    data = [f"data.{part}={tmp_path / 'data' / part}.jsonl" for part in ("train", "heldout")]
    where = [f"run_dir={tmp_path / 'run'}", f"model.path={small_model}", *data]
    run("-m", "jax_agent_rl.cli", "train", f"examples/{name}/config.yaml", *where, *SMALL, *overrides)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["trained"] == summary["started"] == 8
    assert summary["token_drift"] == 0 and summary["recompilations_after_warmup"] == 0
    assert summary["max_logprob_gap"] <= 1e-3


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_examples_script_says_what_it_would_do(name: str):
    script = ROOT / "examples" / name / "run.sh"
    result = subprocess.run(["bash", script, "--dry-run", "seed=1"], capture_output=True, text=True, check=True)
    assert f"examples/{name}/prepare.py" in result.stdout
    assert result.stdout.rstrip().endswith(f"train examples/{name}/config.yaml seed=1")
