"""Whole runs in other precisions: deterministic, bfloat16, LoRA; and what is exported from them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.config import load
from jax_agent_rl.models.hf import load_hf
from tests.tiny_run import step_records, tiny_recipe
from tests.warm import python


def cli(*arguments: object) -> str:
    command = [*python(), "-m", "jax_agent_rl.cli", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_a_deterministic_run_has_a_gap_of_exactly_zero_and_compiles_nothing_late(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 3, "checkpoint_every": 0})
    cli("train", recipe, "rollout.deterministic=true")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["max_logprob_gap"] == 0.0
    assert summary["recompilations_after_warmup"] == 0
    assert all(step["trained_tokens"] > 0 for step in step_records(tmp_path / "run"))


def test_a_run_with_restricted_sampling_agrees_to_rounding_and_learns(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 2, "checkpoint_every": 0})
    cli("train", recipe, "rollout.top_p=0.8", "rollout.top_k=20", "rollout.min_p=0.02")
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2
    assert all(step["trained_tokens"] > 0 for step in steps)
    assert max(step["logprob_gap_max"] for step in steps) < 1e-3


def test_engine_and_learner_in_bfloat16_agree_to_its_rounding(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 2, "checkpoint_every": 0})
    cli("train", recipe, "learner.compute_dtype=bfloat16", "rollout.jetstream.dtype=bfloat16")
    gaps = [step["logprob_gap_mean"] for step in step_records(tmp_path / "run")]
    assert all(1e-5 < gap < 0.2 for gap in gaps), gaps


def test_a_run_with_adapters_resumes_and_exports_merged_and_for_peft(tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path, trainer={"steps": 2, "checkpoint_every": 1}, learner={"lora": {"rank": 4}}
    )
    run = tmp_path / "run"
    assert "adapters of rank 4 on q_proj, k_proj" in cli("train", recipe)
    assert "resumed after step 2" in cli("train", recipe, "--resume", "trainer.steps=4")
    assert max(step["logprob_gap_max"] for step in step_records(run)) < 1e-3, (
        "engines serve the merged weights"
    )
    cli("export", run, tmp_path / "merged")
    cli("export", run, tmp_path / "adapter", "--adapter")

    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    base = AutoModelForCausalLM.from_pretrained(load(recipe).model.path)
    start = base.get_input_embeddings().weight.detach().clone()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        a = adapted(ids).logits
        b = merged(ids).logits
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(merged.get_input_embeddings().weight.detach(), start, atol=0, rtol=0)


def test_a_run_with_a_critic_is_exported_without_it_in_the_precision_asked_for(tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 1},
        algorithm={"filter_zero_variance": False, "adv_estimator": "gae"},
    )
    model = Path(load(recipe).model.path)
    (model / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "eos_token_id": 2})
    )
    cli("train", recipe)
    cli("export", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.6
    assert generation["eos_token_id"] == 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    original, exported = (load_hf(path)[1]["layers"]["q"] for path in (model, tmp_path / "out"))
    assert not np.array_equal(original, exported)
