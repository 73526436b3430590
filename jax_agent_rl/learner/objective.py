"""The differentiable part: packed rows to a weighted policy loss. Shapes: R rows, T tokens, M targets, K terms."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_agent_rl.learner.losses import ClipConfig, ppo_clip
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import hidden_states, logits

TARGETS_PER_CHUNK = 256  # logits exist for this many targets at a time: [256, V], never [T, V]

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the compiled objective depends on.

    Attributes:
        temperature: the rollout's; log-probs are of logits / temperature.
        on_policy: the old log-probs are this very pass's (one update per rollout batch).
    """

    clip: ClipConfig
    temperature: float
    on_policy: bool
    remat: str


def target_logprobs(
    config: DecoderConfig, params: Params, batch: Arrays, *, temperature: float, remat: str
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every target under the model, and the entropy where it was sampled; float32 [R, M]."""
    hidden = hidden_states(config, params, batch["token_ids"], batch["positions"], batch["subtree_end"], remat=remat)
    at_parents = jnp.take_along_axis(hidden, batch["target_parent"][..., None], axis=1)  # [R, M, D]
    rows, count, size = at_parents.shape
    chunk = min(TARGETS_PER_CHUNK, count)
    padding = -count % chunk

    def chunks(x: jax.Array) -> jax.Array:
        """[R, M, ...] -> [M / chunk, R, chunk, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def score(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = logits(params, hidden) / temperature
        normalizer = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]
        mean_score = jnp.sum(jnp.exp(scores - normalizer[..., None]) * scores, axis=-1)
        return chosen - normalizer, jax.lax.stop_gradient(normalizer - mean_score)

    def one(_: None, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden, ids, valid = part
        nothing = jnp.zeros(ids.shape, jnp.float32)
        # Targets come first in a row: a chunk without any costs nothing.
        return None, jax.lax.cond(jnp.any(valid), score, lambda h, i: (nothing, nothing), hidden, ids)

    parts = (chunks(at_parents), chunks(batch["target_id"]), chunks(batch["target_valid"]))
    _, (logprob, entropy) = jax.lax.scan(one, None, parts)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :count]  # noqa: E731
    return join(logprob), join(entropy)


def term_logprobs(config: DecoderConfig, params: Params, batch: Arrays, *, temperature: float, remat: str) -> jax.Array:
    """Log-prob of every term's token, float32 [R, K]; 0 at padding."""
    logprob, _ = target_logprobs(config, params, batch, temperature=temperature, remat=remat)
    terms = jnp.take_along_axis(logprob, batch["term_target"], axis=1)
    return jnp.where(batch["weight"] > 0, terms, 0.0)


def policy_loss(
    config: DecoderConfig, objective: ObjectiveConfig, params: Params, batch: Arrays
) -> tuple[jax.Array, dict[str, Arrays]]:
    """The micro-batch's share of the loss.

    Returns:
        scalar loss (a plain sum over terms; their weights make it the mean of the whole update), and statistics:
        ``sum`` adds up over micro-batches, ``max`` takes the largest.
    """
    logprob, entropy = target_logprobs(config, params, batch, temperature=objective.temperature, remat=objective.remat)
    weight = batch["weight"]
    valid = weight > 0
    terms = jnp.where(valid, jnp.take_along_axis(logprob, batch["term_target"], axis=1), 0.0)
    old = jax.lax.stop_gradient(terms) if objective.on_policy else batch["old_logprob"]
    loss, ratio, clipped = ppo_clip(terms, old, batch["advantage"], objective.clip)
    total = jnp.sum(weight * loss)
    gap = jnp.where(valid, jnp.abs(batch["rollout_logprob"] - old), 0.0)
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
