"""The real small model: it is what it says it is, and three steps on the calculator teach it
something.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl.data.tasks import prepare_calculator
from jax_agent_rl.deploy.quickstart.model import MANIFEST, is_intact
from tests.e2e.conftest import CALCULATOR, REAL_MODEL


def test_the_quickstarts_model_is_intact_and_damage_is_noticed(tmp_path: Path):
    assert is_intact(REAL_MODEL)
    for file in ("tokenizer_config.json", MANIFEST):
        (tmp_path / file).write_bytes((REAL_MODEL / file).read_bytes())
    assert not is_intact(tmp_path)


def test_it_answers_and_its_digits_are_tokens_of_their_own():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL)
    assert len(tokenizer("12345")["input_ids"]) == 5
    model = AutoModelForCausalLM.from_pretrained(REAL_MODEL, dtype=torch.float32)
    question = [{"role": "user", "content": "What is 2+2?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "4" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.timeout(1300)  # seconds; 135M parameters on a core that others use, too
def test_three_steps_on_the_calculator_teach_something(tmp_path: Path):
    """Three of the sixteen steps: held-out accuracy must already rise."""
    train, heldout = prepare_calculator(tmp_path / "data", train=200, heldout=24)
    command = [
        sys.executable,
        "-m",
        "jax_agent_rl.cli",
        "train",
        str(CALCULATOR),
        f"run_dir={tmp_path / 'run'}",
    ]
    command += [f"data.train={train}", f"data.eval={heldout}", "data.eval_limit=24"]
    command += ["trainer.steps=3", "trainer.checkpoint_every=0", "rollout.prompts_per_step=3"]
    environment = os.environ | {"XLA_FLAGS": ""}  # optimized, as a user has it
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"]
    assert summary["token_drift"] == 0
    assert summary["recompilations_after_warmup"] == 0
    assert summary["max_logprob_gap"] <= 1e-3
