"""A whole run in seconds: the calculator's task and the start of SmolLM2's vocabulary on a model of
random weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from flax import nnx

from jax_agent_rl.data.tasks import prepare_calculator
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.utils.files import cache_root

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"
REAL_MODEL = cache_root() / "models" / "smollm2-135m-instruct"
VOCABULARY = 4096
"""Ids of the small model. With SmolLM2's 49,152, loading the tokenizer and computing logits would
be most of a run."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    """Random weights; SmolLM2's tokenizer without its later merges."""
    folder = tmp_path_factory.mktemp("model")
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    save_hf(
        folder,
        config,
        nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0)))),
        tokenizer_from=REAL_MODEL,
    )
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bpe = tokenizer["model"]
    bpe["vocab"] = {token: i for token, i in bpe["vocab"].items() if i < VOCABULARY}
    bpe["merges"] = [
        [first, second] for first, second in bpe["merges"] if first + second in bpe["vocab"]
    ]
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, small_model: Path) -> Path:
    """The calculator example's configuration, made small; ``run_dir`` is ``tmp_path / "run"``."""
    train, heldout = prepare_calculator(tmp_path / "data", train=24, heldout=4)
    tree = yaml.safe_load(CALCULATOR.read_text())
    tree["run_dir"] = str(tmp_path / "run")
    tree["model"]["path"] = str(small_model)
    tree["data"] = {"train": str(train), "eval": str(heldout)}
    tree["rollout"] |= {"prompts_per_step": 2, "group_size": 2, "max_in_flight": 4}
    tree["rollout"]["jetstream"] = {"max_concurrent_decodes": 4, "prefill_buckets": [64, 256]}
    tree["agent"] |= {"max_prompt_length": 288, "max_response_length": 24}
    # A random model earns nothing: without the filter the learner still runs.
    tree["algorithm"] = {"filter_zero_variance": False}
    tree["learner"] |= {"pack_length": 384}
    tree["trainer"] = {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 2}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
