"""TRL's side of ``supervised_peers.py``: SFTTrainer and DPOTrainer on ids that are given.

    TRL_PYTHON trl_supervised.py --model DIR --batch FILE.json --updates 4

It runs in TRL's environment. The file has ``method`` (sft or dpo), ``rows`` (sft: ``input_ids`` and
``labels``; dpo: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``) and the optimizer's numbers;
every update is of all rows. Only the trainers' tokenization is left out. The last line is one JSON
object: ``losses`` before each update and ``seconds``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class TokenizedDPOTrainer(DPOTrainer):
    """Takes rows that are tokenized already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


class Watch(TrainerCallback):
    """Seconds of every update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._step_start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._step_start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--batch"):
        parser.add_argument(name, required=True)
    parser.add_argument("--updates", type=int, required=True)
    arguments = parser.parse_args()
    with open(arguments.batch) as file:
        batch = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, trust_remote_code=False
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": arguments.updates,
            "per_device_train_batch_size": len(batch["rows"]),
            "learning_rate": batch["learning_rate"],
            "lr_scheduler_type": "constant",
            "adam_beta1": batch["adam_b1"],
            "adam_beta2": batch["adam_b2"],
            "adam_epsilon": batch["adam_eps"],
            "weight_decay": 0.0,
            "max_grad_norm": batch["max_grad_norm"],
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "max_length": None,
        }
        if batch["method"] == "sft":
            config = SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True})
            trainer_class: Any = SFTTrainer
        else:
            config = DPOConfig(**settings, beta=batch["beta"])
            trainer_class = TokenizedDPOTrainer
        trainer = trainer_class(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(batch["rows"]),
            processing_class=AutoTokenizer.from_pretrained(
                arguments.model, trust_remote_code=False
            ),
            callbacks=[watch],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    print(json.dumps({"losses": losses, "seconds": watch.seconds, "versions": versions}))


if __name__ == "__main__":
    main()
