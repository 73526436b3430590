"""The quickstart's task trained with vLLM instead of the embedded engine: only the config differs."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from flax import nnx
from rich.console import Console

from jax_agent_rl.cache import cache_root
from jax_agent_rl.config import load
from jax_agent_rl.data.calculator import prepare_calculator
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder, model_params
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.trainer.run import train

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TOKENIZER = cache_root() / "models" / "smollm2-135m-instruct"


@pytest.mark.skipif(not TOKENIZER.is_dir(), reason="needs the quickstart's tokenizer: jax-agent-rl fetch-model")
def test_a_run_needs_only_another_backend(tmp_path: Path):
    small = DecoderConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    save_hf(tmp_path / "model", small, model_params(Decoder(small, rngs=nnx.Rngs(0))), tokenizer_from=TOKENIZER)
    rows, _ = prepare_calculator(tmp_path / "data", train=8, heldout=2)
    tree = yaml.safe_load(QUICKSTART.read_text())
    tree |= {"run_dir": str(tmp_path / "run"), "model": {"path": str(tmp_path / "model")}, "data": {"train": str(rows)}}
    tree["rollout"] |= {"prompts_per_step": 2, "group_size": 2, "max_in_flight": 4}
    tree["agent"] |= {"max_response_length": 24}
    tree["algorithm"] = {"filter_zero_variance": False}
    tree["learner"] |= {"row_length": 384}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    config = load(tmp_path / "recipe.yaml", ["rollout.backend=vllm", "trainer.steps=2"])
    summary = asyncio.run(train(config, resume=False, console=Console(quiet=True)))
    assert summary["trained"] == summary["started"] == 8 and summary["token_drift"] == 0
    assert summary["max_logprob_gap"] < 1e-3
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["weight_update_seconds"] > 0 for step in steps if step["kind"] == "step")
    assert (tmp_path / "run" / "vllm.log").is_file()
