"""The largest micro-batches of a run, made of trajectories that nobody sampled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.config.rollout import restricts_sampling
from jax_agent_rl.learner.batch import pack
from jax_agent_rl.learner.experience import Scores, build_experience, mini_batch_terms
from jax_agent_rl.learner.image_packing import blanks, image_packing
from jax_agent_rl.learner.losses.covariance import SELECTORS
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.utils.sampling_support import mask_words

Arrays = Mapping[str, np.ndarray]

_SAMPLED = (5, 6)


def micro_batches(config: Config, model: DecoderConfig, *, rows: int, scored: bool) -> dict[str, Arrays]:
    """Build the largest micro-batches; with images for a vision model.

    Args:
        config: configuration of the run.
        model: its architecture.
        rows: rows of a micro-batch, over all shards.
        scored: the run computes old log-probs before it trains.

    Returns:
        The micro-batches of ``policy`` and, if there is one, ``critic``, and the ``layout`` of passes that score.
    """
    learner, algorithm = config.learner, config.algorithm
    images = image_packing(VisionProcessor.of(model, config.model.path, pixels=config.model.pixels), learner)
    trajectories = [_make_trajectory(number) for number in range(2)]
    batch, _ = pack(
        trajectories, pack_length=learner.pack_length, share_prefixes=learner.share_prefixes, image_packing=images
    )
    with_critic = algorithm.adv_estimator == "gae"
    if not with_critic:  # others may ask for tool calls, branches or reward parts, and all give the same terms
        algorithm = algorithm.model_copy(update={"adv_estimator": "grpo"})
    per_term, per_state = ([np.zeros(len(_SAMPLED) + n) for _ in trajectories] for n in (0, 1))
    shape = (len(_SAMPLED), algorithm.kl.top_k)
    candidates = [(np.zeros(shape, np.int32), np.zeros(shape, np.float32)) for _ in trajectories]
    ref = candidates if algorithm.kl.top_k else per_term
    scores = Scores(
        old=per_term if scored else None,
        ref=ref if algorithm.kl.where != "none" else None,
        values=per_state if with_critic else None,
    )
    group = Group(group_id="g", trajectories=tuple(trajectories))
    experience = build_experience([group], algorithm, scores, kl_coef=0.0, masked=())
    policy, critic = mini_batch_terms(experience, slice(None), algorithm, kl_coef=0.0)
    if algorithm.policy_loss.loss_mode in SELECTORS:
        policy["chosen"] = per_term
    made: dict[str, dict[str, np.ndarray]] = {}
    for name, terms in (("policy", policy), ("layout", {}), *([("critic", critic)] if with_critic else [])):
        own = batch.with_terms(**terms)
        if name == "policy" and experience.candidates is not None:
            own = own.with_candidates(*zip(*experience.candidates, strict=True))
        first = next(own.micro_batches(rows))
        made[name] = dict(first) if images is None else list(blanks(first, images))[-1]
        made[name] |= _replayed(config, model, first)
    if learner.router_aux_loss_coef and model.experts is not None:
        made["policy"]["router_share"] = np.zeros(model.experts.count, np.float32)
        made["policy"]["router_tokens"] = np.zeros((), np.float32)
    return dict(made)


def replays_supports(config: Config) -> bool:
    """Return whether training samples from parts of the vocabulary, which the learner then scores."""
    return restricts_sampling(config.rollout) or config.agent.constrain_tool_calls


def _replayed(config: Config, model: DecoderConfig, batch: Arrays) -> dict[str, np.ndarray]:
    """Return what engines report of draws, supports and experts, as arrays that take no memory here."""
    made: dict[str, np.ndarray] = {}
    if replays_supports(config):
        shape = (*batch["target_id"].shape, mask_words(model.vocab_size))
        made["target_support"] = np.broadcast_to(np.uint32(0), shape)
    if model.experts is not None:
        shape = (*batch["token_ids"].shape, model.num_layers, model.experts.per_token)
        made["routed_experts"] = np.broadcast_to(np.int16(0), shape)
    return made


def _make_trajectory(number: int) -> Trajectory:
    count = len(_SAMPLED)
    output = TokenOutput(
        token_ids=_SAMPLED,
        log_probs=(-1.0,) * count,
        policy_versions=(0,) * count,
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Trajectory.from_turns(
        prompt_ids=(3, 4),
        turns=[Turn(output=output)],
        trajectory_id=f"g-{number}",
        group_id="g",
        agent_name="plan",
        finish_reason=FinishReason.ANSWER,
        reward=float(number),
    )
