"""On-policy distillation as users run it: from a teacher in a folder, and from the same one on a
rollout server.
"""

import json
import re
from pathlib import Path

import pytest
from flax import nnx
from jax import numpy as jnp

from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_config, save_hf
from tests.e2e.test_remote_run import rollout_server, run
from tests.tiny_run import step_records

SETTINGS = ["trainer.steps=2", "data.eval=null", "trainer.on_disagreement=stop", "algorithm={}"]


@pytest.fixture
def teacher(small_model: Path, tmp_path: Path) -> Path:
    """Another random model with the student's tokenizer."""
    folder = tmp_path / "teacher"
    model = load_config(small_model)
    params = nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(1))))
    params["embed"] = params["embed"] * jnp.float32(4)  # far from uniform
    save_hf(folder, model, params, tokenizer_from=small_model)
    return folder


def test_a_served_teacher_teaches_what_a_colocated_one_does(
    recipe: Path, teacher: Path, tmp_path: Path
):
    with rollout_server(recipe, f"model.path={teacher}") as url:
        served = f"[{{path: {teacher}, url: '{url}', token_env: ROLLOUT_TOKEN}}]"
        for name, teachers in (("here", str(teacher)), ("there", served)):
            for top_k in (0, 8):
                overrides = [f"distill.teachers={teachers}", f"run_dir={tmp_path / name}{top_k}"]
                overrides += [f"algorithm={{kl: {{top_k: {top_k}}}}}"]
                result = run("distill", recipe, *SETTINGS, *overrides)
                assert result.returncode == 0, result.stderr
    for top_k, metric in ((0, "kl_reference"), (8, "kl_loss")):
        colocated_steps, served_steps = (
            step_records(tmp_path / f"{name}{top_k}") for name in ("here", "there")
        )
        assert colocated_steps[0][metric] > 0.001
        for a, b in zip(colocated_steps, served_steps, strict=True):
            assert b[metric] == pytest.approx(a[metric], rel=1e-3)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)
        summary = json.loads((tmp_path / f"there{top_k}" / "summary.json").read_text())
        assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())
        assert summary["recompilations_after_warmup"] == 0

        # The server has ended: what the teacher said is on record.
        repeated = run("replay", tmp_path / f"there{top_k}", "--step", "2", "--json")
        replayed = json.loads(repeated.stdout)
        assert (replayed["verdict"], replayed["from_step"]) == ("equal", 1), repeated.stdout

    refused = run("replay", tmp_path / "there8", "--step", "2", "algorithm.kl.top_k=4")
    assert refused.returncode == 2
    assert "algorithm.kl.top_k=4; set it to 8" in " ".join(refused.stderr.split())


def test_what_is_missing_is_one_message(recipe: Path, teacher: Path):
    refused = run("distill", recipe)
    assert refused.returncode == 2
    assert "names no teacher; set distill.teachers" in refused.stderr
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = [token for token in vocabulary if re.fullmatch("[a-z]{2}", token)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = run("distill", recipe, f"distill.teachers={teacher}")
    assert refused.returncode == 2
    assert "has another tokenizer than" in refused.stderr
    assert "Traceback" not in refused.stderr
