"""A real model samples what it likes, and a step trains on what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.capabilities import needs_bwrap
from tests.harnesses.running import INSTALLED, LIMITS, MODEL, PROGRAMS, ROW, WITH_PYTHON, mounts
from tests.tiny_run import step_records

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1300), needs_bwrap, INSTALLED, WITH_PYTHON]


def test_a_step_on_mini_swe_agent_with_smollm2(tmp_path: Path):
    """Its prompt takes an eighth of the model's context; those of Codex and Claude Code would not
    fit.
    """
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(MODEL)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "agent": {
            "default_agent": "command",
            "command": {
                "argv": ["sh", "/tmp/agent/mini_swe_agent.sh"],
                "program_dir": str(PROGRAMS),
                "mounts": mounts(),
                **LIMITS,
            },
            "run_timeout": 600,
            "max_prompt_length": 1280,
            "max_response_length": 256,
            "max_assistant_turns": 3,
            "max_user_turns": 3,
        },
        "rollout": {
            "prompts_per_step": 1,
            "group_size": 2,
            "max_in_flight": 2,
            "max_model_len": 1536,
            "jetstream": {"max_concurrent_decodes": 2, "prefill_buckets": [128, 512]},
        },
        "learner": {"pack_length": 1536},
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
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["started"], summary["trained"]) == (2, 2)
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] <= 1e-3
    (step,) = step_records(tmp_path / "run")
    assert step["trained_tokens"] > 0
