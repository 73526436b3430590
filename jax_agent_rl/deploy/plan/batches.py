"""Micro-batches of the shapes a run trains on, made the way a run makes them, of a group that nobody sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.learner.batch import pack
from jax_agent_rl.learner.experience import Scores, build_experience, mini_batch_terms
from jax_agent_rl.learner.image_packing import ImagePacking, blanks, image_packing
from jax_agent_rl.learner.losses.covariance import SELECTORS
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn

Arrays = Mapping[str, np.ndarray]
_SAMPLED = (5, 6)


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """One of each kind, the largest: of models that see, with pictures.

    Attributes:
        policy: for the policy's gradient.
        critic: for the critic's; None without one.
        layout: for passes that score.
    """

    policy: Arrays
    critic: Arrays | None
    layout: Arrays


def micro_batches(config: Config, model: DecoderConfig, *, rows: int, scored: bool) -> MicroBatches:
    """Those of a run.

    Args:
        rows: of a micro-batch, over all shards.
        scored: the run computes old log-probs before it trains.
    """
    images = image_packing(VisionProcessor.of(model, config.model.path, pixels=config.model.pixels), config.learner)
    trajectories = [_trajectory(number) for number in range(2)]
    learner, algorithm = config.learner, config.algorithm
    batch, _ = pack(
        trajectories, pack_length=learner.pack_length, share_prefixes=learner.share_prefixes, vision_processor=images
    )
    with_critic = algorithm.adv_estimator == "gae"
    if not with_critic:  # others may ask for tool calls, branches or reward parts, and all give the same terms
        algorithm = algorithm.model_copy(update={"adv_estimator": "grpo"})
    per_term, per_state = ([np.zeros(len(_SAMPLED) + n) for _ in trajectories] for n in (0, 1))
    scores = Scores(
        old=per_term if scored else None,
        ref=per_term if algorithm.kl.where != "none" else None,
        values=per_state if with_critic else None,
    )
    made = build_experience(
        [Group(group_id="g", trajectories=tuple(trajectories))], algorithm, scores, kl_coef=0.0, masked=()
    )
    policy, critic = mini_batch_terms(made, slice(None), algorithm, kl_coef=0.0)
    if algorithm.policy_loss.loss_mode in SELECTORS:
        policy["chosen"] = per_term
    first = {
        name: _largest(next(replace(batch, terms={}).with_terms(**terms).micro_batches(rows)), images)
        for name, terms in (("policy", policy), ("critic", critic), ("layout", {}))
    }
    return MicroBatches(
        policy=first["policy"] | _balance(model, learner.router_aux_loss_coef),
        critic=first["critic"] if with_critic else None,
        layout=first["layout"],
    )


def _largest(arrays: Arrays, images: ImagePacking | None) -> dict[str, np.ndarray]:
    return dict(arrays) if images is None else list(blanks(arrays, images))[-1]


def _balance(model: DecoderConfig, coefficient: float) -> dict[str, np.ndarray]:
    if not coefficient or model.experts is None:
        return {}
    return {"router_share": np.zeros(model.experts.count, np.float32), "router_tokens": np.zeros((), np.float32)}


def _trajectory(number: int) -> Trajectory:
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
