"""Tunix' side of the gallery's comparison: GRPOLearner on rows and settings of sums.yaml. Runs in
its environment.

    TUNIX_PYTHON benchmarks/peers/tunix_grpo.py model.path=DIR seed=0 run_dir=runs/tunix

Tunix takes every pad id for padding, in prompts too, and SmolLM2's pad id ends its turns: another
one is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from grpo_peer import (
    EVAL_EVERY,
    GROUP,
    OPTIMIZER,
    PROMPT_TOKENS,
    PROMPTS,
    RESPONSE_TOKENS,
    STEPS,
    RunFolder,
    rows,
    settings,
    truth,
)
from sums import compute_score
from transformers import AutoTokenizer
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_step import load_model


class Comparison:
    """A cluster and its learner, with the rewards and evaluations that go to the run folder."""

    def __init__(self, model: str, seed: int, folder: RunFolder) -> None:
        self._folder, self._seed = folder, 1000 * seed
        self._tokenizer = AutoTokenizer.from_pretrained(
            model, pad_token="<|endoftext|>", trust_remote_code=False
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
        optimizer = optax.chain(
            optax.clip_by_global_norm(OPTIMIZER["max_grad_norm"]),
            optax.adamw(
                OPTIMIZER["learning_rate"], b1=OPTIMIZER["b1"], b2=OPTIMIZER["b2"], weight_decay=0.0
            ),
        )
        self._rollout = RolloutConfig(
            temperature=1.0,
            top_p=1.0,
            max_tokens_to_generate=RESPONSE_TOKENS,
            max_prompt_length=PROMPT_TOKENS,
            kv_cache_size=PROMPT_TOKENS + RESPONSE_TOKENS,
            seed=self._seed,
        )
        roles = (clusters.Role.ACTOR, clusters.Role.ROLLOUT, clusters.Role.REFERENCE)
        self._cluster = clusters.RLCluster(
            actor=load_model(model, mesh),
            tokenizer=self._tokenizer,
            cluster_config=clusters.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh),
                training_config=clusters.RLTrainingConfig(
                    actor_optimizer=optimizer,
                    eval_every_n_steps=STEPS + 1,
                    max_steps=STEPS,
                    mini_batch_size=PROMPTS,
                    train_micro_batch_size=PROMPTS // 2,  # 48 rows of logits are 16 GB in the end
                    rollout_micro_batch_size=PROMPTS,
                    compute_logps_micro_batch_size=PROMPTS,
                ),
                rollout_config=self._rollout,
            ),
        )
        algorithm = GRPOConfig(num_generations=GROUP, beta=0.0, loss_agg_mode="token-mean")
        self._learner = GRPOLearner(self._cluster, algorithm, reward_fns=self._reward)
        self._reward_mean = 0.0

    def run(self) -> None:
        self._learner.train(self._batches())
        self._folder.step(STEPS, self._reward_mean, 0.0)
        self._evaluate(STEPS)

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of each step; the learner asks for them when the step before is done."""
        train = rows("train")
        for step in range(STEPS):
            if step:
                self._folder.step(step, self._reward_mean, 0.0)
            if step % EVAL_EVERY == 0:
                self._evaluate(step)
            some = train[step * PROMPTS : (step + 1) * PROMPTS]
            self._rollout.seed = self._seed + step  # else it draws the same numbers in every step
            yield {
                "prompts": np.array([self._text(row) for row in some]),
                "truth": np.array([truth(row) for row in some]),
            }

    def _text(self, row: dict[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )

    def _reward(
        self, prompts: list[str], completions: list[str], truth: list[str], **_: Any
    ) -> list[float]:
        scores = [self._score(text, true) for text, true in zip(completions, truth, strict=True)]
        self._reward_mean = float(np.mean(scores))
        return scores

    def _score(self, text: str, true: str) -> float:
        return compute_score("sums", text.removesuffix(self._tokenizer.eos_token), true, None)

    def _evaluate(self, step: int) -> None:
        def sample(some: list[dict[str, Any]]) -> list[float]:
            made: list[str] = []
            for begin in range(0, len(some), PROMPTS * GROUP):  # the shape of a training batch
                part = [self._text(row) for row in some[begin : begin + PROMPTS * GROUP]]
                made += self._cluster.rollout.generate(part, self._rollout).text
            return [self._score(text, truth(row)) for text, row in zip(made, some, strict=True)]

        self._folder.evaluate(step, sample)


def main() -> None:
    given = settings()
    folder = RunFolder(given["run_dir"])
    Comparison(str(Path(given["model.path"]).expanduser()), int(given["seed"]), folder).run()
    folder.close()


if __name__ == "__main__":
    main()
