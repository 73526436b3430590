"""The differentiable part: packed rows to the weighted loss of the policy.

Shapes: R rows, T tokens, M targets, K terms, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.comparison import INFINITE
from jax_agent_rl.learner.image_packing import encode_images
from jax_agent_rl.learner.linear_logprobs import linear_logprobs, linear_top_k
from jax_agent_rl.learner.losses.kl import kl_penalty, top_k_kl
from jax_agent_rl.learner.losses.policy import LossConfig, Terms, find_policy_loss
from jax_agent_rl.learner.optimized_params import Arrays, Statistics
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.moe import load_balancing_loss
from jax_agent_rl.models.sharding import ROWS, constrain

TARGETS_PER_CHUNK = {"cpu": 256, "accelerator": 4096}
"""Targets of a row whose logits are computed together.

On a CPU, a small chunk stays in the cache. On accelerators a small chunk would be slow: each chunk
reads and writes the gradient of the whole head, which takes longer than its products."""

KEPT_LOGITS = 2**30
"""Bytes of logits that a micro-batch may keep on a CPU for its backward pass."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the compiled objective.

    Attributes:
        temperature: the rollout's sampling temperature; log-probs are of logits / temperature.
        remat: what the backward pass recomputes, see ``models.decoder.Decoder``.
        mesh: the devices of parameters and batch; None for a single device.
        on_policy: the old log-probs are from this pass (one update per rollout batch).
        bypass: the old log-probs are the rollout's.
        kept_logits: bytes of logits that a micro-batch keeps for its backward pass. The others are
            recomputed.
        targets_per_chunk: targets of a row whose logits are computed together.
        kl_estimator: of the KL term in the loss; None without one.
        kl_top_k: number of ids of each position over which the KL term is exact. 0: the KL is
            estimated from the sampled id.
        router_aux_loss_coef: coefficient of the load-balancing loss of a mixture of experts.
        observation_coef: coefficient of the observation loss; 0: there is none.
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
    observation_coef: float = 0.0


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

    The old log-probs of a single update come from its own forward pass, unless something needs
    them before it.

    Args:
        algorithm: losses, KL and corrections.
        config: batching and rematerialisation.
        temperature: the rollout's sampling temperature.
        mesh: the devices of parameters and batch; None for a single device.
        scored: old log-probs come from elsewhere.
        on_cpu: the objective runs on a CPU, where memory is cheaper than arithmetic. So more is
            kept for the backward pass: logits, and with remat ``dots`` the inputs of attention. The
            chunks of logits are smaller.
    """
    correction = algorithm.rollout_correction
    kl = algorithm.kl
    needs_old = (
        scored
        or kl.where in ("reward", "advantage")
        or kl.controller == "adaptive"
        or correction.rollout_is != "none"
        or bool(correction.rollout_rs)
        or algorithm.policy_loss.loss_mode == "decoupled"
        or config.num_minibatches * config.ppo_epochs > 1
    )
    remat = config.remat
    kept_logits = 0
    targets_per_chunk = TARGETS_PER_CHUNK["accelerator"]
    if on_cpu:
        targets_per_chunk = TARGETS_PER_CHUNK["cpu"]
        if remat == "dots":
            remat = "dots_and_attention"
        if mesh is None:
            kept_logits = KEPT_LOGITS

    return ObjectiveConfig(
        loss=LossConfig(
            low=algorithm.clip_ratio_low,
            high=algorithm.clip_ratio_high,
            dual=algorithm.clip_ratio_c,
            policy_loss=algorithm.policy_loss,
        ),
        temperature=temperature,
        on_policy=not (needs_old or correction.bypass_mode),
        bypass=correction.bypass_mode,
        remat=remat,
        mesh=mesh,
        kept_logits=kept_logits,
        targets_per_chunk=targets_per_chunk,
        entropy_coeff=algorithm.entropy_coeff,
        kl_estimator=kl.estimator if kl.where == "loss" else None,
        kl_top_k=kl.top_k,
        router_aux_loss_coef=config.router_aux_loss_coef,
        observation_coef=algorithm.observation_loss.coef,
    )


def routed(
    objective: ObjectiveConfig, model: Decoder, batch: Arrays
) -> tuple[jax.Array, jax.Array | None]:
    """Return hidden states [R, T, D], and the load of the experts, float32 [2, E].

    The load is None if no loss needs it.
    """
    images = encode_images(model, batch, remat=objective.remat, mesh=objective.mesh)
    return model(
        batch["token_ids"],
        batch["positions"],
        batch["subtree_end"],
        copies=batch["copies"] if objective.router_aux_loss_coef else None,
        routed_experts=batch.get("routed_experts"),
        images=images,
        remat=objective.remat,
        mesh=objective.mesh,
    )


def router_loads(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> jax.Array:
    """Count the micro-batch's tokens (times layers) that chose each expert, float32 [E]."""
    _, load = routed(objective, model, batch)
    assert load is not None  # a coefficient is refused without experts
    return load[0]


def _at_targets(
    objective: ObjectiveConfig,
    model: Decoder,
    batch: Arrays,
    hidden: jax.Array,
    *,
    top_k: int = 0,
    vocab_size: int = 0,
) -> list[jax.Array]:
    """Return log-prob and entropy of every target, [R, M] each.

    If the batch has candidates, their log-probs follow, [R, M, k]. With ``top_k``, that many
    likeliest ids below ``vocab_size`` at every target follow, and their log-probs, [R, M, top_k].
    """
    mesh = objective.mesh
    at_parents = jnp.take_along_axis(hidden, batch["target_parent"][..., None], axis=1)  # [R, M, D]
    rows, count, _ = at_parents.shape
    chunk = min(objective.targets_per_chunk, count)
    context_shards = 1 if mesh is None else mesh.shape["context"]
    chunk += -chunk % context_shards
    padding = -count % chunk

    def split(x: jax.Array) -> jax.Array:
        """Reshape [R, M, ...] to [M / chunk, R chunk, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        # Wherever the tokens of a row are, the targets of a chunk are split over all devices but
        # those that split the vocabulary.
        return constrain(x, mesh, None, (*ROWS, "context"))

    def split_if_given(name: str) -> jax.Array | None:
        return split(batch[name]) if name in batch else None

    # Valid targets come first in a row, and a chunk takes the same range of every row: so the last
    # chunks may be empty, and cost nothing.
    hidden = split(at_parents)
    ids = split(batch["target_id"])
    valid = split(batch["target_valid"])
    support = split_if_given("target_support")
    candidates = split_if_given("target_candidates")

    vocab_shards = 1 if mesh is None else mesh.shape["tensor"]
    head = model.head
    chunk_bytes = 4 * ids.shape[1] * len(head)
    kept_chunks = min(len(ids), objective.kept_logits // chunk_bytes)
    scored: tuple[jax.Array, ...] = linear_logprobs(
        hidden,
        head,
        ids,
        valid,
        objective.temperature,
        vocab_shards,
        kept_chunks,
        model.config.logit_softcap,
        support,
        candidates,
        mesh,
    )
    if top_k:
        scored += linear_top_k(
            hidden,
            head,
            valid,
            objective.temperature,
            top_k,
            vocab_size=vocab_size,
            vocab_shards=vocab_shards,
            softcap=model.config.logit_softcap,
            support=support,
        )

    def join(x: jax.Array) -> jax.Array:
        """Invert ``split``."""
        x = jnp.moveaxis(x.reshape(x.shape[0], rows, chunk, *x.shape[2:]), 1, 0)
        return x.reshape(rows, -1, *x.shape[3:])[:, :count]

    return [join(x) for x in scored]


def term_logprobs(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> jax.Array:
    """Return the log-prob of every term's token, float32 [R, K].

    If the batch has candidates, return theirs, [R, K, k]. Values are undefined at padding.
    """
    hidden, _ = routed(objective, model, batch)
    logprob, _ = _at_terms(batch, _at_targets(objective, model, batch, hidden))
    return logprob


def _at_terms(batch: Arrays, at_targets: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return log-prob and entropy of every term, [R, K], or of its candidates, [R, K, k]."""
    logprob, entropy, *candidate_logprobs = at_targets
    target = batch["term_target"]
    term_entropy = jnp.take_along_axis(entropy, target, axis=1)
    if not candidate_logprobs:
        return jnp.take_along_axis(logprob, target, axis=1), term_entropy

    term_logprobs = jnp.take_along_axis(candidate_logprobs[0], target[..., None], axis=1)
    return term_logprobs, jnp.broadcast_to(term_entropy[..., None], term_logprobs.shape)


def top_logprobs(
    objective: ObjectiveConfig, vocab_size: int, model: Decoder, batch: Arrays, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest ids in every target's context, and their log-probs.

    Args:
        vocab_size: vocabulary size of the policy. The model may have more ids; these are left out.
        model: a policy or a teacher.
        batch: a micro-batch. Targets that are not valid may get zeros.
        count: at most ``vocab_size``.

    Returns:
        int32 and float32 [R, M, count].
    """
    hidden, _ = routed(objective, model, batch)
    *_, ids, logprobs = _at_targets(
        objective,
        model,
        batch,
        hidden,
        top_k=count,
        vocab_size=vocab_size,
    )
    return ids, logprobs


def scored_terms(
    objective: ObjectiveConfig,
    model: Decoder,
    batch: Arrays,
    active: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Score the active terms of a micro-batch.

    Args:
        active: bool [R, K]. Other terms get 0: then their loss is finite, and its weight is 0.

    Returns:
        log-prob and entropy of every active term, float32 [R, K]; the load of the experts, see
        :func:`routed`; the KL to the reference over the candidates at every active term, float32
        [R, K], None without candidates; the log-prob of every target, float32 [R, M].
    """
    hidden, load = routed(objective, model, batch)
    logprob, entropy, *candidate_logprobs = _at_targets(objective, model, batch, hidden)

    def at_active_terms(x: jax.Array) -> jax.Array:
        return jnp.where(active, jnp.take_along_axis(x, batch["term_target"], axis=1), 0.0)

    distance = None
    if candidate_logprobs:
        distance = top_k_kl(candidate_logprobs[0], batch["target_candidate_logprobs"])
        distance = at_active_terms(distance)
    return at_active_terms(logprob), at_active_terms(entropy), load, distance, logprob


def scored_sequences(
    objective: ObjectiveConfig,
    model: Decoder,
    batch: Arrays,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Score the terms of given sequences.

    Returns:
        log-prob and entropy of every term, [R, K], or of every candidate, [R, K, k], if there are
        any; and the load of the experts, see :func:`routed`.
    """
    hidden, load = routed(objective, model, batch)
    logprob, entropy = _at_terms(batch, _at_targets(objective, model, batch, hidden))
    is_scored = batch["term_scored"] > 0
    return jnp.where(is_scored, logprob, 0.0), jnp.where(is_scored, entropy, 0.0), load


def router_balance(batch: Arrays, load: jax.Array | None) -> Arrays:
    """Return the load-balancing loss of a mixture of experts by name; empty without one."""
    if load is None:
        return {}
    return {
        "router_aux": load_balancing_loss(load[1], batch["router_share"], batch["router_tokens"])
    }


def policy_loss(
    objective: ObjectiveConfig, model: Decoder, batch: Arrays
) -> tuple[jax.Array, Statistics]:
    """Return a micro-batch's share of the loss.

    It is the policy loss, minus the entropy bonus, plus the KL to the reference, the observation
    loss and the load-balancing loss.

    Returns:
        scalar loss (a plain sum over terms; their weights make it the mean of the whole update),
        and statistics as :class:`~jax_agent_rl.learner.optimized_params.UpdatePrograms` defines
        them.
    """
    weight = batch["term_weight"]
    active = weight > 0
    logprob, entropy, load, distance, target_logprob = scored_terms(objective, model, batch, active)
    terms = _terms(objective, batch, logprob, active)

    policy = find_policy_loss(objective.loss.policy_loss.loss_mode)(terms, objective.loss)
    per_term = policy.loss * batch.get("term_importance", 1.0) - objective.entropy_coeff * entropy
    total = jnp.sum(weight * per_term)

    if distance is None and objective.kl_estimator is not None:
        penalty = kl_penalty(objective.kl_estimator, logprob, batch["term_ref_logprob"])
        distance = jnp.where(active, penalty, 0.0)
    if distance is not None:
        total += jnp.sum(batch["term_kl_weight"] * distance)

    auxiliary = {}
    if objective.observation_coef:
        observation_loss = _observation_loss(batch["target_observation_weight"], target_logprob)
        auxiliary["observation_loss"] = observation_loss
        total += objective.observation_coef * observation_loss

    balance = router_balance(batch, load)
    total += objective.router_aux_loss_coef * sum(balance.values())

    # The gap between engine and learner. In bypass mode the old log-probs are the engine's.
    learner_logprob = terms.logprob if objective.bypass else terms.old_logprob
    gap = jnp.where(active, jnp.abs(terms.rollout_logprob - learner_logprob), 0.0)
    compared = active & (batch["term_comparable"] > 0) & ~jnp.isnan(gap)
    compared_gap = jnp.where(compared, jnp.minimum(gap, INFINITE), 0.0)
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
            "compared_gap": jnp.sum(compared_gap),
            "entropy": jnp.sum(entropy),
            **balance,
            **auxiliary,
        },
        "max": {"gap": jnp.max(gap), "compared_gap": jnp.max(compared_gap)},
    }
    return total, jax.lax.stop_gradient(statistics)


def _observation_loss(weight: jax.Array, logprob: jax.Array) -> jax.Array:
    """Return a micro-batch's share of the mean negative log-prob of observed ids, [R, M] each."""
    return -jnp.sum(weight * jnp.where(weight > 0, logprob, 0.0))


def _terms(
    objective: ObjectiveConfig,
    batch: Arrays,
    logprob: jax.Array,
    active: jax.Array,
) -> Terms:
    """Return everything a policy loss may look at."""
    old = jax.lax.stop_gradient(logprob) if objective.on_policy else batch["term_old_logprob"]
    rollout = batch["term_rollout_logprob"]
    # NaN marks an observation that is trained on: nobody sampled it, so it is never off-policy.
    rollout = jnp.where(jnp.isnan(rollout), old, rollout)
    return Terms(
        logprob=logprob,
        old_logprob=jnp.where(active, old, 0.0),
        rollout_logprob=jnp.where(active, rollout, 0.0),
        advantage=batch["term_advantage"],
        active=active.astype(jnp.float32),
        sequence=batch["term_sequence"],
        chosen=batch.get("term_chosen", jnp.zeros_like(logprob)),
    )
