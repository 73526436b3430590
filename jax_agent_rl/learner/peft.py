"""Adapters as PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
    # A model that sees has its decoder one module further in, and a tower with modules of the same names.
    inner = "model." if model.vision is None else "model.language_model."
    targets = list(lora.targets) if model.vision is None else rf"{re.escape(inner)}.*\.({'|'.join(lora.targets)})"
    tensors = {
        f"base_model.model.{module}.lora_{part.upper()}.weight": matrix
        for name, adapter in trained["adapters"].items()
        for part, stack in adapter.items()
        for module, matrix in zip(_modules(names[name], inner), np.asarray(stack), strict=True)
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
        "target_modules": targets,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _modules(weights: Sequence[str], inner: str) -> list[str]:
    """Modules of tensors that published files call ``model.….weight``."""
    return [inner + weight.removeprefix("model.").removesuffix(".weight") for weight in weights]
