"""A real model samples what it likes, and a step trains on what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from jax_agent_rl.observe.run_dir import (
    read_trajectories,
    restore_trajectory,
)
from jax_agent_rl.trajectory_graph import session_graph
from jax_agent_rl.types import Trajectory
from tests.capabilities import needs_bwrap
from tests.harnesses.by_hand import assert_gradient_of_single_calls
from tests.harnesses.running import (
    INSTALLED,
    LIMITS,
    MODEL,
    PROGRAMS,
    ROW,
    WITH_PYTHON,
    mounts,
)
from tests.tiny_run import step_records
from tests.unit.learner.test_session_gradient import Calls

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1300), needs_bwrap, INSTALLED, WITH_PYTHON]


@pytest.mark.parametrize(
    ("argv", "prompt_length", "contexts"),
    [
        (["mini_swe_agent.sh"], 1280, 1),
        (["opencode.sh", "small"], 3072, 2),
        (["openhands.sh", "small"], 1024, 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_step_on_a_harness_with_smollm2(
    argv: list[str], prompt_length: int, contexts: int, tmp_path: Path
):
    """The prompts of the other harnesses would not fit into the model's context.

    Args:
        contexts: of each session: the task's, and that of OpenCode's title.
    """
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    longest = prompt_length + 256
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(MODEL)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "agent": {
            "default_agent": "command",
            "command": {
                "argv": ["sh", f"/tmp/agent/{argv[0]}", *argv[1:]],
                "program_dir": str(PROGRAMS),
                "mounts": mounts(),
                **LIMITS,
            },
            "run_timeout": 600,
            "max_prompt_length": prompt_length,
            "max_response_length": 256,
            "max_assistant_turns": 4,
            "max_user_turns": 4,
        },
        "rollout": {
            "prompts_per_step": 1,
            "group_size": 2,
            "max_in_flight": 2,
            "max_model_len": longest,
            "jetstream": {"max_concurrent_decodes": 2, "prefill_buckets": [128, 512]},
        },
        "learner": {"pack_length": longest},
        "algorithm": {"filter_zero_variance": False},
        "trainer": {"steps": 1, "checkpoint_every": 0, "on_disagreement": "stop"},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    result = subprocess.run(
        [sys.executable, "-m", "jax_agent_rl.cli", "train", str(config)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"XLA_FLAGS": ""},  # optimized, as a user has it
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the endpoint refused" not in result.stdout + result.stderr

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["started"], summary["trained"]) == (2, 2)
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] <= 1e-3
    (step,) = step_records(tmp_path / "run")
    assert step["trained_tokens"] > 0

    records = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    trajectories = [restore_trajectory(record) for record in records]
    for trajectory in trajectories:
        assert trajectory.metrics["lost_requests"] == 0
        assert [segment.turns for segment in session_graph(trajectory)] == [0] * contexts
    calls = [calls_of(trajectory) for trajectory in trajectories]
    assert_gradient_of_single_calls(tmp_path / "tiny", trajectories, calls)


def calls_of(trajectory: Trajectory) -> Calls:
    """Return each turn's context and what was sampled there, in ids."""
    calls = []
    for sequence in trajectory.sequences:
        context = sequence.prompt_ids
        for turn in sequence.turns:
            calls.append((context, turn.output.token_ids))
            context += turn.output.token_ids + turn.appended_ids
    return calls
