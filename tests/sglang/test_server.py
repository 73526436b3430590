"""Training and weights with a real server of SGLang; tests/conformance runs the suite on one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gpu_backend.sglang.backend import SglangBackend
from gpu_backend.sglang.settings import SglangSettings
from jax_agent_rl.config import load
from jax_agent_rl.errors import EngineDiedError, WeightUpdateError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.runtime.train import train
from jax_agent_rl.runtime.transports import FileTransport
from tests.gpu_backend.conftest import (
    MAX_MODEL_LEN,
    PROBE,
    SMALL,
    Reference,
    prompt_of,
    request,
    small_params,
    to_text,
)
from tests.messages import raises
from tests.sglang.conftest import PYTHON

ROUNDING = 1e-4
"""Largest difference of log-probs between two computations in float32, in nats."""


def test_a_run_needs_only_another_backend(recipe: Path, tmp_path: Path):
    overrides = ["rollout.backend=sglang", "rollout.jetstream={}", "trainer.steps=2"]
    config = load(recipe, [*overrides, f"rollout.sglang.python={PYTHON}"])
    summary = asyncio.run(train(config, resume=False, console=Console(quiet=True)))
    assert summary["trained"] == summary["started"] == 8
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] < 1e-3
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert all(step["weight_update_seconds"] > 0 for step in steps if step["kind"] == "step")
    assert (tmp_path / "run" / "sglang.log").is_file()


async def test_weights_are_those_of_the_learner_or_none_are_served(
    model_folder: Path, tmp_path: Path
):
    """One server: its log-probs are those of transformers for each weights, and wrong weights are
    noticed.
    """
    files = FileTransport(SMALL, probe_ids=PROBE, folder=tmp_path)
    settings = SglangSettings(
        model=str(model_folder),
        vocab_size=SMALL.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        max_running_requests=8,
        python=PYTHON,
        log_file=str(tmp_path / "sglang.log"),
    )
    backend = SglangBackend(settings, version=1, decode_text=to_text)
    await backend.start()
    try:
        differences = []
        prompt = prompt_of(1, 30)
        for seed in (1, 2):
            update = files.write(small_params(seed), backend.policy_version + 1)
            await backend.update_weights(update)
            folder = tmp_path / f"reference-{seed}"
            save_hf(folder, SMALL, small_params(seed))
            reference = Reference(folder)
            for temperature in (0.0, 0.7, 1.0):
                output = await backend.generate(
                    request(f"{seed}-{temperature}", prompt, max_tokens=40, temperature=temperature)
                )
                expected = reference.logprobs(prompt, output.token_ids, temperature or 1.0)
                differences.append(np.abs(expected - output.log_probs).max())
                if temperature == 0:
                    assert list(output.token_ids) == reference.greedy(prompt, 40)
        assert max(differences) < ROUNDING
        print(f"largest difference to transformers: {max(differences):.2e} nats")

        # Right files with the log-probs of others.
        update = files.write(small_params(3), backend.policy_version + 1)
        right_probe = update.probe
        other = files.write(small_params(4), backend.policy_version + 1)
        with raises(WeightUpdateError, key="rollout.sglang.max_logprob_difference"):
            await backend.update_weights(replace(other, probe=right_probe))
        with pytest.raises(EngineDiedError):
            await backend.generate(request("refused", prompt))
        await backend.update_weights(files.write(small_params(5), backend.policy_version + 1))
        assert (await backend.health()).ok
    finally:
        await backend.close()
        files.release()
