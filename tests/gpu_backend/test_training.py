"""The calculator's task trained with vLLM, not the embedded engine: only the config differs."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpu_backend import broadcast
from jax_agent_rl.config import load
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.runtime.train import train

VLLM = ("rollout.backend=vllm", "rollout.jetstream={}")


@pytest.mark.parametrize(
    "placed",
    [
        ["placement=colocated"],
        ["placement=separate"],
        ["placement=separate", "weight_transport=broadcast"],
    ],
    ids=" ".join,
)
def test_a_run_needs_only_another_backend(
    recipe: Path, tmp_path: Path, placed: list[str], monkeypatch: pytest.MonkeyPatch
):
    broadcasts: list[broadcast.Announcement] = []
    sending = broadcast.sending

    @contextlib.asynccontextmanager
    async def noted(update: WeightUpdate, **options: Any) -> AsyncIterator[WeightUpdate]:
        async with sending(update, **options) as announced:
            broadcasts.append(announced.payload)
            yield announced

    monkeypatch.setattr(broadcast, "sending", noted)
    config = load(recipe, [*VLLM, "trainer.steps=2", *(f"rollout.{setting}" for setting in placed)])
    summary = asyncio.run(train(config, resume=False, console=Console(quiet=True)))
    assert summary["trained"] == summary["started"] == 8
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] < 1e-3
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(step["weight_update_seconds"] > 0 for step in steps if step["kind"] == "step")
    assert len(list((tmp_path / "run").rglob("vllm.log"))) == 1
    versions = 3  # that of the beginning, and one a step
    assert len(broadcasts) == (versions if "weight_transport=broadcast" in placed else 0)
    assert all(
        announcement.backend == "gloo" and "model.norm.weight" in announcement.tensors
        for announcement in broadcasts
    )


def test_eval_needs_only_another_backend(recipe: Path, tmp_path: Path):
    command = [sys.executable, "-m", "jax_agent_rl.cli", "eval", str(recipe), *VLLM, "-n", "2"]
    process = subprocess.run(
        [
            *command,
            "--data",
            load(recipe).data.train[0].path,
            "--out",
            str(tmp_path / "out"),
            "--json",
        ],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    (score,) = json.loads(process.stdout.splitlines()[-1])["scores"].values()
    lines = (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    assert score["samples"] == 2 * score["prompts"] == len(lines)
    assert not score["lost"]
    assert all(json.loads(line)["response_ids"] for line in lines)
