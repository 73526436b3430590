"""Each example prepares its data and trains: on random weights, or on the real model where it is to
call tools.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.capabilities import needs_bwrap
from tests.warm import python

ROOT = Path(__file__).parents[2]

SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=4",
    "rollout.jetstream.max_concurrent_decodes=4",
    "rollout.jetstream.prefill_buckets=[64, 256]",
    # A random model earns nothing: without the filter the learner still runs.
    "algorithm.filter_zero_variance=false",
    "trainer.steps=2",
]
EXAMPLES = {
    "gsm8k_tool": (["--source", "examples/gsm8k_tool/sample.jsonl"], None, []),
    "reasoning_gym": (
        ["--train", "8", "--heldout", "2"],
        "reasoning_gym",
        ["agent.max_response_length=16"],
    ),
    "textworld": (
        ["--train", "2", "--heldout", "1"],
        "textworld",
        ["agent.max_response_length=300"],
    ),
    "simulated_user": (["--train", "6", "--heldout", "2"], None, []),
    "kuhn_poker": (["--train", "6", "--heldout", "2"], None, []),
    "solver_checker": (["--train", "4", "--heldout", "2"], None, ["learner.lora.rank=4"]),
}

# Settings of the server, the key of its address, the path there, and how the run's calls are named.
WITH_TOOL_SERVER = {
    "search_agent": (
        ["tools=[search]", "search.corpus={data}/corpus.jsonl"],
        "search.server_url",
        "/retrieve",
        "search",
    ),
    "python_agent": (["tools=[python]"], "tool_config.server_url", "", "tool"),
    "sql_agent": (
        ["tools=[sql]", "sql.databases={data}/databases"],
        "agent.tool_server_url",
        "/get_observation",
        "tool_server",
    ),
}

RARELY_RIGHT = ("sql_agent",)
"""One answer of eight at first: eight trajectories may all be wrong."""


def run(*command, cwd=ROOT, **variables):
    result = subprocess.run(
        [*python(), *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=550,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, small_model: Path):
    options, package, overrides = EXAMPLES[name]
    if package is not None:
        pytest.importorskip(package)
    run(f"examples/{name}/prepare.py", "--out", tmp_path / "data", *options)
    data = [
        f"data.{key}={tmp_path / 'data' / part}.jsonl"
        for key, part in (("train", "train"), ("eval", "heldout"))
    ]
    where = [f"run_dir={tmp_path / 'run'}", f"model.path={small_model}", *data]
    run(
        "-m",
        "jax_agent_rl.cli",
        "train",
        f"examples/{name}/config.yaml",
        *where,
        *SMALL,
        *overrides,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["trained"] == summary["started"]
    assert summary["started"] >= 8  # more with roles: a trajectory of each that took a turn
    assert summary["token_drift"] == 0
    assert summary["recompilations_after_warmup"] == 0
    assert summary["max_logprob_gap"] <= 1e-3


@needs_bwrap
@pytest.mark.parametrize("name", WITH_TOOL_SERVER)
def test_an_example_with_a_tool_server_calls_it_and_learns_from_it(name: str, tmp_path: Path):
    of_server, key, path, call_name = WITH_TOOL_SERVER[name]
    run(f"examples/{name}/prepare.py", "--out", tmp_path / "data", "--train", "8", "--heldout", "2")
    where = [
        f"run_dir={tmp_path / 'run'}",
        f"data.train={tmp_path / 'data' / 'train.jsonl'}",
        "data.eval=null",
    ]
    sizes = [
        "rollout.group_size=4",
        "rollout.max_in_flight=8",
        "rollout.jetstream.max_concurrent_decodes=8",
    ]
    with tool_server(*(setting.format(data=tmp_path / "data") for setting in of_server)) as url:
        settings = [
            f"examples/{name}/config.yaml",
            *where,
            *SMALL,
            *sizes,
            "trainer.steps=1",
            f"{key}={url}{path}",
        ]
        run(
            "-m", "jax_agent_rl.cli", "train", *settings, XLA_FLAGS=""
        )  # optimized: it computes more than it compiles
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trained"] == summary["started"] == 8
    assert summary["token_drift"] == 0
    records = read_records(tmp_path / "run" / "trajectories.jsonl")
    calls = [call for record in records for turn in record["turns"] for call in turn["tool_calls"]]
    good = [call for call in calls if call["error"] is None]
    assert good
    assert {call["name"] for call in good} == {call_name}
    if name not in RARELY_RIGHT:
        assert any(record["reward"] for record in records), (
            "the model answers some of these questions from the start"
        )


@contextmanager
def tool_server(*settings: str) -> Iterator[str]:
    """A tool server of its own; yields its address."""
    command = [*python(), "-m", "jax_agent_rl.cli", "tool-server", "port=0", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        try:
            yield first.split(" on ")[1].split(": ")[0]
        finally:
            process.terminate()
            process.stdout.read()
    assert process.returncode == 0


@pytest.mark.parametrize("name", [*EXAMPLES, *WITH_TOOL_SERVER])
def test_an_examples_script_says_what_it_would_do(name: str):
    script = ROOT / "examples" / name / "run.sh"
    result = subprocess.run(
        ["bash", script, "--dry-run", "seed=1"], capture_output=True, text=True, check=True
    )
    assert f"examples/{name}/prepare.py" in result.stdout
    last = result.stdout.rstrip().splitlines()[-1]
    assert f"train examples/{name}/config.yaml " in last
    assert last.endswith(" seed=1")
    assert ("tool-server" in result.stdout) == (name in WITH_TOOL_SERVER)
