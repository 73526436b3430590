"""TRL's side of ``learner_peers.py``: GRPOTrainer's own loop on completions that are given.

    TRL_PYTHON trl_step.py --model DIR --batch FILE.npz --updates 4 --gradients OUT.safetensors

It runs in TRL's environment. Only the method that generates and scores is replaced; loss, backward,
clip, AdamW and schedule are the trainer's. Its defaults stay but where they would cost time or
precision: no gradient checkpointing, no bfloat16. The last line is one JSON object: ``seconds`` of
every update, and what the first one found.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SETTINGS: dict[str, Any] = {
    "beta": 0.0,
    "loss_type": "dapo",  # the mean over tokens
    "temperature": 1.0,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Of ``GRPOConfig``, in both comparisons: our objective, and no loss of time or precision."""


class FixedCompletions(GRPOTrainer):
    """Takes completions and advantages from ``fixed_rollout``.

    The base class asks its engine and its rewards for them.
    """

    fixed_rollout: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return self.fixed_rollout


class Watch(TrainerCallback):
    """Seconds of every update, and the gradient of the first."""

    def __init__(self, gradients: str) -> None:
        self.seconds: list[float] = []
        self._gradients = gradients
        self._step_start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_start = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        """Save the first gradient; this comes after the clip."""
        if not self.seconds:
            gradients = {name: p.grad.contiguous() for name, p in model.named_parameters()}
            save_file(gradients, self._gradients)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._step_start)


def as_rollout(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return what the trainer expects of a rollout.

    It is ids [N, P] and [N, C] int64, masks of ones, advantages [N] float32, and a token count.
    """
    prompts = torch.tensor(batch["prompt_ids"])
    completions = torch.tensor(batch["completion_ids"])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.tensor(batch["advantages"], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }


def train(
    arguments: argparse.Namespace, batch: dict[str, np.ndarray], folder: str
) -> tuple[Watch, dict[str, float]]:
    """Run all updates; return the watch, and the log of the first update."""
    rows, length = batch["completion_ids"].shape
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=rows,
        max_completion_length=length,
        max_steps=arguments.updates,
        learning_rate=float(batch["learning_rate"]),
        adam_beta1=float(batch["adam_b1"]),
        adam_beta2=float(batch["adam_b2"]),
        max_grad_norm=float(batch["max_grad_norm"]),
        **SETTINGS,
    )
    watch = Watch(arguments.gradients)
    trainer = FixedCompletions(
        model=AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, trust_remote_code=False
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),  # never called
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["given"]}),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False),
        callbacks=[watch],
    )
    trainer.fixed_rollout = as_rollout(batch)
    trainer.train()
    return watch, trainer.state.log_history[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--batch", "--gradients"):
        parser.add_argument(name, required=True)
    parser.add_argument("--updates", type=int, required=True)
    arguments = parser.parse_args()
    with np.load(arguments.batch) as file:
        batch = dict(file)
    with tempfile.TemporaryDirectory() as folder:
        watch, first = train(arguments, batch, folder)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    result = {"loss": first["loss"], "grad_norm": first["grad_norm"], "entropy": first["entropy"]}
    print(json.dumps({"seconds": watch.seconds, "versions": versions} | result))


if __name__ == "__main__":
    main()
