"""The differentiable part: packed rows to the weighted losses of policy and critic.

Shapes: R rows, T tokens, M targets, K terms, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.image_packing import encode_images
from jax_agent_rl.learner.linear_logprobs import linear_logprobs, linear_top_k
from jax_agent_rl.learner.losses import LossConfig, Terms, find_policy_loss, kl_penalty, top_k_kl
from jax_agent_rl.learner.losses.policy import changed
from jax_agent_rl.learner.metrics import INFINITE
from jax_agent_rl.learner.optimized_params import Arrays, Statistics
from jax_agent_rl.learner.parameterization import Critic
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.moe import load_balancing_loss
from jax_agent_rl.models.sharding import ROWS, constrain

TARGETS_PER_CHUNK = {"cpu": 256, "accelerator": 4096}
"""Targets of a row whose logits are computed together. Each chunk reads and writes the head's whole gradient, which
accelerators take longer for than for the products of a small chunk; on a CPU a chunk stays in the cache."""
KEPT_LOGITS = 2**30  # bytes that a micro-batch may keep on a CPU


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the compiled objective.

    Attributes:
        temperature: the rollout's; log-probs are of logits / temperature.
        remat: what the backward pass recomputes, see ``models.decoder.Decoder``.
        mesh: what parameters and batch lie on; None on one device.
        on_policy: the old log-probs are this very pass's (one update per rollout batch).
        bypass: the old log-probs are the rollout's.
        kept_logits: bytes of logits that a micro-batch keeps for its backward pass; what is beyond is recomputed.
        targets_per_chunk: targets of a row whose logits are computed together.
        kl_estimator: of the KL term in the loss; None without one.
        kl_top_k: ids of each position over which the KL term is exact; 0: an estimate from the sampled id.
        router_aux_loss_coef: of the load-balancing loss of a mixture of experts.
    """

    loss: LossConfig
    temperature: float
    on_policy: bool
    remat: str
    mesh: Mesh | None = None
    bypass: bool = False
    kept_logits: int = 0
    targets_per_chunk: int = TARGETS_PER_CHUNK["cpu"]
    entropy_coeff: float = 0.0
    kl_estimator: str | None = None
    kl_top_k: int = 0
    router_aux_loss_coef: float = 0.0


def objective_config(
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    temperature: float,
    mesh: Mesh | None = None,
    *,
    scored: bool = False,
    on_cpu: bool = False,
) -> ObjectiveConfig:
    """Return the constants of the compiled objective.

    The old log-probs of a single update are those of its own forward pass, unless something needs them before it.

    Args:
        algorithm: losses, KL and corrections.
        config: batching and rematerialisation.
        temperature: the rollout's.
        mesh: of parameters and batch; None on one device.
        scored: old log-probs come from elsewhere.
        on_cpu: the objective runs on a CPU. There arithmetic is dear and memory is not, so that more is kept for the
            backward pass: logits, and with remat ``dots`` what attention is given. Logits are made in smaller chunks.
    """
    correction, kl = algorithm.rollout_correction, algorithm.kl
    needs_old = (
        scored
        or kl.where in ("reward", "advantage")
        or kl.controller == "adaptive"
        or correction.rollout_is != "none"
        or bool(correction.rollout_rs)
        or algorithm.policy_loss.loss_mode == "decoupled"
        or config.num_minibatches * config.ppo_epochs > 1
    )
    return ObjectiveConfig(
        loss=LossConfig(
            low=algorithm.clip_ratio_low,
            high=algorithm.clip_ratio_high,
            dual=algorithm.clip_ratio_c,
            own=algorithm.policy_loss,
        ),
        temperature=temperature,
        on_policy=not (needs_old or correction.bypass_mode),
        bypass=correction.bypass_mode,
        remat="dots_and_attention" if on_cpu and config.remat == "dots" else config.remat,
        mesh=mesh,
        kept_logits=KEPT_LOGITS if on_cpu and mesh is None else 0,
        targets_per_chunk=TARGETS_PER_CHUNK["cpu" if on_cpu else "accelerator"],
        entropy_coeff=algorithm.entropy_coeff,
        kl_estimator=kl.estimator if kl.where == "loss" else None,
        kl_top_k=kl.top_k,
        router_aux_loss_coef=config.router_aux_loss_coef,
    )


def routed(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """Return hidden states [R, T, D] and, if the loss needs it, the load of the experts, float32 [2, E]."""
    where: Any = {"remat": objective.remat, "mesh": objective.mesh}
    images = encode_images(model, batch, **where)
    copies = batch["copies"] if objective.router_aux_loss_coef else None
    rows = (batch["token_ids"], batch["positions"], batch["subtree_end"])
    return model(*rows, copies=copies, routed_experts=batch.get("routed_experts"), images=images, **where)


def router_loads(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> jax.Array:
    """Count the micro-batch's tokens (times layers) that chose each expert, float32 [E]."""
    _, load = routed(objective, model, batch)
    assert load is not None  # a coefficient is refused without experts
    return load[0]


def _at_targets(
    objective: ObjectiveConfig,
    head: jax.Array,
    batch: Arrays,
    hidden: jax.Array,
    *,
    top_k: int = 0,
    vocab_size: int = 0,
) -> list[jax.Array]:
    """Return log-prob and entropy of every target [R, M] and, if the batch has candidates, their log-probs [R, M, k].

    With ``top_k``, also so many likeliest ids below ``vocab_size`` at every target and their log-probs [R, M, top_k].
    """
    mesh = objective.mesh
    at_parents = jnp.take_along_axis(hidden, batch["target_parent"][..., None], axis=1)  # [R, M, D]
    rows, count, _ = at_parents.shape
    chunk = min(objective.targets_per_chunk, count)
    chunk += -chunk % (1 if mesh is None else mesh.shape["context"])
    padding = -count % chunk

    def chunks(x: jax.Array) -> jax.Array:
        """Reshape [R, M, ...] to [M / chunk, R chunk, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
        # A chunk's targets, wherever their rows' tokens are, are split over all devices but those of the vocabulary.
        return constrain(x.reshape(x.shape[0], -1, *x.shape[3:]), mesh, None, (*ROWS, "context"))

    # Targets come first in a row, so that a chunk takes from the same place of every row: the last ones may be empty.
    hidden, ids, valid = (chunks(x) for x in (at_parents, batch["target_id"], batch["target_valid"]))
    vocab_shards = 1 if mesh is None else mesh.shape["tensor"]
    kept = min(len(ids), objective.kept_logits // (4 * ids.shape[1] * len(head)))
    support, candidates = (
        chunks(batch[name]) if name in batch else None for name in ("target_support", "target_candidates")
    )
    arguments: Any = (hidden, head, ids, valid, objective.temperature, vocab_shards, kept, support, candidates)
    scored: tuple[jax.Array, ...] = linear_logprobs(*arguments)
    if top_k:
        scored += linear_top_k(
            hidden,
            head,
            valid,
            objective.temperature,
            top_k,
            vocab_size=vocab_size,
            vocab_shards=vocab_shards,
            support=support,
        )

    def whole(x: jax.Array) -> jax.Array:
        """Invert ``chunks``."""
        x = jnp.moveaxis(x.reshape(x.shape[0], rows, chunk, *x.shape[2:]), 1, 0)
        return x.reshape(rows, -1, *x.shape[3:])[:, :count]

    return [whole(x) for x in scored]


def term_logprobs(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> jax.Array:
    """Return the log-prob of every term's token, float32 [R, K], of its candidates if there are any, [R, K, k].

    It is undefined at padding.
    """
    hidden, _ = routed(objective, model, batch)
    return _at_terms(batch, _at_targets(objective, model.head, batch, hidden))[0]


def _at_terms(batch: Arrays, at_targets: Sequence[jax.Array]) -> list[jax.Array]:
    """Return log-prob and entropy at every term, [R, K], or of every candidate there, [R, K, k].

    Args:
        batch: a micro-batch.
        at_targets: see :func:`_at_targets`.
    """
    logprob, entropy, *of_candidates = at_targets
    where = batch["term_target"]
    if not of_candidates:
        return [jnp.take_along_axis(x, where, axis=1) for x in (logprob, entropy)]
    found = jnp.take_along_axis(of_candidates[0], where[..., None], axis=1)
    return [found, jnp.broadcast_to(jnp.take_along_axis(entropy, where, axis=1)[..., None], found.shape)]


def top_logprobs(
    objective: ObjectiveConfig, vocab_size: int, model: Decoder, batch: Arrays, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest ids in every target's context, int32 [R, M, count], and their log-probs, float32.

    Args:
        objective: its constants.
        vocab_size: of the policy, whose ids are meant; the model may have more.
        model: whose they are.
        batch: a micro-batch. Targets that are not valid may get zeros.
        count: at most ``vocab_size``.
    """
    hidden, _ = routed(objective, model, batch)
    *_, ids, logprobs = _at_targets(objective, model.head, batch, hidden, top_k=count, vocab_size=vocab_size)
    return ids, logprobs


def scored_terms(
    objective: ObjectiveConfig, model: Decoder, batch: Arrays, active: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Return log-prob and entropy of every active term, float32 [R, K], the load of the experts as :func:`routed`.

    Last comes, if the batch has candidates, the KL to the reference at every active term's position, float32 [R, K].

    Args:
        objective: its constants.
        model: the policy.
        batch: a micro-batch.
        active: bool [R, K]. Other terms get 0: what a loss makes of that is finite, and its weight is 0.
    """
    hidden, load = routed(objective, model, batch)
    logprob, entropy, *of_candidates = _at_targets(objective, model.head, batch, hidden)
    distances = [top_k_kl(x, batch["target_candidate_logprobs"]) for x in of_candidates]
    logprob, entropy, *distances = (
        jnp.where(active, jnp.take_along_axis(x, batch["term_target"], axis=1), 0.0)
        for x in (logprob, entropy, *distances)
    )
    return logprob, entropy, load, distances[0] if distances else None


def scored_sequences(
    objective: ObjectiveConfig, model: Decoder, batch: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return what :func:`scored_terms` does, but of candidates, if there are any, each one's log-prob, [R, K, k]."""
    hidden, load = routed(objective, model, batch)
    at_terms = _at_terms(batch, _at_targets(objective, model.head, batch, hidden))
    logprob, entropy = (jnp.where(batch["term_scored"] > 0, x, 0.0) for x in at_terms)
    return logprob, entropy, load


def router_balance(batch: Arrays, load: jax.Array | None) -> Arrays:
    """Return the load-balancing loss of a mixture of experts under its statistic's name; empty without one."""
    if load is None:
        return {}
    return {"router_aux": load_balancing_loss(load[1], batch["router_share"], batch["router_tokens"])}


def policy_loss(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> tuple[jax.Array, Statistics]:
    """Return the micro-batch's share of the loss: policy loss, minus entropy bonus, plus KL to the reference.

    Returns:
        scalar loss (a plain sum over terms; their weights make it the mean of the whole update), and statistics as
        :class:`~jax_agent_rl.learner.optimized_params.UpdatePrograms` defines them.
    """
    weight = batch["term_weight"]
    active = weight > 0
    logprob, entropy, load, distance = scored_terms(objective, model, batch, active)
    terms = _terms(objective, batch, logprob, active)
    policy = find_policy_loss(objective.loss.own.loss_mode)(terms, objective.loss)
    per_term = policy.loss * batch.get("term_importance", 1.0) - objective.entropy_coeff * entropy
    total = jnp.sum(weight * per_term)
    if distance is None and objective.kl_estimator is not None:
        distance = jnp.where(active, kl_penalty(objective.kl_estimator, logprob, batch["term_ref_logprob"]), 0.0)
    if distance is not None:
        total += jnp.sum(batch["term_kl_weight"] * distance)
    balance = router_balance(batch, load)
    total += objective.router_aux_loss_coef * sum(balance.values())
    own = terms.logprob if objective.bypass else terms.old_logprob  # in bypass mode the old ones are the rollout's own
    gap = jnp.where(active, jnp.abs(terms.rollout_logprob - own), 0.0)
    compared = active & (batch["term_comparable"] > 0) & ~jnp.isnan(gap)
    same_weights = jnp.where(compared, jnp.minimum(gap, INFINITE), 0.0)
    statistics = {
        "sum": {
            "loss": total,
            "terms": jnp.sum(terms.active),
            "clipped": jnp.sum(terms.active * policy.clipped),
            "ratio": jnp.sum(terms.active * policy.ratio),
            "kl": jnp.sum(terms.active * (terms.old_logprob - logprob)),
            "kl_loss": jnp.float32(0) if distance is None else jnp.sum(distance),
            "gap": jnp.sum(gap),
            "compared": jnp.sum(compared.astype(jnp.float32)),
            "compared_gap": jnp.sum(same_weights),
            "entropy": jnp.sum(entropy),
            **balance,
        },
        "max": {"gap": jnp.max(gap), "compared_gap": jnp.max(same_weights)},
    }
    return total, jax.lax.stop_gradient(statistics)


def _terms(objective: ObjectiveConfig, batch: Arrays, logprob: jax.Array, active: jax.Array) -> Terms:
    old = jax.lax.stop_gradient(logprob) if objective.on_policy else batch["term_old_logprob"]
    rollout = batch["term_rollout_logprob"]
    rollout = jnp.where(jnp.isnan(rollout), old, rollout)  # an observation that is trained on: nobody sampled it
    return Terms(
        logprob=logprob,
        old_logprob=jnp.where(active, old, 0.0),
        rollout_logprob=jnp.where(active, rollout, 0.0),
        advantage=batch["term_advantage"],
        active=active.astype(jnp.float32),
        sequence=batch["term_sequence"],
        chosen=batch.get("term_chosen", jnp.zeros_like(logprob)),
    )


# --- the critic's loss ------------------------------------------------------------------------------------------------


def state_values(critic: Critic, batch: Arrays, *, remat: str, mesh: Mesh | None = None) -> jax.Array:
    """Return the value of the state after every token, float32 [R, T]."""
    images = encode_images(critic, batch, remat=remat, mesh=mesh)
    rows = (batch["token_ids"], batch["positions"], batch["subtree_end"])
    hidden, _ = critic(*rows, images=images, remat=remat, mesh=mesh)  # [R, T, D]
    return jnp.einsum("rtd,d->rt", hidden, critic.value_head[...], preferred_element_type=jnp.float32)


def value_loss(
    critic: Critic, batch: Arrays, *, cliprange: float, remat: str, mesh: Mesh | None = None
) -> tuple[jax.Array, Statistics]:
    """Return the micro-batch's share of the clipped value loss, and statistics for :class:`UpdatePrograms`.

    The value of a term is that of the state its token was sampled in, its parent's.
    """
    values = state_values(critic, batch, remat=remat, mesh=mesh)
    parents = jnp.take_along_axis(batch["target_parent"], batch["term_target"], axis=1)
    term_values = jnp.take_along_axis(values, parents, axis=1)
    weight, returns = batch["term_weight"], batch["term_returns"]
    active = weight > 0
    loss, clipped = clipped_value(term_values, batch["term_old_value"], returns, cliprange)
    total = jnp.sum(jnp.where(active, weight * loss, 0.0))
    statistics = {
        "sum": {
            "loss": total,
            "terms": jnp.sum(active, dtype=jnp.float32),
            "clipped": jnp.sum(jnp.where(active, clipped, 0.0)),
            "value": jnp.sum(jnp.where(active, term_values, 0.0)),
            "returns": jnp.sum(jnp.where(active, returns, 0.0)),
            "squared_returns": jnp.sum(jnp.where(active, jnp.square(returns), 0.0)),
            "squared_error": jnp.sum(jnp.where(active, jnp.square(term_values - returns), 0.0)),
        },
        "max": {},
    }
    return total, jax.lax.stop_gradient(statistics)


def clipped_value(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, cliprange: float
) -> tuple[jax.Array, jax.Array]:
    """Return ``max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2`` per term, and 1.0 where clipping raises it.

    References: PPO's value clipping, as in Engstrom et al. 2020, Implementation Matters, arXiv 2005.12729.
    """
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, old_values - cliprange, old_values + cliprange) - returns)
    loss = jnp.maximum(plain, clipped)
    return loss / 2, changed(loss, plain)
