"""A run whose engine is a server of its own: weights go out as files, ids come back over HTTP."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.e2e.test_run import COMMAND
from tests.warm import python

SECRET = "correct horse"
ENVIRONMENT = os.environ | {"ROLLOUT_TOKEN": SECRET}


def run(*arguments: object, **more) -> subprocess.CompletedProcess[str]:
    command = [*python(), *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENVIRONMENT, **more)


@contextlib.contextmanager
def rollout_server(recipe: Path) -> Iterator[str]:
    """Address of a server that runs meanwhile; it must end cleanly on SIGTERM."""
    command = [
        *python(),
        *COMMAND,
        "rollout-server",
        "--config",
        str(recipe),
        "--port",
        "0",
        "rollout.token_env=ROLLOUT_TOKEN",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, bufsize=1
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"serving .* on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(lines))
        yield match[1]
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0, "".join(lines) + rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def heldout_ids(folder: Path) -> dict[str, list[int]]:
    return {r["trajectory_id"]: r["response_ids"] for r in read_records(folder / "trajectories.jsonl")}


def test_eval_on_a_rollout_server_samples_what_the_engine_here_does(recipe: Path, tmp_path: Path):
    there, here = tmp_path / "there", tmp_path / "here"
    with rollout_server(recipe) as url:
        remote = ["rollout.backend=remote", f"rollout.urls=[{url}]", "rollout.token_env=ROLLOUT_TOKEN"]
        result = run("eval", recipe, *remote, "-n", 2, "--out", there)
        assert result.returncode == 0, result.stderr
        refused = run("eval", recipe, *remote, "--model", recipe.parent / "model")
        assert refused.returncode == 2 and "serve the weights they have" in refused.stderr
    assert run("eval", recipe, "-n", 2, "--out", here).returncode == 0
    assert heldout_ids(there) == heldout_ids(here) != {}


def test_a_run_trains_with_a_rollout_server_and_the_server_passes_conformance(
    recipe: Path, small_model, tmp_path: Path
):
    (weights := tmp_path / "weights").mkdir()
    with rollout_server(recipe) as url:
        remote = ["rollout.backend=remote", f"rollout.urls=[{url}]", "rollout.token_env=ROLLOUT_TOKEN"]
        remote.append(f"rollout.weight_dir={weights}")
        result = run("train", recipe, "trainer.steps=2", *remote)
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["steps"] == 2 and summary["token_drift"] == 0 and summary["max_logprob_gap"] <= 1e-3
        steps = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"]
        assert all(r["weight_update_seconds"] > 0 for r in steps)
        for record in read_records(tmp_path / "run" / "trajectories.jsonl"):
            pairs = zip(record["policy_versions"], record["response_mask"], strict=True)
            assert {v for v, sampled in pairs if sampled} == {
                record["step"] - 1 if record["split"] == "train" else record["step"]
            }
        assert not list(weights.iterdir()), "the weight files are removed"

        again = run("train", recipe, "trainer.steps=1", *remote)
        assert again.returncode == 2 and "restart the rollout servers" in again.stderr

        options = ["--backend", "remote", "--url", url, "--model", small_model, "--token-env", "ROLLOUT_TOKEN"]
        checked = run("conformance", *options, "--json", "--only", "seeds-reproduce", "--only", "weights-round-trip")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        counts = json.loads(checked.stdout.splitlines()[-1])
        assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 0, 0)
