"""TRL's side of the gallery's comparison: GRPOTrainer on the rows and settings of sums.yaml.

    TRL_PYTHON benchmarks/peers/trl_grpo.py model.path=DIR seed=0 run_dir=runs/trl

It runs in TRL's environment.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_peer import (
    EVAL_EVERY,
    GROUP,
    OPTIMIZER,
    PROMPTS,
    RESPONSE_TOKENS,
    STEPS,
    RunFolder,
    rows,
    settings,
    truth,
)
from sums import compute_score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_step import SETTINGS


def reward(completions: list[list[dict[str, str]]], truth: list[str], **_: Any) -> list[float]:
    """Return the score of each completion, as ``GRPOTrainer`` calls a reward function."""
    scores = []
    for messages, right_answer in zip(completions, truth, strict=True):
        scores.append(compute_score("sums", messages[0]["content"], right_answer, None))
    return scores


class Record(TrainerCallback):
    """Evaluates as sums.yaml does, and writes the run folder."""

    def __init__(self, folder: RunFolder, tokenizer: Any) -> None:
        self._folder = folder
        self._tokenizer = tokenizer

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._evaluate(0, model)

    def on_log(
        self, _: Any, state: Any, *__: Any, logs: dict[str, float], model: Any, **___: Any
    ) -> None:
        if "reward" not in logs:
            return
        self._folder.step(state.global_step, logs["reward"], logs["completions/mean_length"])
        if state.global_step % EVAL_EVERY == 0:
            self._evaluate(state.global_step, model)

    def _evaluate(self, step: int, model: Any) -> None:
        self._folder.evaluate(step, lambda heldout: self._score(model, heldout))

    def _score(self, model: Any, heldout: list[dict[str, Any]]) -> list[float]:
        """Sample an answer to each row, and return the scores."""
        prompts = [row["prompt"] for row in heldout]
        inputs = self._tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_new_tokens=RESPONSE_TOKENS,
            )
        model.train()

        _, prompt_length = inputs["input_ids"].shape
        answers = self._tokenizer.batch_decode(ids[:, prompt_length:], skip_special_tokens=True)
        scores = []
        for answer, row in zip(answers, heldout, strict=True):
            scores.append(compute_score("sums", answer, truth(row), None))
        return scores


def main() -> None:
    options = settings()
    model = str(Path(options["model.path"]).expanduser())
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
    folder = RunFolder(options["run_dir"])
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            seed=int(options["seed"]),
            per_device_train_batch_size=PROMPTS * GROUP // 2,  # all at once take 17 GB
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=RESPONSE_TOKENS,
            max_steps=STEPS,
            shuffle_dataset=False,
            learning_rate=OPTIMIZER["learning_rate"],
            adam_beta1=OPTIMIZER["b1"],
            adam_beta2=OPTIMIZER["b2"],
            max_grad_norm=OPTIMIZER["max_grad_norm"],
            weight_decay=0.0,
            **SETTINGS,
        )
        train = [{"prompt": row["prompt"], "truth": truth(row)} for row in rows("train")]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32, trust_remote_code=False
            ),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(train),
            processing_class=tokenizer,
            callbacks=[Record(folder, tokenizer)],
        )
        trainer.train()
    folder.close()


if __name__ == "__main__":
    main()
