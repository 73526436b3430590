"""Adapters as PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jax_agent_rl.config_base import LoraConfig
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import tensor_names


def save_peft(folder: Path, lora: LoraConfig, model: DecoderConfig, trained: Params, *, base: str) -> None:
    """Writes what ``PeftModel.from_pretrained(base_model, folder)`` loads.

    Args:
        trained: adapters, see :func:`jax_agent_rl.learner.lora.new_adapters`.
        base: folder or hub name of the model they were trained over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = tensor_names(model)["layers"]
    tensors = {
        f"base_model.model.{weight.removesuffix('.weight')}.lora_{part.upper()}.weight": matrix
        for name, adapter in trained["adapters"].items()
        for part, stack in adapter.items()
        for weight, matrix in zip(names[name], np.asarray(stack), strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
