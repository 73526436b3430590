"""Tunix' side of the gallery's comparison: GRPOLearner on the rows and settings of sums.yaml.

    TUNIX_PYTHON benchmarks/peers/tunix_grpo.py model.path=DIR seed=0 run_dir=runs/tunix

It runs in Tunix' environment. Tunix takes every pad id for padding, in prompts as well, and
SmolLM2's pad id ends its turns: another one is set.
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
        self._folder = folder
        self._seed = 1000 * seed
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
        """Train, and evaluate on the way and in the end."""
        self._learner.train(self._batches())
        self._folder.step(STEPS, self._reward_mean, 0.0)
        self._evaluate(STEPS)

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of each step.

        The learner asks for them when the previous step has ended, which is recorded then.
        """
        train_rows = rows("train")
        for step in range(STEPS):
            if step:
                self._folder.step(step, self._reward_mean, 0.0)
            if step % EVAL_EVERY == 0:
                self._evaluate(step)
            step_rows = train_rows[step * PROMPTS : (step + 1) * PROMPTS]
            self._rollout.seed = self._seed + step  # else it draws the same numbers in every step
            yield {
                "prompts": np.array([self._text(row) for row in step_rows]),
                "truth": np.array([truth(row) for row in step_rows]),
            }

    def _text(self, row: dict[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )

    def _reward(
        self, prompts: list[str], completions: list[str], truth: list[str], **_: Any
    ) -> list[float]:
        scores = []
        for completion, right_answer in zip(completions, truth, strict=True):
            scores.append(self._score(completion, right_answer))
        self._reward_mean = float(np.mean(scores))
        return scores

    def _score(self, completion: str, right_answer: str) -> float:
        answer = completion.removesuffix(self._tokenizer.eos_token)
        return compute_score("sums", answer, right_answer, None)

    def _evaluate(self, step: int) -> None:
        self._folder.evaluate(step, self._sample_scores)

    def _sample_scores(self, heldout: list[dict[str, Any]]) -> list[float]:
        """Sample an answer to each row, and return the scores."""
        batch_size = PROMPTS * GROUP  # the shape of a training batch
        completions: list[str] = []
        for start in range(0, len(heldout), batch_size):
            prompts = [self._text(row) for row in heldout[start : start + batch_size]]
            completions += self._cluster.rollout.generate(prompts, self._rollout).text

        scores = []
        for completion, row in zip(completions, heldout, strict=True):
            scores.append(self._score(completion, truth(row)))
        return scores


def main() -> None:
    options = settings()
    model = str(Path(options["model.path"]).expanduser())
    folder = RunFolder(options["run_dir"])
    comparison = Comparison(model, int(options["seed"]), folder)
    comparison.run()
    folder.close()


if __name__ == "__main__":
    main()
