"""Whole runs whose engine has a fault: they stop before they learn from it, and their folder says
why.
"""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.config import load
from jax_agent_rl.errors import CheckpointError, DisagreementError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models.config import Rope
from jax_agent_rl.runtime.diagnosis import diagnose_run
from jax_agent_rl.runtime.train import train
from tests.messages import raises
from tests.tiny_run import SMALL, step_records, tiny_recipe


def run(recipe: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    console = Console(file=screen, width=300)
    try:
        return (
            asyncio.run(train(load(recipe, list(overrides)), resume=False, console=console)),
            screen.getvalue(),
        )
    except DisagreementError as error:
        return {"error": str(error)}, screen.getvalue()


def diagnosed(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diagnose", str(folder), *options])
    return result.exit_code, result.output


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines rotate by another base than the model's."""
    original_init = JetStreamBackend.__init__

    def otherwise(self: JetStreamBackend, config: Any, *args: Any, **options: Any) -> None:
        original_init(self, replace(config, rope=Rope(theta=5e5)), *args, **options)

    monkeypatch.setattr(JetStreamBackend, "__init__", otherwise)


def test_a_faulty_run_stops_before_its_first_update_with_a_diagnosis(tmp_path: Path, faulty: None):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL}, trainer={"steps": 2})
    ended, screen = run(recipe)
    assert "=> rotary settings: the engine rotates by theta=5e+05" in ended["error"]
    assert "layer 0 is the first that differs" in screen
    assert "tensors of the engine are the learner's" in screen
    folder = tmp_path / "run"
    assert not step_records(folder)
    assert (
        json.loads((folder / "disagreement.json").read_text())["diagnosis"]["cause"]
        == "rotary settings"
    )
    code, output = diagnosed(folder, "--json")
    assert code == 1
    assert "=> rotary settings: the engine rotates by theta=5e+05" in output
    assert json.loads(output.splitlines()[-1])["diagnosis"]["cause"] == "rotary settings"


def test_a_warned_run_goes_on_and_its_diagnosis_counts_as_no_recompilation(
    tmp_path: Path, faulty: None
):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL}, trainer={"steps": 3})
    summary, screen = run(recipe, "trainer.on_disagreement=warn")
    assert summary["steps"] == 3
    assert summary["recompilations_after_warmup"] == 0
    assert screen.count("=> rotary settings") == 1, "it is diagnosed once, and said in every step"
    assert screen.count("engine and learner disagree about the weights") == 3


def test_a_healthy_run_agrees_in_every_step_and_so_does_its_folder(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL}, trainer={"steps": 3})
    summary, _ = run(recipe)
    steps = step_records(tmp_path / "run")
    assert summary["steps"] == 3
    assert all(step["compared_tokens"] > 0 for step in steps)
    assert max(step["compared_gap_max"] for step in steps) < 1e-4
    for options in ((), ("--version", "0")):
        code, output = diagnosed(tmp_path / "run", *options)
        assert code == 0 and "engine and learner agree about the weights of version" in output, (
            output
        )
    with raises(CheckpointError, value="nothing to compare"):
        diagnose_run(tmp_path / "run", version=7)


def test_tokens_one_version_old_are_compared_with_that_version(tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path, rollout={"jetstream": SMALL}, trainer={"steps": 5, "mode": "one_step_off"}
    )
    summary, screen = run(recipe)
    steps = step_records(tmp_path / "run")
    assert [step["compared_age"] for step in steps] == [0, 1, 1, 1, 1]
    assert all(step["compared_tokens"] > 0 and step["compared_gap_max"] < 5e-4 for step in steps), (
        steps
    )
    assert (summary["steps_compared"], summary["steps_not_compared"]) == (5, 0)
    assert summary["recompilations_after_warmup"] == 0
    assert "were compared in" not in screen


def test_an_engine_that_keeps_its_first_weights_stops_an_asynchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    update = JetStreamBackend.update_weights

    first_payloads: dict[JetStreamBackend, Any] = {}

    async def keep_weights(self: JetStreamBackend, change: Any) -> None:
        if self not in first_payloads:
            first_payloads[self] = jax.tree.map(jnp.copy, change.payload)
        payload = jax.tree.map(jnp.copy, first_payloads[self])
        await update(self, replace(change, payload=payload, probe=None))

    monkeypatch.setattr(JetStreamBackend, "update_weights", keep_weights)
    recipe = tiny_recipe(
        tmp_path,
        rollout={"jetstream": SMALL},
        trainer={"steps": 8, "mode": "one_step_off"},
        learner={"pack_length": 64, "learning_rate": 1e-2},
    )
    ended, screen = run(recipe)
    assert "Nothing was learned from this step" in ended["error"], screen
    assert "=> stale weights" in ended["error"] or "still that of" in ended["error"], ended["error"]


def test_steps_that_cannot_be_compared_are_counted_warned_of_and_reported(tmp_path: Path):
    """Two updates a step cannot be undone."""
    recipe = tiny_recipe(
        tmp_path,
        rollout={"jetstream": SMALL},
        learner={"pack_length": 64, "learning_rate": 1e-3, "ppo_epochs": 2},
        trainer={"steps": 7, "mode": "one_step_off"},
    )
    summary, screen = run(recipe)
    steps = step_records(tmp_path / "run")
    assert [step["compared_tokens"] > 0 for step in steps] == [True, *[False] * 6]
    assert (summary["steps_compared"], summary["steps_not_compared"]) == (1, 6)
    assert "engine and learner were compared in 1 of 7 steps" in screen
    assert "agreement_unchecked" in screen
    assert "agreement_unchecked" in [warning["name"] for warning in summary["warnings"]]
