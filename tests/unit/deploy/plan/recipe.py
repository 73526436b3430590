"""A model small enough to be compiled for a TPU in seconds, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Writes ``config.json``, no weights, and a configuration; returns its file."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"train": "rows.jsonl"},
        "agent": {"max_prompt_length": 64, "max_response_length": 64},
        "rollout": {
            "max_model_len": 128,
            "max_in_flight": 8,
            "prompts_per_step": 2,
            "group_size": 4,
            "jetstream": {
                "prefill_buckets": [32],
                "max_concurrent_decodes": 8,
                "mesh": {"tensor": 2},
            },
        },
        "learner": {
            "pack_length": 128,
            "mesh": {"fsdp": 2, "tensor": 2},
            "compute_dtype": "bfloat16",
        },
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
