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
from tests.tiny_run import GATED_REWARD, SMALL, step_records, tiny_recipe
from tests.warm import python

SECRET = "correct horse"
ROLLOUT = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_in_flight": 8,
    "max_model_len": 64,
    "jetstream": SMALL,
}
ENVIRONMENT = os.environ | {"ROLLOUT_TOKEN": SECRET}


def run(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [*python(), *COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=ENVIRONMENT, **options
    )


@contextlib.contextmanager
def rollout_server(recipe: Path, *overrides: str) -> Iterator[str]:
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
        *overrides,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        bufsize=1,
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            match = re.search(r"serving .* on (http://\S+)", line)
            if match:
                break
        else:
            pytest.fail("".join(lines))
        yield match[1]
        process.send_signal(signal.SIGTERM)
        remaining_output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, "".join(lines) + remaining_output
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def heldout_ids(folder: Path) -> dict[str, list[int]]:
    return {
        r["trajectory_id"]: r["response_ids"] for r in read_records(folder / "trajectories.jsonl")
    }


def test_eval_on_a_rollout_server_samples_what_the_engine_here_does(recipe: Path, tmp_path: Path):
    remote_run = tmp_path / "there"
    local_run = tmp_path / "here"
    with rollout_server(recipe) as url:
        remote = [
            "rollout.backend=remote",
            f"rollout.urls=[{url}]",
            "rollout.token_env=ROLLOUT_TOKEN",
        ]
        result = run("eval", recipe, *remote, "-n", 2, "--out", remote_run)
        assert result.returncode == 0, result.stderr
        refused = run("eval", recipe, *remote, "--model", recipe.parent / "model")
        assert refused.returncode == 2
        assert "serve the weights they have" in refused.stderr
    assert run("eval", recipe, "-n", 2, "--out", local_run).returncode == 0
    assert heldout_ids(remote_run) == heldout_ids(local_run) != {}


def test_a_run_trains_with_a_rollout_server_and_the_server_passes_conformance(
    recipe: Path, small_model, tmp_path: Path
):
    weights = tmp_path / "weights"
    weights.mkdir()
    with rollout_server(recipe) as url:
        remote = [
            "rollout.backend=remote",
            f"rollout.urls=[{url}]",
            "rollout.token_env=ROLLOUT_TOKEN",
        ]
        remote.append(f"rollout.weight_dir={weights}")
        result = run("train", recipe, "trainer.steps=2", *remote)
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["steps"] == 2
        assert summary["token_drift"] == 0
        assert summary["max_logprob_gap"] <= 1e-3
        steps = step_records(tmp_path / "run")
        assert all(r["weight_update_seconds"] > 0 for r in steps)
        for record in read_records(tmp_path / "run" / "trajectories.jsonl"):
            pairs = zip(record["policy_versions"], record["response_mask"], strict=True)
            assert {v for v, sampled in pairs if sampled} == {
                record["step"] - 1 if record["split"] == "train" else record["step"]
            }
        assert not list(weights.iterdir()), "the weight files are removed"

        again = run("train", recipe, "trainer.steps=1", *remote)
        assert again.returncode == 2
        assert "restart the rollout servers" in again.stderr

        options = [
            "--backend",
            "remote",
            "--url",
            url,
            "--model",
            small_model,
            "--token-env",
            "ROLLOUT_TOKEN",
        ]
        checked = run(
            "conformance",
            *options,
            "--json",
            "--only",
            "seeds-reproduce",
            "--only",
            "weights-round-trip",
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        counts = json.loads(checked.stdout.splitlines()[-1])
        assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 0, 0)


def test_a_run_trains_with_weights_that_the_server_pulls(recipe: Path, tmp_path: Path):
    with rollout_server(recipe) as url:
        remote = [
            "rollout.backend=remote",
            f"rollout.urls=[{url}]",
            "rollout.token_env=ROLLOUT_TOKEN",
            "rollout.weight_transport=jax_transfer",
        ]
        result = run("train", recipe, "trainer.steps=2", *remote)
        assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] <= 1e-3


def test_a_server_added_by_command_takes_over_from_the_one_that_is_removed(tmp_path: Path):
    """Both servers leave the run, one at its end, and serve on; no trajectory is lost."""
    gate = tmp_path / "gate"
    folder = tmp_path / "run"
    recipe = tiny_recipe(tmp_path, rollout=ROLLOUT, trainer={"steps": 2})
    (tmp_path / "reward.py").write_text(GATED_REWARD.format(gate=str(gate)))
    with rollout_server(recipe) as first, rollout_server(recipe) as second:
        remote = [
            "rollout.backend=remote",
            f"rollout.urls=[{first}]",
            "rollout.token_env=ROLLOUT_TOKEN",
        ]
        training = subprocess.Popen(
            [*python(), *COMMAND, "train", str(recipe), "reward.timeout=600", *remote],
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            listed = run("engines", "list", folder)
            while (
                "version 0 is served by 1" not in listed.stdout
            ):  # until the first weights are there
                assert training.poll() is None, training.communicate()[0]
                listed = run("engines", "list", folder)
            refused = run("engines", "remove", folder, first)
            assert refused.returncode == 2
            assert "add another one first" in refused.stderr
            added = run("engines", "add", folder, second, "--json")
            assert added.returncode == 0, added.stderr
            engines = json.loads(added.stdout.splitlines()[-1])["engines"]
            assert {engine["name"]: engine["policy_version"] for engine in engines} == {
                first: 0,
                second: 0,
            }
            removed = run("engines", "remove", folder, first)
            assert removed.returncode == 0, removed.stderr
            gate.touch()
            said, _ = training.communicate(timeout=400)
            assert training.returncode == 0, said
        finally:
            training.kill()
            training.wait()
    last = step_records(folder)[-1]
    assert (last["servers_up"], last["servers_lost"], last["stale_served"]) == (1, 0, 0)
    assert last["accounting"]["trained"] == 2 * 8
    assert last["accounting"]["dropped"] == 0
    assert f"server {second} joined, with weights of version 0" in said
    assert f"server {first} left" in said
