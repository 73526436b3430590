"""The differentiable part: packed rows to a weighted policy loss. Shapes: R rows, T tokens, M targets, K terms."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_agent_rl.learner.linear_logprobs import linear_logprobs
from jax_agent_rl.learner.losses import ClipConfig, ppo_clip
from jax_agent_rl.models.llama import LlamaConfig, Params, hidden_states

TARGETS_PER_CHUNK = 256  # of a row

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the compiled objective depends on.

    Attributes:
        temperature: the rollout's; log-probs are of logits / temperature.
        remat: what the backward pass recomputes, see ``models.llama.hidden_states``.
        vocab_shards: parts the vocabulary is split into over devices.
        on_policy: the old log-probs are this very pass's (one update per rollout batch).
    """

    clip: ClipConfig
    temperature: float
    on_policy: bool
    remat: str
    vocab_shards: int


def target_logprobs(
    config: LlamaConfig, objective: ObjectiveConfig, params: Params, batch: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every target under the model, and the entropy where it was sampled; float32 [R, M]."""
    ids, positions, ends = batch["token_ids"], batch["positions"], batch["subtree_end"]
    hidden = hidden_states(config, params, ids, positions, ends, remat=objective.remat)
    at_parents = jnp.take_along_axis(hidden, batch["target_parent"][..., None], axis=1)  # [R, M, D]
    rows, count, _ = at_parents.shape
    chunk = min(TARGETS_PER_CHUNK, count)
    padding = -count % chunk

    def chunks(x: jax.Array) -> jax.Array:
        """[R, M, ...] -> [M / chunk, R chunk, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    # Targets come first in a row, so that a chunk takes from the same place of every row: the last ones may be empty.
    hidden, ids, valid = (chunks(x) for x in (at_parents, batch["target_id"], batch["target_valid"]))
    head = params.get("lm_head", params["embed"])
    scored = linear_logprobs(hidden, head, ids, valid, objective.temperature, objective.vocab_shards)
    logprob, entropy = (jnp.moveaxis(x.reshape(-1, rows, chunk), 1, 0).reshape(rows, -1)[:, :count] for x in scored)
    return logprob, jax.lax.stop_gradient(entropy)


def term_logprobs(config: LlamaConfig, objective: ObjectiveConfig, params: Params, batch: Arrays) -> jax.Array:
    """Log-prob of every term's token, float32 [R, K]; 0 at padding."""
    logprob, _ = target_logprobs(config, objective, params, batch)
    terms = jnp.take_along_axis(logprob, batch["term_target"], axis=1)
    return jnp.where(batch["weight"] > 0, terms, 0.0)


def policy_loss(
    config: LlamaConfig, objective: ObjectiveConfig, params: Params, batch: Arrays
) -> tuple[jax.Array, dict[str, Arrays]]:
    """The micro-batch's share of the loss.

    Returns:
        scalar loss (a plain sum over terms; their weights make it the mean of the whole update), and statistics:
        ``sum`` adds up over micro-batches, ``max`` takes the largest.
    """
    logprob, entropy = target_logprobs(config, objective, params, batch)
    weight = batch["weight"]
    valid = weight > 0
    terms = jnp.where(valid, jnp.take_along_axis(logprob, batch["term_target"], axis=1), 0.0)
    old = jax.lax.stop_gradient(terms) if objective.on_policy else batch["old_logprob"]
    loss, ratio, clipped = ppo_clip(terms, old, batch["advantage"], objective.clip)
    total = jnp.sum(weight * loss)
    # What nobody sampled (an observation trained on) has no rollout log-prob, so no gap.
    gap = jnp.where(valid & ~jnp.isnan(batch["rollout_logprob"]), jnp.abs(batch["rollout_logprob"] - old), 0.0)
    ones = valid.astype(jnp.float32)
    statistics = {
        "sum": {
            "loss": total,
            "terms": jnp.sum(ones),
            "clipped": jnp.sum(ones * clipped),
            "ratio": jnp.sum(ones * ratio),
            "kl": jnp.sum(ones * (old - terms)),
            "gap": jnp.sum(gap),
            "entropy": jnp.sum(ones * jnp.take_along_axis(entropy, batch["term_target"], axis=1)),
        },
        "max": {"gap": jnp.max(gap)},
    }
    return total, jax.lax.stop_gradient(statistics)
