"""google-tunix' side of ``learner_peers.py``: GRPOLearner's jitted step on given completions.

    TUNIX_PYTHON tunix_step.py --model DIR --batch FILE.npz --updates 4 --gradients OUT.safetensors

It runs in Tunix' environment. The learner is built as its users do; ``RLCluster.update_actor``,
which its loop calls after a rollout, gets the example. Its Llama3 takes SmolLM2's shapes from the
safetensors, with one repair: version 0.1.7 rotates by a base of a million whatever
``ModelConfig.rope_theta`` says. The last line is one JSON object: ``seconds`` of every update, and
what the first one found.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout.base_rollout import RolloutConfig

HF_NAMES = {
    "input_layernorm.w": "input_layernorm",
    "post_attention_layernorm.w": "post_attention_layernorm",
    **{f"attn.{x}_proj.w": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"mlp.{x}_proj.kernel": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def load_model(folder: str, mesh: jax.sharding.Mesh) -> llama3.Llama3:
    """Load SmolLM2 in float32 as a Llama3."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    config = llama3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )
    llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=raw["rope_theta"])
    return create_model_from_safe_tensors(folder, config, mesh, jnp.float32)


def make_cluster(
    arguments: argparse.Namespace, batch: Mapping[str, np.ndarray]
) -> clusters.RLCluster:
    """Make an actor with its optimizer, and set the GRPO learner's loss on it.

    The rollout engine is never called.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    rows, length = batch["completion_ids"].shape
    optimizer = optax.chain(
        optax.clip_by_global_norm(float(batch["max_grad_norm"])),
        optax.adamw(
            float(batch["learning_rate"]),
            b1=float(batch["adam_b1"]),
            b2=float(batch["adam_b2"]),
            weight_decay=0.0,
        ),
    )
    training = clusters.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=1,
        mini_batch_size=rows,
        train_micro_batch_size=rows,
    )
    roles = (clusters.Role.ACTOR, clusters.Role.ROLLOUT, clusters.Role.REFERENCE)
    rollout = RolloutConfig(temperature=1.0, max_tokens_to_generate=length)
    cluster = clusters.RLCluster(
        actor=load_model(arguments.model, mesh),
        tokenizer=AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=training,
            rollout_config=rollout,
        ),
    )
    algorithm = GRPOConfig(num_generations=rows, beta=0.0, loss_agg_mode="token-mean")
    GRPOLearner(
        cluster, algorithm, reward_fns=lambda prompts, completions, **_: [0.0] * len(prompts)
    )
    cluster.actor_trainer.with_rl_metrics_to_log({"entropy": np.mean})
    return cluster


def as_example(batch: Mapping[str, np.ndarray]) -> TrainExample:
    """Return what the learner makes of a rollout."""
    prompts = jnp.asarray(batch["prompt_ids"], jnp.int32)
    completions = jnp.asarray(batch["completion_ids"], jnp.int32)
    return TrainExample(
        prompt_ids=prompts,
        prompt_mask=jnp.ones_like(prompts, bool),
        completion_ids=completions,
        completion_mask=jnp.ones_like(completions, bool),
        advantages=jnp.asarray(batch["advantages"], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


def first_moment(trainer: Any) -> dict[str, np.ndarray]:
    """Return AdamW's first moment under Hugging Face names, matrices [out, in]."""
    mu = optax.tree_utils.tree_get(trainer.optimizer.opt_state, "mu")
    moments = {}
    for path, leaf in nnx.to_flat_state(mu):
        tunix_name = ".".join(map(str, path))
        name, array = _hf(tunix_name, np.asarray(leaf))
        moments[name] = array
    return moments


def _hf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a parameter's Hugging Face name, and its array in that layout."""
    if name == "embedder.input_embedding":
        return "model.embed_tokens.weight", array
    if name == "final_norm.w":
        return "model.norm.weight", array

    _, layer, layer_name = name.split(".", 2)
    if array.ndim > 1:
        # The output projection's inputs are heads and their dimensions, two axes.
        num_inputs = array.shape[0]
        if layer_name == "attn.o_proj.w":
            num_inputs = int(np.prod(array.shape[:-1]))
        array = np.ascontiguousarray(array.reshape(num_inputs, -1).T)
    return f"model.layers.{layer}.{HF_NAMES[layer_name]}.weight", array


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
    cluster = make_cluster(arguments, batch)
    trainer = cluster.actor_trainer
    example = as_example(batch)
    seconds = []
    for number in range(arguments.updates):
        start = time.perf_counter()
        cluster.update_actor([example], None)
        jax.block_until_ready(nnx.state(trainer.model))
        seconds.append(time.perf_counter() - start)
        if number == 0:
            # By now the first moment is the clipped gradient times 1 - b1.
            scale = np.float32(1 - batch["adam_b1"])
            gradients = {name: moment / scale for name, moment in first_moment(trainer).items()}
            save_file(gradients, arguments.gradients)

    result: dict[str, Any] = {
        "seconds": seconds,
        "versions": {
            name: importlib.metadata.version(name) for name in ("google-tunix", "flax", "jax")
        },
    }
    for name in ("loss", "grad_norm", "entropy"):
        history = trainer.metrics_logger.get_metric_history("actor", metric_name=name, mode="train")
        result[name] = float(history[0])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
