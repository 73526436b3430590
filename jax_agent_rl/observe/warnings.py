"""A run's warnings: what can go wrong without stopping it, from which threshold on, and the remedy.

::

    a step's metrics ─► every Rule: value >= begins, `steps` times in a row ─► printed; counted from there on
                                    value <  ends,   `steps` times in a row ─► over; it may begin again

The thresholds and their sources:

reward_collapse >= 0.9 of the best step's reward is gone for two steps (ends < 0.5), if that was at least 0.1
    Our estimate: rewards vary between steps, but do not vanish. A broken policy also causes warnings of its symptoms,
    which need a step more.
zero_variance >= 0.5 (ends < 0.3), for estimators that compare within groups
    Half of the groups have equal rewards, so half of the rollout gives no gradient. Yu et al. 2025 (DAPO, arXiv
    2503.14476) replace such groups from the start; at one half, that doubles the number of sampled tokens.
truncated >= 0.2 (ends < 0.1)
    The reward 0 of a truncated text says nothing about its content (DAPO, section 3.4: such samples disturb
    training). In groups of 8, one in five is nearly two in every group.
tool_errors >= 0.3 (ends < 0.15)
    Our estimate: a model that learns to call tools makes mistakes and unlearns them; at almost one call in three, wrong
    schemas, a missing package or an overloaded server are likelier, and every call has cost a turn.
clipped >= 0.2; for sequence ratios >= 0.4 (ends at half)
    Clipped terms have no gradient. Schulman et al. 2017 clip rare outliers; a fifth of all tokens means that the
    policy moves further per batch than the trust region allows. Sequence ratios are clipped a hundred times as often
    in healthy runs (Zheng et al. 2025, GSPO, arXiv 2507.18071, figure 2: 0.15).
logprob_gap >= 0.05 nats on average (ends < 0.03); not while tokens may be stale, whose gap is the policy's progress
    NeMo RL's release tests allow mean exp |gap| < 1.05 between engine and learner, that is 0.05 nats.
logprob_gap_growing >= 4 times what it was in the first steps, counted from 0.005 nats (ends < 2 times)
    Runs with a growing gap collapse, and succeed with corrected log-probs (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). 0.005: the gap of bfloat16.
entropy_collapse >= 0.9 of the first steps' entropy is gone (ends < 0.8)
    Cui et al. 2025 (arXiv 2505.22617): reward is traded for entropy; once over nine tenths of it are spent, so is
    over nine tenths of the possible gain.
tools_unused: not one call in a step, though tools are configured
    Our estimate: a missing agent_name, a prompt without schemas or the wrong tool format look like this.
learner_idle >= 0.2 of a step's time that another trainer.mode would save (sync), >= 0.4 that the learner waits (others)
    See :func:`overlap_gain`: when both run at the same time, the shorter of rollout and learning is free.
router_replay_missing >= 0.5 of a mixture's tokens (ends < 0.4)
    Our estimate: an engine that reports experts leaves out the last token of each trajectory, and what its server lost.
    Without replay, routers that round differently make ratios of MoE models spread (Ma et al. 2025, arXiv 2510.11370).
recompilations >= 1 in a step
    Every shape is compiled before the first step; a new one costs seconds to minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.config.run import has_own_devices, uses_tools

Record = Mapping[str, Any]
"""A line of ``metrics.jsonl``, kind ``step``."""
Value = Callable[[Record], float | None]
"""The value a rule compares; None where a step has none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that should not last.

    Attributes:
        name: key of the warning.
        value: the watched value.
        begins: the condition holds from this value on.
        ends: it is over below this value.
        message: the observation, with ``{value}``.
        advice: what to do.
        steps: consecutive steps that it takes to begin, or to end.
    """

    name: str
    value: Value
    begins: float
    ends: float
    message: str
    advice: str
    steps: int = 3


@dataclass(kw_only=True)
class RunWarning:
    """The state of one warning of a run.

    Attributes:
        name, message, advice: from the rule, the message with the value at which it last began.
        first_step: the step at which it was printed; 0: before the first.
        last_step: the last step on which it held.
        steps: number of steps on which it held.
        active: whether it still holds.
    """

    name: str
    message: str
    advice: str
    first_step: int
    last_step: int
    steps: int = 1
    active: bool = True


class Watch:
    """Evaluates rules on every step of a run.

    Args:
        rules: with different names; not shared with another watch, because their values may remember earlier steps.
        print_line: takes a warning that begins.
    """

    def __init__(self, rules: Sequence[Rule], print_line: Callable[[str], None]) -> None:
        self._rules = rules
        self._streaks: Counter[str] = Counter()
        self._warnings: dict[str, RunWarning] = {}  # by name, in the order of their first steps
        self._print_line = print_line

    def update(self, record: Record, *, silent: bool = False) -> None:
        """Take a record of ``metrics.jsonl``; those of other kinds than ``step`` are ignored.

        ``silent`` is for records from before a restart, whose warnings were printed then.
        """
        if record.get("kind") != "step":
            return
        for rule in self._rules:
            value = rule.value(record)
            if value is not None and self._begins(rule, record["step"], value) and not silent:
                warning = self._warnings[rule.name]
                self._print_line(f"  warning ({warning.name}): {warning.message}. What to do: {warning.advice}")

    def _begins(self, rule: Rule, step: int, value: float) -> bool:
        """Take one value; return whether the warning begins with it."""
        warning = self._warnings.get(rule.name)
        active = warning if warning and warning.active else None
        changes = value < rule.ends if active else value >= rule.begins
        self._streaks[rule.name] = self._streaks[rule.name] + 1 if changes else 0
        if active and not changes:
            active.last_step, active.steps = step, active.steps + 1
        if self._streaks[rule.name] < rule.steps:
            return False
        self._streaks[rule.name] = 0
        if active:
            active.active = False
            return False
        self._warnings[rule.name] = RunWarning(
            name=rule.name,
            message=rule.message.format(value=value),
            advice=rule.advice,
            first_step=warning.first_step if warning else step,  # if it began before, it is one entry
            last_step=step,
            steps=warning.steps + 1 if warning else 1,
        )
        return True

    def add(self, warning: RunWarning) -> None:
        """Add a warning printed before the first step."""
        self._warnings[warning.name] = warning

    @property
    def warnings(self) -> list[RunWarning]:
        """All warnings so far, in the order of their first steps."""
        return list(self._warnings.values())

    @property
    def active(self) -> list[str]:
        """Names of the warnings that hold now."""
        return [warning.name for warning in self.warnings if warning.active]


class SinceStart:
    """A metric compared with its mean over the first steps that trained on tokens; a :data:`Value`.

    Args:
        name: name of the metric.
        compare: takes the current value and the mean of the first ones; returns the rule's value.
        steps: number of first steps.
    """

    def __init__(self, name: str, compare: Callable[[float, float], float], *, steps: int = 3) -> None:
        self._name, self._compare, self._steps = name, compare, steps
        self._first: list[float] = []

    def __call__(self, record: Record) -> float | None:
        value = record.get(self._name)
        if value is None or not record.get("trained_tokens"):
            return None
        if len(self._first) < self._steps:
            self._first.append(value)
            return None
        return self._compare(value, sum(self._first) / self._steps)


class SinceBest:
    """The share of the best step's reward that is gone, from a mean reward of 0.1 on; a :data:`Value`."""

    def __init__(self) -> None:
        self._best = 0.0

    def __call__(self, record: Record) -> float | None:
        reward = record.get("reward_mean")
        if reward is None:
            return None
        self._best = max(self._best, reward)
        return 1 - reward / self._best if self._best >= 0.1 else None


class SinceLast:
    """The growth of a running total since the step before; a :data:`Value`.

    A total smaller than the one before was restarted by a process that resumed the run.
    """

    def __init__(self, name: str) -> None:
        self._name, self._before = name, 0.0

    def __call__(self, record: Record) -> float | None:
        total = record.get(self._name)
        if total is None:
            return None
        before, self._before = self._before, total
        return total - before if total >= before else total


def rules(config: Config, rows: Collection[Mapping[str, Any]] = ()) -> list[Rule]:
    """Return the table; its advice names the keys that would help this configuration with these training rows."""
    sequence = config.algorithm.policy_loss.loss_mode in ("gspo", "geo_mean")
    clipped = 0.4 if sequence else 0.2
    table = [
        Rule(
            name="reward_collapse",
            value=SinceBest(),
            begins=0.9,
            ends=0.5,
            steps=2,
            message="{value:.0%} of the best step's reward is gone: an update has probably broken the policy",
            advice="read what it writes now ('jax-agent-rl view RUN'), and begin again with a lower "
            f"learner.learning_rate={config.learner.learning_rate:g}, or with learner.lr_warmup_steps; cut-off texts, "
            "equal rewards and missing tool calls of these steps follow from it",
        ),
        Rule(
            name="truncated",
            value=lambda record: record.get("truncated_share"),
            begins=0.2,
            ends=0.1,
            message="{value:.0%} of the trajectories were cut off by a limit of tokens or turns",
            advice="raise the limit that finish_reasons names, "
            f"agent.max_response_length={config.agent.max_response_length} (and rollout.max_model_len) or those of "
            "turns, or mask them: algorithm.filters.overlong=mask, or algorithm.shaping.overlong_buffer",
        ),
        Rule(
            name="tool_errors",
            value=lambda record: record.get("tool_error_share") if record.get("tool_calls_mean") else None,
            begins=0.3,
            ends=0.15,
            message="{value:.0%} of the tool calls ended in an error",
            advice="tool_errors_by_kind in metrics.jsonl says which, 'jax-agent-rl view RUN --sort worst' shows them; "
            "malformed: set agent.tool_format; timeout: raise agent.tool_timeout, or give the tool server more workers",
        ),
        Rule(
            name="clipped",
            value=lambda record: record.get("clip_fraction"),
            begins=clipped,
            ends=clipped / 2,
            message="{value:.0%} of the " + ("sequences" if sequence else "tokens") + " were clipped: no gradient",
            advice="lower learner.learning_rate, learner.num_minibatches or learner.ppo_epochs",
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
            name="entropy_collapse",
            value=SinceStart("entropy", lambda now, start: 1 - now / start if start > 0 else 0.0),
            begins=0.9,
            ends=0.8,
            message="{value:.0%} of the policy's entropy is gone: exploration has ended",
            advice="raise algorithm.clip_ratio_high or algorithm.entropy_coeff, take "
            "algorithm.policy_loss.loss_mode=clip_cov or kl_cov, or lower learner.learning_rate",
        ),
        Rule(
            name="router_replay_missing",
            value=lambda record: 1 - record["router_replay_share"] if "router_replay_share" in record else None,
            begins=0.5,
            ends=0.4,
            message="{value:.0%} of the tokens were learned from without the engine's experts: it does not report them",
            advice="take rollout.backend=jetstream without an engine_factory, or on CUDA "
            'rollout.vllm.engine_args={"enable_return_routed_experts": true}; or correct the ratios with '
            "algorithm.rollout_correction",
        ),
        Rule(
            name="recompilations",
            value=SinceLast("recompilations_after_warmup"),
            begins=1,
            ends=1,
            steps=1,
            message="{value:.0f} programs were compiled in a step, after warm-up",
            advice="see the log; prompts longer than the largest of rollout.jetstream.prefill_buckets, or "
            "images of new sizes, are the usual causes",
        ),
    ]
    if config.algorithm.needs_group:
        refill = (
            "" if config.algorithm.max_resample_rounds else "set algorithm.max_resample_rounds=3 (dynamic sampling), "
        )
        table.append(
            Rule(
                name="zero_variance",
                value=lambda record: record.get("zero_variance_share"),
                begins=0.5,
                ends=0.3,
                message="{value:.0%} of the groups have equal rewards and teach nothing",
                advice="if all rewards are 0, check that a right answer earns one in the form the model writes "
                f"('jax-agent-rl view RUN' shows texts and truths); else {refill}drop rows that are always right or "
                f"always wrong, raise rollout.group_size={config.rollout.group_size}, or give partial credit",
            )
        )
    if not config.trainer.staleness_bound:
        table.append(
            Rule(
                name="logprob_gap",
                value=lambda record: record.get("logprob_gap_mean") if record.get("trained_tokens") else None,
                begins=0.05,
                ends=0.03,
                message="engine and learner disagree by {value:.3f} nats per token on the same weights",
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
                advice="look at one with 'jax-agent-rl view RUN'; rows need the agent_name of the tools (or set "
                "agent.default_agent), prompts must describe them (agent.tool_prompt), and the model must write calls "
                "in the expected format (agent.tool_format; agent.action_stop_tokens of a tool server): a small one "
                "needs an example of a call in the prompt",
            )
        )
    return [*table, _idle_rule(config)]


def overlap_gain(record: Record, *, own_devices: bool) -> float:
    """Return the share of a synchronous step's time that one_step_off would save at best.

    A step takes rollout + learning in sequence, but only the longer of the two when they overlap. An engine on the
    learner's devices alternates with it: the learner can compute only while the engine waits, for tools.

    >>> overlap_gain({"learner_idle_share": 0.6, "engine_busy_share": 0.9}, own_devices=True)
    0.4
    """
    return min(_free_share(record, own_devices), 1 - record["learner_idle_share"])


def _free_share(record: Record, own_devices: bool) -> float:
    """Return the share of a step in which the learner could compute and does not."""
    idle = record["learner_idle_share"]
    return idle if own_devices else idle * max(0.0, 1 - record["engine_busy_share"])


def _idle_rule(config: Config) -> Rule:
    mode, own_devices = config.trainer.mode, has_own_devices(config)
    if mode == "sync":
        return Rule(
            name="learner_idle",
            value=lambda record: overlap_gain(record, own_devices=own_devices),
            begins=0.2,
            ends=0.1,
            message="rollout and learner wait for each other; overlapping, steps would be up to {value:.0%} shorter",
            advice="try trainer.mode=one_step_off",
        )
    more = "rollout.placement=separate with more rollout.num_engines, or more rollout servers"
    advice = f"try trainer.mode=fully_async; if all rollouts are slow, {more}"
    if mode == "fully_async":
        advice = f"raise trainer.max_staleness={config.trainer.staleness_bound}; if all rollouts are slow, {more}"
    return Rule(
        name="learner_idle",
        value=lambda record: _free_share(record, own_devices),
        begins=0.4,
        ends=0.3,
        message="the learner waits {value:.0%} of the time and could compute",
        advice=advice,
    )


def _precision_advice(config: Config) -> str:
    if config.rollout.backend == "jetstream" and config.learner.compute_dtype != config.rollout.jetstream.dtype:
        first = f"set rollout.jetstream.dtype={config.learner.compute_dtype} (learner.compute_dtype), "
    else:
        first = "use the learner's precision in the engine, "
    correction = config.algorithm.rollout_correction
    weights = "" if correction.rollout_is != "none" else "algorithm.rollout_correction.rollout_is=token, "
    return f"{first}{weights}or, with jetstream on one device, rollout.deterministic=true"
