"""The ``algorithm`` and ``critic`` sections, and the combinations of their keys that are refused.

Names follow verl.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from jax_agent_rl.config.base import (
    Expression,
    NonNegative,
    OrInstalled,
    Positive,
    Section,
    Unless,
    WhenKey,
)
from jax_agent_rl.config.kl import KLConfig
from jax_agent_rl.config.learner import OptimizerSection

AdvEstimator = Annotated[Literal[
    "grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg", "gdpo", "remax", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "gae", "gigpo", "mt_grpo", "igpo", "tree_grpo", "treerl",
    "arpo", "rae", "none",
], OrInstalled("advantages")]  # fmt: skip
LossMode = Annotated[Literal[
    "vanilla", "decoupled", "gspo", "geo_mean", "cispo", "gpg", "sapo", "clip_cov", "kl_cov",
    "dppo_tv", "dppo_kl", "dro",
], OrInstalled("losses")]  # fmt: skip
LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
RejectionRule = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
FilterAction = Literal["off", "mask", "drop"]
Bounds = tuple[float, float]

ADV_ESTIMATORS: tuple[str, ...] = get_args(get_args(AdvEstimator)[0])
LOSS_MODES: tuple[str, ...] = get_args(get_args(LossMode)[0])
FILTER_NAMES: tuple[str, ...] = (
    "void_turn",
    "void_trajectory",
    "all_tool_calls_failed",
    "overlong",
    "repetition",
)

WITHOUT_GROUP_BASELINE: frozenset[str] = frozenset(
    {"gae", "reinforce_plus_plus", "remax", "rae", "none"}
)
"""Estimators with advantages even in a group of one, or of equal rewards."""

_BY_TURNS: frozenset[str] = frozenset({"gae", "reinforce_plus_plus", "remax", "gigpo", "igpo"})
"""Estimators for which it matters which turn earned a reward, not only the total."""

_with_estimator = functools.partial(WhenKey, "algorithm.adv_estimator")
_with_loss = functools.partial(WhenKey, "algorithm.policy_loss.loss_mode")
_CLIPPED = _with_loss(
    "vanilla",
    "decoupled",
    "gspo",
    "geo_mean",
    "cispo",
    "clip_cov",
    "dppo_tv",
    "dppo_kl",
    plugins=True,
)
_PER_SEQUENCE = Unless("algorithm.loss_agg_mode", "token-mean", "token-sum")
_WEIGHTED = Unless("algorithm.rollout_correction.rollout_is", "none")


class GigpoConfig(Section):
    """GiGPO (adv_estimator: gigpo), arXiv 2505.10978."""

    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount from turn to turn.")
    step_advantage_w: float = Field(
        default=1.0, ge=0, description="Weight of the step advantage relative to the episode's."
    )
    mode: Literal["mean_norm", "mean_std_norm"] = Field(
        default="mean_norm",
        description="Subtract the group's mean, or also divide by its standard deviation.",
    )
    similarity: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Observations at least this similar share an anchor; 1: equal ids only.",
    )


class IgpoConfig(Section):
    """IGPO's credit of turns (adv_estimator: igpo), arXiv 2510.14967."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount from turn to turn.")


class GdpoConfig(Section):
    """GDPO (adv_estimator: gdpo): each named part of the reward is normalized separately."""

    reward_keys: tuple[str, ...] = Field(
        default=(), description="Keys of the reward function's dict."
    )
    reward_weights: tuple[float, ...] = Field(
        default=(), description="One weight per key; empty: all 1."
    )


class PolicyLossConfig(Section):
    """The policy loss, and keys of individual losses."""

    loss_mode: LossMode = Field(
        default="vanilla", description="Policy loss; vanilla is PPO's clipped surrogate."
    )
    behav_imp_weight_cap: Annotated[float, _with_loss("decoupled")] = Field(
        default=5.0,
        gt=0,
        description="decoupled: tokens with a larger proximal/behaviour ratio are excluded.",
    )
    tau_pos: Annotated[float, _with_loss("sapo")] = Field(
        default=1.0, gt=0, description="sapo: temperature of the gate for positive advantages."
    )
    tau_neg: Annotated[float, _with_loss("sapo")] = Field(
        default=1.05, gt=0, description="sapo: temperature of the gate for other advantages."
    )
    clip_cov_ratio: Annotated[float, _with_loss("clip_cov")] = Field(
        default=2e-4, gt=0, le=1, description="clip_cov: share of the tokens excluded."
    )
    clip_cov_lb: Annotated[float, _with_loss("clip_cov")] = Field(
        default=1.0, description="clip_cov: lower bound of the covariances to choose from."
    )
    clip_cov_ub: Annotated[float, _with_loss("clip_cov")] = Field(
        default=5.0, description="clip_cov: upper bound of the covariances to choose from."
    )
    kl_cov_ratio: Annotated[float, _with_loss("kl_cov")] = Field(
        default=2e-4, gt=0, le=1, description="kl_cov: share of the tokens penalized."
    )
    ppo_kl_coef: Annotated[float, _with_loss("kl_cov")] = Field(
        default=1.0, ge=0, description="kl_cov: weight of |log-ratio| on the penalized tokens."
    )
    dppo_ratio_cap: Annotated[float, _with_loss("dppo_tv", "dppo_kl")] = Field(
        default=20.0,
        gt=1,
        description="dppo_tv, dppo_kl: upper bound at which the ratio is truncated.",
    )
    dro_beta: Annotated[float, _with_loss("dro")] = Field(
        default=0.05, gt=0, description="dro: weight of the quadratic log-ratio penalty."
    )


class RolloutCorrectionConfig(Section):
    """Correction for rollouts whose log-probs differ from the learner's.

    They come from another engine, or from older weights.
    """

    rollout_is: Literal["none", "token", "sequence"] = Field(
        default="none", description="Level of the importance weights."
    )
    rollout_is_threshold: Annotated[float | Bounds, _WEIGHTED] = Field(
        default=2.0,
        description=(
            "One number: weights are truncated to it (TIS). [low, high]: weights outside become 0"
            " (IcePop)."
        ),
    )
    rollout_is_batch_normalize: Annotated[bool, _WEIGHTED] = Field(
        default=False, description="Divide the weights by their mean."
    )
    rollout_rs: tuple[RejectionRule, ...] = Field(
        default=(), description="Reject tokens or sequences that fail any of these rules."
    )
    rollout_rs_threshold: tuple[float | Bounds, ...] = Field(
        default=(),
        description=(
            "One threshold per rule, or one for all: an upper bound; for k1 rules, of the ratio, or"
            " [low, high]."
        ),
    )
    bypass_mode: bool = Field(
        default=False,
        description=(
            "Use the rollout's log-probs as old log-probs, without the learner's scoring pass."
        ),
    )


class FiltersConfig(Section):
    """Trajectories to exclude from training.

    mask: the reward still counts in the baseline of its group. drop: it does not.
    """

    void_turn: FilterAction = Field(
        default="off",
        description="Some turn has neither a tool call nor a final answer (SimpleTIR).",
    )
    void_trajectory: FilterAction = Field(
        default="off", description="No turn has a tool call or a final answer."
    )
    all_tool_calls_failed: FilterAction = Field(
        default="off", description="There are tool calls, and each ended in an error."
    )
    overlong: FilterAction = Field(
        default="off", description="A limit of tokens or turns truncated the trajectory (DAPO)."
    )
    repetition: FilterAction = Field(
        default="off", description="The share of repeated n-grams exceeds `max_repetition`."
    )
    max_repetition: Annotated[float, Unless("algorithm.filters.repetition", "off")] = Field(
        default=0.5, ge=0, lt=1, description="repetition: maximum share of repeated n-grams."
    )
    final_answer: Annotated[
        Expression | None,
        Unless("algorithm.filters.void_turn", "off")
        | Unless("algorithm.filters.void_trajectory", "off"),
    ] = Field(
        default=None,
        description=(
            "void_turn, void_trajectory: regular expression of a final answer; null: any text."
        ),
    )


def _holds_feedback(template: str) -> str:
    if "{feedback}" not in template:
        raise ValueError("must contain {feedback}, which stands for what was said")
    return template


class FeedbackConfig(Section):
    """What the policy sees of feedback when it teaches itself."""

    template: Annotated[str, AfterValidator(_holds_feedback)] = Field(
        default=(
            "An earlier attempt at this had the following feedback:\n{feedback}\nTake it into"
            " account."
        ),
        description="User message at the end of the prompt; {feedback} stands for what was said.",
    )
    max_length: Positive = Field(
        default=256, description="Tokens of the feedback; a longer one loses its middle."
    )


class ObservationLossConfig(Section):
    """An auxiliary loss that predicts what tools and environments answer (ECHO, 2605.24517)."""

    coef: float = Field(
        default=0.0, ge=0, description="Weight of the loss beside the policy's; 0 is off."
    )
    template: Annotated[bool, WhenKey("algorithm.observation_loss.coef")] = Field(
        default=False,
        description=(
            "Predict the ids as well that the chat template writes around each message; false"
            " leaves them out."
        ),
    )


class ShapingConfig(Section):
    """Penalties on a trajectory's reward before advantages are computed."""

    overlong_buffer: NonNegative = Field(
        default=0,
        description=(
            "Tokens before agent.max_response_length over which the penalty grows from 0 (DAPO); 0"
            " is off."
        ),
    )
    overlong_factor: Annotated[float, WhenKey("algorithm.shaping.overlong_buffer")] = Field(
        default=1.0, gt=0, description="Maximum overlong penalty."
    )
    repetition_factor: float = Field(
        default=0.0, ge=0, description="Penalty of a response that consists of repetitions only."
    )
    repetition_ngram: Annotated[
        Positive,
        WhenKey("algorithm.shaping.repetition_factor")
        | Unless("algorithm.filters.repetition", "off"),
    ] = Field(
        default=20, description="Length in tokens of an n-gram, for the penalty and the filter."
    )


class AlgorithmConfig(Section):
    """The objective."""

    adv_estimator: AdvEstimator = Field(
        default="grpo",
        description="Advantage estimator; none: rewards are not learned from, only `kl` is.",
    )
    gamma: Annotated[float, _with_estimator("gae", "reinforce_plus_plus", plugins=True)] = Field(
        default=1.0,
        gt=0,
        le=1,
        description="gae, reinforce_plus_plus: discount from token to token.",
    )
    lam: Annotated[float, _with_estimator("gae", plugins=True)] = Field(
        default=1.0, ge=0, le=1, description="gae: lambda."
    )
    bootstrap: Annotated[Literal["none", "truncated"], _with_estimator("gae")] = Field(
        default="none",
        description=(
            "gae: value after the last token: 0, or the critic's if a limit truncated the"
            " trajectory."
        ),
    )
    gigpo: Annotated[GigpoConfig, _with_estimator("gigpo")] = Field(default_factory=GigpoConfig)
    igpo: Annotated[IgpoConfig, _with_estimator("igpo")] = Field(default_factory=IgpoConfig)
    gdpo: Annotated[GdpoConfig, _with_estimator("gdpo")] = Field(default_factory=GdpoConfig)
    turn_reward: Annotated[
        Literal["none", "tool_reward", "tool_success", "progress"],
        Unless("algorithm.adv_estimator", "gdpo"),
    ] = Field(
        default="none",
        description=(
            "Reward of a turn. tool_reward: the sum of its tool calls' rewards. tool_success: the"
            " share of calls without an error. progress: what it added to the partial score, which"
            " divides the reward among the turns."
        ),
    )
    turn_advantage_coef: Annotated[float, _with_estimator("mt_grpo")] = Field(
        default=1.0, gt=0, description="mt_grpo: weight of the turn advantage."
    )
    shared_tokens: Annotated[Literal["hard", "soft"], _with_estimator("arpo")] = Field(
        default="hard",
        description=(
            "arpo: advantage of tokens that several trajectories share. hard: the mean. soft: each"
            " trajectory's own."
        ),
    )
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    clip_ratio_low: Annotated[float, _CLIPPED] = Field(
        default=0.2,
        gt=0,
        description=(
            "Clip range below 1; 1 or more: no lower bound (geo_mean: of the log; dppo: of the"
            " divergence)."
        ),
    )
    clip_ratio_high: Annotated[float, _CLIPPED] = Field(
        default=0.28, gt=0, description="Clip range above 1 (clip-higher)."
    )
    clip_ratio_c: Annotated[float | None, _with_loss("vanilla", "decoupled", plugins=True)] = Field(
        default=3.0,
        gt=1,
        description="Dual clip: bound on the ratio of negative advantages; null: no bound.",
    )
    loss_agg_mode: LossAggMode = Field(
        default="token-mean",
        description=(
            "How token losses are averaged. The average is over the whole batch, however it is"
            " split."
        ),
    )
    loss_scale_factor: Annotated[
        Positive | None, WhenKey("algorithm.loss_agg_mode", "seq-mean-token-sum-norm")
    ] = Field(
        default=None,
        description=(
            "seq-mean-token-sum-norm: the constant that replaces a sequence's length (Dr. GRPO)."
        ),
    )
    segment_weight: Annotated[Literal["session", "segment"], _PER_SEQUENCE] = Field(
        default="session",
        description=(
            "What loss_agg_mode counts as one sequence. session: a trajectory with all its"
            " segments, so that its weight does not depend on their number. segment: every segment,"
            " as if it were a trajectory."
        ),
    )
    entropy_coeff: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    kl: KLConfig = Field(default_factory=KLConfig)
    feedback: Annotated[FeedbackConfig, WhenKey("algorithm.kl.reference", "feedback")] = Field(
        default_factory=FeedbackConfig
    )
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    filter_zero_variance: bool | None = Field(
        default=None,
        description=(
            "Exclude groups whose members did equally well, before any `shaping`; see"
            " `filter_metric`. null: where the estimator compares their total rewards."
        ),
    )
    filter_metric: Annotated[
        Literal["accuracy", "reward"] | None, Unless("algorithm.filter_zero_variance", False)
    ] = Field(
        default=None,
        description=(
            "What filter_zero_variance compares. accuracy: whether the answer was right, the part"
            " `accuracy` or `acc` of the reward (without one, its score); reward: the score and the"
            " rewards of turns. null: accuracy with filter_zero_variance=true (DAPO), else reward."
        ),
    )
    max_resample_rounds: NonNegative = Field(
        default=0,
        description=(
            "Maximum number of rounds of new prompts that replace filtered groups (DAPO's dynamic"
            " sampling)."
        ),
    )
    filters: FiltersConfig = Field(default_factory=FiltersConfig)
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    observation_loss: ObservationLossConfig = Field(default_factory=ObservationLossConfig)

    @property
    def needs_group(self) -> bool:
        """Whether the estimator compares within a group: a group of one has no advantages then."""
        return self.adv_estimator not in WITHOUT_GROUP_BASELINE

    @property
    def compares_totals(self) -> bool:
        """Whether groups of equal total rewards have no advantages.

        They may have some if the estimator compares parts of the reward, or turns, one by one.
        """
        return self.needs_group and self.adv_estimator not in ("gdpo", "gigpo", "mt_grpo", "igpo")

    @property
    def filters_zero_variance(self) -> bool:
        """Resolved ``filter_zero_variance``."""
        if self.filter_zero_variance is None:
            return self.compares_totals
        return self.filter_zero_variance

    @property
    def filters_by_accuracy(self) -> bool:
        """Resolved ``filter_metric``: whether groups are filtered by accuracy, else by reward."""
        if self.filter_metric is not None:
            return self.filter_metric == "accuracy"
        return self.filter_zero_variance is True

    def problems(self) -> Iterator[str]:
        """Yield every inconsistency of the section, each with its fix."""
        yield from _advantage_problems(self)
        yield from _loss_problems(self)
        yield from _correction_problems(self)
        yield from _kl_problems(self.kl, self.adv_estimator)


class CriticConfig(OptimizerSection):
    """The value model of adv_estimator gae.

    It has the policy's architecture with a scalar head, and an optimizer of its own.
    """

    learning_rate: float = Field(
        default=1e-5, gt=0, description="Peak learning rate of the critic's AdamW."
    )
    path: str | None = Field(
        default=None, description="Initial weights (Hugging Face folder); null: the policy's."
    )
    critic_warmup: NonNegative = Field(
        default=0, description="Number of initial steps in which only the critic learns."
    )
    cliprange_value: float = Field(
        default=0.5, gt=0, description="Clip range of a value around the old one."
    )


def _advantage_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    gdpo = algorithm.gdpo
    if algorithm.adv_estimator == "gdpo" and len(gdpo.reward_keys) < 2:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo.reward_keys, at least two keys of"
            " the reward's dict"
        )
    if gdpo.reward_weights and len(gdpo.reward_weights) != len(gdpo.reward_keys):
        yield (
            f"algorithm.gdpo.reward_weights has {len(gdpo.reward_weights)} numbers for"
            f" {len(gdpo.reward_keys)} reward_keys; give one each, or none"
        )
    if algorithm.adv_estimator == "mt_grpo" and algorithm.turn_reward == "none":
        yield (
            "algorithm.adv_estimator=mt_grpo compares turns; set algorithm.turn_reward=tool_reward"
            " or tool_success"
        )
    if algorithm.adv_estimator == "igpo" and algorithm.turn_reward == "none":
        yield (
            "algorithm.adv_estimator=igpo credits turns by their rewards; set"
            " algorithm.turn_reward=progress"
        )
    if algorithm.turn_reward == "progress":
        yield from _progress_problems(algorithm.adv_estimator)
    if algorithm.filter_metric is not None and not algorithm.filters_zero_variance:
        yield (
            f"algorithm.filter_metric={algorithm.filter_metric}, but"
            f" algorithm.adv_estimator={algorithm.adv_estimator} filters no groups by itself; set"
            " algorithm.filter_zero_variance=true, or remove filter_metric"
        )

    filter_actions = [getattr(algorithm.filters, name) for name in FILTER_NAMES]
    may_lose_groups = (
        algorithm.filters_zero_variance or algorithm.needs_group or "drop" in filter_actions
    )
    if algorithm.max_resample_rounds and not may_lose_groups:
        yield (
            f"algorithm.max_resample_rounds={algorithm.max_resample_rounds}, but no group is"
            " filtered that could be replaced; set algorithm.filter_zero_variance=true, or"
            " max_resample_rounds=0"
        )


def _progress_problems(adv_estimator: str) -> Iterator[str]:
    if adv_estimator == "mt_grpo":
        yield (
            "algorithm.turn_reward=progress is a part of the outcome, which"
            " algorithm.adv_estimator=mt_grpo compares with the turns; set adv_estimator=igpo, or"
            " turn_reward=tool_reward"
        )
    elif adv_estimator in ADV_ESTIMATORS and adv_estimator not in _BY_TURNS:
        yield (
            "algorithm.turn_reward=progress divides the reward among turns, and"
            f" algorithm.adv_estimator={adv_estimator} reads totals only; set adv_estimator to"
            f" one of {', '.join(sorted(_BY_TURNS))}, or turn_reward=none"
        )


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss_mode = algorithm.policy_loss.loss_mode
    loss_agg_mode = algorithm.loss_agg_mode
    if loss_mode == "geo_mean" and loss_agg_mode != "seq-mean-token-mean":
        yield (
            "policy_loss.loss_mode=geo_mean is one loss per sequence,"
            f" algorithm.loss_agg_mode={loss_agg_mode} weighs tokens; set"
            " algorithm.loss_agg_mode=seq-mean-token-mean"
        )
    if loss_agg_mode == "seq-mean-token-sum-norm" and algorithm.loss_scale_factor is None:
        yield (
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm divides by a constant; set"
            " algorithm.loss_scale_factor (agent.max_response_length is usual)"
        )


def _correction_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.rollout_correction
    rules = correction.rollout_rs
    thresholds = correction.rollout_rs_threshold
    if rules and len(thresholds) == 1:  # one threshold for all rules
        thresholds = thresholds * len(rules)
    if len(thresholds) != len(rules):
        yield (
            f"algorithm.rollout_correction has {len(rules)} rollout_rs rules and"
            f" {len(thresholds)} rollout_rs_threshold values; give one per rule, or one for all"
        )
    for rule, threshold in zip(rules, thresholds, strict=False):
        yield from _threshold_problems(rule, threshold)

    is_threshold = correction.rollout_is_threshold
    low, high = is_threshold if isinstance(is_threshold, tuple) else (0.0, is_threshold)
    if not 0 <= low < high:
        yield (
            f"algorithm.rollout_correction.rollout_is_threshold={is_threshold}: must be positive,"
            " or [low, high] ascending"
        )

    corrects = correction.rollout_is != "none" or bool(rules)
    if correction.bypass_mode and corrects:
        yield (
            "algorithm.rollout_correction.bypass_mode takes the rollout's log-probs as the old"
            " ones, so rollout_is and rollout_rs would compare them with themselves; drop one or"
            " the other"
        )
    if algorithm.policy_loss.loss_mode == "decoupled" and (
        correction.bypass_mode or correction.rollout_is != "none"
    ):
        yield (
            "policy_loss.loss_mode=decoupled has its own behaviour weights and proximal log-probs;"
            " set algorithm.rollout_correction.rollout_is=none and bypass_mode=false"
        )


def _threshold_problems(rule: str, threshold: float | Bounds) -> Iterator[str]:
    setting = f"algorithm.rollout_correction.rollout_rs_threshold={threshold} for {rule}"
    bounds_ratio = rule.endswith("k1")  # other rules bound an estimate of the divergence
    if isinstance(threshold, tuple):
        low, high = threshold
        if not bounds_ratio:
            yield f"{setting}: only k1 rules have a lower bound; give one number"
        elif not 0 < low < high:
            yield f"{setting}: must be [low, high] ratios, 0 < low < high"
        return

    minimum = 1 if bounds_ratio else 0
    if threshold <= minimum:
        yield f"{setting}: must be above {minimum}"


def _kl_problems(kl: KLConfig, adv_estimator: str) -> Iterator[str]:
    """Yield inconsistencies of the KL with itself and the advantages."""
    if kl.where in ("reward", "advantage") and kl.estimator.endswith("+"):
        yield (
            f"algorithm.kl.estimator={kl.estimator} differs from {kl.estimator[:-1]} in its"
            f" gradient only, and a reward has none, nor has an advantage; use {kl.estimator[:-1]},"
            " or kl.where=loss"
        )
    if kl.where == "loss" and kl.estimator == "k1" and not kl.top_k:
        yield "algorithm.kl.estimator=k1 has a gradient of mean zero in the loss; use k1+, k2 or k3"
    if kl.reference == "feedback" and kl.top_k:
        yield (
            f"algorithm.kl.top_k={kl.top_k} reads one distribution at each position, and with"
            " kl.reference=feedback every trajectory has a teacher of its own, also where it shares"
            " a prefix with others; set kl.top_k=0"
        )
    if kl.where == "reward" and adv_estimator == "gdpo":
        yield (
            "algorithm.kl.where=reward would not reach gdpo, which reads the reward's parts; use"
            " kl.where=loss"
        )
    if kl.where in ("none", "reward") and adv_estimator == "none":
        yield (
            f"algorithm.adv_estimator=none learns from algorithm.kl alone, and kl.where={kl.where}"
            " leaves nothing; set kl.where=advantage or loss, or another estimator"
        )
