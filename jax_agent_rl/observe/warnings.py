"""A run's warnings: what can go wrong without stopping the run, its threshold, and the remedy.

The thresholds and their sources:

no_reward: every reward of the first step is 0, and no later one differs.
    Our estimate: a small share of right answers is there from the start in what can be learned at
    all. A reward that expects another form than the model writes, or compares with the wrong truth,
    looks like this.
reward_collapse: >= 0.9 of the best step's reward is gone for two steps (ends < 0.5), if that was at
    least 0.1.
    Our estimate: rewards vary between steps, but do not vanish. A broken policy also causes
    warnings of its symptoms, which take one step more.
reward_hacking: >= 0.9 of the best step's accuracy is gone for two steps, but at most half of the
    reward (ends < 0.5).
    Our estimate, from a run that earned 0.4 per trajectory by calls alone and answered nothing. It
    watches rewards with a part ``accuracy`` or ``acc``.
zero_variance: >= 0.5 (ends < 0.3), for estimators that compare within groups.
    Half of the groups have equal outcomes, so half of the rollout gives no gradient. Yu et al. 2025
    (DAPO, arXiv 2503.14476) replace such groups from the start; at one half, that doubles the
    number of sampled tokens.
truncated: >= 0.2 (ends < 0.1).
    The reward 0 of a truncated text says nothing about its content (DAPO, section 3.4: such samples
    disturb training). In groups of 8, one in five is nearly two in every group.
program_timeouts: >= 0.2 (ends < 0.1).
    As for ``truncated``: what a program has not finished is scored by the files that it left, which
    says more about the time than about the policy.
tool_errors: >= 0.3 (ends < 0.15).
    Our estimate: a model that learns to call tools makes mistakes and unlearns them; at almost one
    call in three, wrong schemas, a missing package or an overloaded server are likelier, and every
    call has cost a turn.
clipped: >= 0.2; for sequence ratios >= 0.4 (ends at half).
    Clipped terms have no gradient. Schulman et al. 2017 clip rare outliers; a fifth of all tokens
    means that the policy moves further per batch than the trust region allows. Sequence ratios are
    clipped a hundred times as often in healthy runs (Zheng et al. 2025, GSPO, arXiv 2507.18071,
    figure 2: 0.15).
nonfinite_updates: >= 1 in a step.
    A gradient that is not finite is a fault of the numbers, never noise. Its update changes
    nothing, and its trajectories are dropped, so a run may continue without learning from a part of
    its data.
logprob_gap: >= 0.05 nats on average (ends < 0.03); not while tokens may be stale, whose gap is the
    policy's progress.
    NeMo RL's release tests allow mean exp |gap| < 1.05 between engine and learner, that is 0.05
    nats.
logprob_gap_growing: >= 4 times what it was in the first steps, counted from 0.005 nats (ends < 2
    times).
    Runs with a growing gap collapse, and succeed with corrected log-probs (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"). 0.005 is the gap of
    bfloat16.
agreement_unchecked: no token of five steps could be compared.
    Our estimate: occasional comparisons are enough to notice an engine that serves another model.
entropy_collapse: >= 0.9 of the first steps' entropy is gone (ends < 0.8).
    Cui et al. 2025 (arXiv 2505.22617): reward is traded for entropy; once over nine tenths of it
    are spent, so is over nine tenths of the possible gain.
repeated_failures: >= 0.4 (ends < 0.25) of the trajectories are not right and repeat another one of
    their group.
    Our estimate: so much of the rollout then tries nothing new, though there is something to find.
tools_unused: not one call in a step, though tools are configured.
    Our estimate: a missing agent_name, a prompt without schemas or the wrong tool format look like
    this.
learner_idle: >= 0.2 of a step's time that another trainer.mode would save (sync), >= 0.4 that the
    learner waits (other modes).
    See :func:`overlap_gain`: when both run at the same time, the shorter of rollout and learning is
    free.
router_replay_missing: >= 0.5 of a mixture's tokens (ends < 0.4).
    Our estimate: an engine that reports experts leaves out the last token of each trajectory, and
    what its server lost. Without replay, routers that round differently make ratios of MoE models
    spread (Ma et al. 2025, arXiv 2510.11370).
recompilations: >= 1 in a step.
    Every shape is compiled before the first step; a new one costs seconds to minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax_agent_rl.config import Config, build
from jax_agent_rl.config.default_agent import uses_tools
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.watch import (
    NoReward,
    Record,
    RewardWithoutAccuracy,
    Rule,
    SinceBest,
    SinceLast,
    SinceStart,
)


def nonfinite_updates(record: Record) -> float | None:
    """Return how many updates of a step were skipped, of policy and critic together.

    None if there was no update to make.
    """
    counts = []
    for name in ("nonfinite_updates", "critic_nonfinite_updates"):
        if name in record:
            counts.append(record[name])
    if not counts:
        return None
    return sum(counts)


def rules(config: Config, rows: Collection[Mapping[str, Any]] = ()) -> list[Rule]:
    """Return the table of rules.

    Its advice names the keys that would help this configuration.

    Args:
        rows: training rows, which may name tools.
    """
    # Sequence ratios are clipped far more often than token ratios.
    clipped_unit = "tokens"
    clipped_limit = 0.2
    if config.algorithm.policy_loss.loss_mode in ("gspo", "geo_mean"):
        clipped_unit = "sequences"
        clipped_limit = 0.4

    table = [
        Rule(
            name="no_reward",
            value=NoReward(),
            begins=1,
            ends=1,
            steps=1,
            message="no trajectory has earned a reward yet",
            advice=(
                "read some ('jax-agent-rl view RUN' shows texts and truths): would a right answer"
                " earn one in the form that the model writes ('jax-agent-rl doctor CONFIG' tries"
                " it)? If so, show worked examples in the prompts, take easier rows, or give"
                " partial credit"
            ),
        ),
        Rule(
            name="reward_collapse",
            value=SinceBest("score_mean", "reward_mean"),
            begins=0.9,
            ends=0.5,
            steps=2,
            message=(
                "{value:.0%} of the best step's reward is gone: an update has probably broken the"
                " policy"
            ),
            advice=(
                "read what it writes now ('jax-agent-rl view RUN'), and begin again with a lower"
                f" learner.learning_rate={config.learner.learning_rate:g}, or with"
                " learner.lr_warmup_steps; cut-off texts, equal rewards and missing tool calls of"
                " these steps follow from it"
            ),
        ),
        Rule(
            name="reward_hacking",
            value=RewardWithoutAccuracy(),
            begins=0.9,
            ends=0.5,
            steps=2,
            message=(
                "{value:.0%} of the best step's accuracy is gone, and most of the reward is not"
            ),
            advice=(
                "something other than right answers pays: see what in the best trajectories"
                " ('jax-agent-rl view RUN --sort best'), and lower that part of the reward, or set"
                " algorithm.turn_reward=none if calls are paid"
            ),
        ),
        Rule(
            name="truncated",
            value=lambda record: record.get("truncated_share"),
            begins=0.2,
            ends=0.1,
            message=(
                "{value:.0%} of the trajectories were cut off by a limit of tokens or turns"
                " ({limit})"
            ),
            advice=(
                f"raise that limit, agent.max_response_length={config.agent.max_response_length}"
                " (and rollout.max_model_len) or those of turns, or mask them:"
                " algorithm.filters.overlong=mask, or algorithm.shaping.overlong_buffer"
            ),
        ),
        Rule(
            name="program_timeouts",
            value=lambda record: record.get("program_timeout_share"),
            begins=0.2,
            ends=0.1,
            message=(
                "{value:.0%} of the programs ran out of time and are scored by the files they left"
            ),
            advice=(
                f"raise agent.run_timeout={config.agent.run_timeout:g} (a task's own limit may be"
                " lower), or let programs make fewer turns: agent.max_assistant_turns"
            ),
        ),
        Rule(
            name="tool_errors",
            value=_tool_error_share,
            begins=0.3,
            ends=0.15,
            message="{value:.0%} of the tool calls ended in an error",
            advice=(
                "tool_errors_by_kind in metrics.jsonl says which, 'jax-agent-rl view RUN --sort"
                f" worst' shows them; {_call_advice(config)}; timeout: raise agent.tool_timeout, or"
                " give the tool server more workers"
            ),
        ),
        Rule(
            name="clipped",
            value=lambda record: record.get("clip_fraction"),
            begins=clipped_limit,
            ends=clipped_limit / 2,
            message=f"{{value:.0%}} of the {clipped_unit} were clipped: no gradient",
            advice="lower learner.learning_rate, learner.num_minibatches or learner.ppo_epochs",
        ),
        Rule(
            name="nonfinite_updates",
            value=nonfinite_updates,
            begins=1,
            ends=1,
            steps=1,
            message=(
                "{value:.0f} updates of a step had a gradient that was not finite, and changed"
                " nothing"
            ),
            advice=(
                "look for extreme rewards ('jax-agent-rl view RUN --sort best' and worst;"
                " advantage_abs_max in metrics.jsonl), or lower"
                f" learner.learning_rate={config.learner.learning_rate:g}"
            ),
        ),
        Rule(
            name="logprob_gap_growing",
            value=SinceStart("logprob_gap_mean", lambda now, start: now / max(0.005, start)),
            begins=4.0,
            ends=2.0,
            message="engine and learner disagree {value:.1f} times as much as in the first steps",
            advice=_precision_advice(config),
        ),
        Rule(
            name="agreement_unchecked",
            value=_has_no_comparison,
            begins=1.0,
            ends=1.0,
            steps=5,
            message="engine and learner are not compared: every token is of weights that are gone",
            advice=_staleness_advice(config),
        ),
        Rule(
            name="entropy_collapse",
            value=SinceStart("entropy", lambda now, start: 1 - now / start if start > 0 else 0.0),
            begins=0.9,
            ends=0.8,
            message="{value:.0%} of the policy's entropy is gone: exploration has ended",
            advice=(
                "raise algorithm.clip_ratio_high or algorithm.entropy_coeff, take "
                "algorithm.policy_loss.loss_mode=clip_cov or kl_cov, or lower learner.learning_rate"
            ),
        ),
        Rule(
            name="repeated_failures",
            value=lambda record: record.get("repeated_failure_share"),
            begins=0.4,
            ends=0.25,
            message=(
                "{value:.0%} of the trajectories are not right, and repeat another one of their"
                " group to the token"
            ),
            advice=(
                f"raise rollout.temperature={config.rollout.temperature:g} or"
                " algorithm.entropy_coeff, or lower learner.learning_rate; distinct_first_actions"
                " and turn_entropy in metrics.jsonl say where the policy no longer explores"
            ),
        ),
        Rule(
            name="router_replay_missing",
            value=_missing_router_replay,
            begins=0.5,
            ends=0.4,
            message=(
                "{value:.0%} of the tokens were learned from without the engine's experts: it does"
                " not report them"
            ),
            advice=(
                "take rollout.backend=jetstream without an engine_factory, or on CUDA"
                ' rollout.vllm.engine_args={"enable_return_routed_experts": true}; or correct the'
                " ratios with algorithm.rollout_correction"
            ),
        ),
        Rule(
            name="recompilations",
            value=SinceLast("recompilations_after_warmup"),
            begins=1,
            ends=1,
            steps=1,
            message="{value:.0f} programs were compiled in a step, after warm-up",
            advice=(
                "see the log; prompts longer than the largest of rollout.jetstream.prefill_buckets,"
                " or images of new sizes, are the usual causes"
            ),
        ),
    ]

    if config.algorithm.adv_estimator == "none":  # nothing is learned from rewards
        reward_rules = ("no_reward", "reward_collapse", "reward_hacking")
        table = [rule for rule in table if rule.name not in reward_rules]

    if config.algorithm.needs_group:
        refill = ""
        if not config.algorithm.max_resample_rounds:
            refill = "set algorithm.max_resample_rounds=3 (dynamic sampling), "
        curriculum = ""
        if not config.data.curriculum.enabled:
            curriculum = "set data.curriculum.enabled=true, "
        table.append(
            Rule(
                name="zero_variance",
                value=lambda record: record.get("zero_variance_share"),
                begins=0.5,
                ends=0.3,
                message="{value:.0%} of the groups have equal rewards and teach nothing",
                advice=(
                    f"{refill}{curriculum}drop rows that are always right or always wrong, raise "
                    f"rollout.group_size={config.rollout.group_size}, or give partial credit"
                ),
            )
        )

    if not config.trainer.staleness_bound:
        table.append(
            Rule(
                name="logprob_gap",
                value=_logprob_gap,
                begins=0.05,
                ends=0.03,
                message=(
                    "engine and learner disagree by {value:.3f} nats per token on the same weights"
                ),
                advice=_precision_advice(config),
            )
        )

    if uses_tools(config, rows):
        table.append(
            Rule(
                name="tools_unused",
                value=lambda record: float(record["tool_calls_mean"] == 0),
                begins=1,
                ends=1,
                message="tools are configured and no trajectory calls one",
                advice=(
                    "look at one with 'jax-agent-rl view RUN'; rows need the agent_name of the"
                    " tools (or set agent.default_agent), prompts must describe them"
                    " (agent.tool_prompt), and the model must write calls in the expected format"
                    " (agent.tool_format; agent.action_stop_tokens of a tool server): a small one"
                    " needs an example of a call in the prompt"
                ),
            )
        )

    table.append(_idle_rule(config))
    return table


def _tool_error_share(record: Record) -> float | None:
    if not record.get("tool_calls_mean"):
        return None
    return record.get("tool_error_share")


def _has_no_comparison(record: Record) -> float | None:
    if "compared_tokens" not in record:
        return None
    return 0.0 if record["compared_tokens"] else 1.0


def _missing_router_replay(record: Record) -> float | None:
    if "router_replay_share" not in record:
        return None
    return 1 - record["router_replay_share"]


def _logprob_gap(record: Record) -> float | None:
    if not record.get("trained_tokens"):
        return None
    return record.get("logprob_gap_mean")


def overlap_gain(record: Record, *, own_devices: bool) -> float:
    """Return the share of a synchronous step's time that one_step_off would save at best.

    A step takes rollout + learning in sequence, but only the longer of the two when they overlap.
    An engine on the learner's devices alternates with it: the learner can compute only while the
    engine waits for tools.

    Args:
        own_devices: whether the engine has devices of its own.

    >>> overlap_gain({"learner_idle_share": 0.6, "engine_busy_share": 0.9}, own_devices=True)
    0.4
    """
    return min(_free_share(record, own_devices), 1 - record["learner_idle_share"])


def _free_share(record: Record, own_devices: bool) -> float:
    """Return the share of a step in which the learner could compute and does not."""
    idle = record["learner_idle_share"]
    if own_devices:
        return idle
    return idle * max(0.0, 1 - record["engine_busy_share"])


def _idle_rule(config: Config) -> Rule:
    mode = config.trainer.mode
    own_devices = config.engines_have_own_devices
    if mode == "sync":
        return Rule(
            name="learner_idle",
            value=lambda record: overlap_gain(record, own_devices=own_devices),
            begins=0.2,
            ends=0.1,
            message=(
                "rollout and learner wait for each other; overlapping, steps would be up to"
                " {value:.0%} shorter"
            ),
            advice="try trainer.mode=one_step_off",
        )

    more_engines = (
        "rollout.placement=separate with more rollout.num_engines, or more rollout servers"
    )
    first = "try trainer.mode=fully_async"
    if mode == "fully_async":
        first = f"raise trainer.max_staleness={config.trainer.staleness_bound}"
    return Rule(
        name="learner_idle",
        value=lambda record: _free_share(record, own_devices),
        begins=0.4,
        ends=0.3,
        message="the learner waits {value:.0%} of the time and could compute",
        advice=f"{first}; if all rollouts are slow, {more_engines}",
    )


def _call_advice(config: Config) -> str:
    """Return what helps against calls that do not fit the tools."""
    rollout = config.rollout
    ignores_grammars = rollout.deterministic or rollout.jetstream.engine_factory is not None
    is_other_engine = rollout.backend in ("sglang", "vllm")
    if config.agent.constrain_tool_calls or is_other_engine or ignores_grammars:
        return "malformed: set agent.tool_format"

    engine = "JAX rollout servers" if rollout.backend == "remote" else "the JAX engine"
    return (
        "malformed, unknown_tool, bad_arguments: agent.constrain_tool_calls=true lets the policy"
        f" write only calls that fit the tools (with {engine} and a tool format whose calls have an"
        " opening tag, such as hermes); if it writes calls in another format, set"
        " agent.tool_format"
    )


def _staleness_advice(config: Config) -> str:
    younger = ""
    if config.trainer.mode == "fully_async":
        younger = "lower trainer.max_staleness, and "
    return (
        "a disagreement would not be noticed: run some steps with trainer.mode=sync; or"
        f" {younger}let a step make a single update by AdamW (learner.ppo_epochs=1,"
        " learner.num_minibatches=1): it can be undone, and tokens one version old are compared"
        " with the weights before it"
    )


def _precision_advice(config: Config) -> str:
    """Return what helps against different log-probs of engine and learner."""
    learner_dtype = config.learner.compute_dtype
    precision = "use the learner's precision in the engine"
    if config.rollout.backend == "jetstream" and config.rollout.jetstream.dtype != learner_dtype:
        precision = f"set rollout.jetstream.dtype={learner_dtype} (learner.compute_dtype)"
    remedies = [precision]
    if config.algorithm.rollout_correction.rollout_is == "none":
        remedies.append("algorithm.rollout_correction.rollout_is=token")
    if _could_be_deterministic(config):
        remedies.append(
            "or, with jetstream and a model without experts, rollout.deterministic=true"
        )
    return ", ".join(remedies)


def _could_be_deterministic(config: Config) -> bool:
    """Return whether engine and learner may share one program, as far as the settings tell."""
    if config.rollout.deterministic or not config.learner.multihost.is_one_process:
        return False
    settings = config.model_dump(mode="json", exclude_unset=True)
    try:
        build(settings, ["rollout.backend=jetstream", "rollout.deterministic=true"])
    except ConfigError:
        return False
    return True
