"""The examples as their READMEs start them, on a model of random weights: the run is whole and
exact.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.data.tasks import prepare_calculator
from jax_agent_rl.observe.run_dir import read_records
from tests.capabilities import needs_bwrap
from tests.ports import free_port
from tests.warm import python

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytest.importorskip("langgraph")

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "jax_agent_rl.cli"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=4",
    "rollout.jetstream.max_concurrent_decodes=4",
    "rollout.jetstream.prefill_buckets=[64, 256]",
    "agent.max_prompt_length=288",
    "agent.max_response_length=24",
    "algorithm.filter_zero_variance=false",
    "learner.pack_length=384",
    "data.eval_limit=2",
    "trainer.steps=2",
]


@pytest.mark.parametrize("name", ["langgraph_agent", "openai_agent"])
def test_an_example_trains_with_every_trajectory_accounted_for(
    name: str, small_model: Path, tmp_path: Path
):
    config = ROOT / "examples" / name / "config.yaml"
    agent = yaml.safe_load(config.read_text())["agent"]["default_agent"]
    train, heldout = prepare_calculator(tmp_path / "data", train=24, heldout=4, agent_name=agent)
    paths = [f"run_dir={tmp_path / 'run'}", f"model.path={small_model}", f"data.train={train}"]
    command = [*python(), *COMMAND, "train", str(config), *paths, f"data.eval={heldout}", *SMALL]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=ROOT, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["started"] == summary["trained"] == 8
    assert summary["dropped"] == {}
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] <= 1e-3
    assert {r["agent_name"] for r in read_records(tmp_path / "run" / "trajectories.jsonl")} == {
        agent
    }


@needs_bwrap
@pytest.mark.parametrize(
    ("example", "size", "tests"),
    [
        ("terminal_tasks", ["--train", "6", "--heldout", "2"], "test_state.py"),
        ("swe_mini", [], "test_solution.py"),
    ],
)
def test_a_program_in_the_sandbox_trains_on_task_folders(
    example: str, size: list[str], tests: str, small_model: Path, tmp_path: Path
):
    folder = ROOT / "examples" / example
    prepare = [*python(), str(folder / "prepare.py"), "--out", str(tmp_path), *size]
    subprocess.run(prepare, check=True, timeout=300, cwd=ROOT, env=ENVIRONMENT)
    settings = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={small_model}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'heldout.jsonl'}",
        "data.eval_limit=2",
        *SMALL,
        "trainer.steps=1",
        "agent.max_prompt_length=400",
        "rollout.max_model_len=448",
        "learner.pack_length=512",
    ]
    result = subprocess.run(
        [*python(), *COMMAND, "train", str(folder / "config.yaml"), *settings],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["started"] == summary["trained"] == 4
    assert summary["token_drift"] == 0
    for record in read_records(tmp_path / "run" / "trajectories.jsonl"):
        assert tests in record["row"]["extra_info"]["agent_output"]["verifier"]


def test_serve_answers_an_openai_client_until_it_is_told_to_stop(small_model: Path):
    port = free_port()
    config = ROOT / "examples" / "openai_agent" / "config.yaml"
    command = [
        *python(),
        *COMMAND,
        "serve",
        str(config),
        f"model.path={small_model}",
        *SMALL,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--token-env", "SERVE_KEY"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1", "SERVE_KEY": "k"},
    )
    watchdog = threading.Timer(250, process.kill)
    watchdog.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "base_url=" in line:
            break
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="k") as client:
        messages = [{"role": "user", "content": "hello"}]
        answers = [
            client.chat.completions.create(
                model="policy", messages=messages, max_tokens=8, temperature=1.0, seed=seed
            )
            for seed in (1, 1, 2)
        ]
        texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1] != texts[2], lines
    with (
        openai.OpenAI(base_url=url, api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait() == 0, output
    watchdog.cancel()


def test_serve_says_what_to_do_about_an_open_address(small_model: Path):
    config = ROOT / "examples" / "openai_agent" / "config.yaml"
    command = [
        *python(),
        *COMMAND,
        "serve",
        str(config),
        f"model.path={small_model}",
        "--host",
        "0.0.0.0",
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=ROOT, env=ENVIRONMENT
    )
    assert result.returncode == 2
    assert "--token-env" in result.stderr
    assert "Traceback" not in result.stderr
