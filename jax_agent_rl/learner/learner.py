"""The learner: groups of trajectories in, one or more optimizer updates, metrics out.

::

    groups ─► pack ───────► mini-batches of packed rows, whole prompts each    packing, batch
           ─► score ──────► old and reference log-probs, values; what is read  scoring
           ─► experience ─► advantages, corrections, terms of each mini-batch  experience
           ─► for each epoch and mini-batch, the critic first, then the policy:
                gradients ► sums over micro-batches of fixed shape             optimized_params
                apply ────► clip, update; non-finite ones change nothing       optimizer
           ─► end of the step: each model counts its non-finite steps          optimized_params
           ─► UpdateResult: also whose updates were applied                    metrics

``programs`` compiles what the stages run: the losses of ``objective`` and the scoring passes.
Micro-batches have a fixed shape, so another number of trajectories compiles nothing.

Around the updates of a step are, and the stages know nothing of them: the comparison with the
engine before the first (``comparison``), the lock of a step that may be cancelled
(``cancellation``), and the undo of all if one fails (``undo``).
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck, Comparison
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.experience import (
    Experience,
    PerTerm,
    RefScores,
    Scores,
    UpdateTerms,
    build_experience,
)
from jax_agent_rl.learner.image_packing import image_packing
from jax_agent_rl.learner.losses.kl import adapt_kl_coef
from jax_agent_rl.learner.losses.policy import SELECTORS, select_terms
from jax_agent_rl.learner.metrics import UpdateRecord, UpdateResult, step_metrics, step_result
from jax_agent_rl.learner.observations import IsText, all_ids, observed_positions
from jax_agent_rl.learner.optimized_params import (
    Arrays,
    LearnerState,
    OptimizedParams,
    Statistics,
)
from jax_agent_rl.learner.optimizer import learning_rate, undo_update
from jax_agent_rl.learner.packing import BatchPacker, MiniBatch, mini_batches
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import ScoreContexts, Scorer, score_contexts
from jax_agent_rl.learner.teachers import Teacher, as_teacher_reads, score_by_teachers
from jax_agent_rl.learner.undo import HostState, all_or_nothing
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh, place, replicated
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.types import Group

logger = logging.getLogger(__name__)

Progress = Callable[[Iterable[Arrays]], Iterator[Arrays]]
"""Wraps micro-batches: reports each once it is computed, and ends a cancelled step between two."""


class GradientUpdate(NamedTuple):
    """One optimizer update that is to be applied.

    Attributes:
        model: the policy or the critic.
        statistics: summed over its mini-batch.
        members: the trajectories of its mini-batch, among the step's.
        step: finished training steps on the model's schedule.
    """

    model: OptimizedParams
    gradients: Params
    statistics: Statistics
    members: slice
    step: int


class Learner:
    """The policy and its optimizer.

    With adv_estimator gae it has a critic, with a KL term a reference or teachers.

    Args:
        params: initial parameters of policy and reference; copied.
        algorithm: advantages, losses and corrections.
        config: batching, precision and the policy's optimizer.
        temperature: the rollout's sampling temperature.
        critic: the critic's optimizer.
        critic_init: a language model to start the critic from; the policy if None.
        score_by: computes old log-probs; the learner's own packed passes if None.
        vision_processor: None if trajectories hold no images.
        teachers: references of the KL in place of the initial policy, or of the policy that has
            read feedback (``algorithm.kl.reference``). A trajectory is scored by the first teacher
            that fits its row, unless it brings a teacher's scores. None: there are none.
        is_text: tells the ids of observations from the chat template's; None: all are observed. For
            the observation loss.
        total_steps: training steps of the run, over which a learning rate decays; None if unknown.

    Attributes:
        policy: the policy's parameters and optimizer.
        critic: the critic's parameters and optimizer; None without one.
        packer: packs trajectories.
        scorer: runs forward passes over packed trajectories.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        *,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        temperature: float,
        critic: CriticConfig | None = None,
        critic_init: Params | None = None,
        score_by: ScoreContexts | None = None,
        vision_processor: VisionProcessor | None = None,
        teachers: Sequence[Teacher] | None = None,
        is_text: IsText | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.model = model
        self._algorithm = algorithm
        self._config = config
        self._critic_config = critic or CriticConfig()
        self._mesh = make_mesh(config.mesh)
        self._kl_coef = float(np.float32(algorithm.kl.coef))
        self._steps = 0
        self._score_by = score_by
        self.state_before: HostState | None = None

        has_critic = algorithm.adv_estimator == "gae"
        self._warmup_steps = self._critic_config.critic_warmup if has_critic else 0
        policy_steps = None if total_steps is None else total_steps - self._warmup_steps
        self._rate = learning_rate(config, policy_steps)

        images = image_packing(vision_processor, config)  # refuses before parameters are placed
        policy = Parameterization.policy(model, params, config, mesh=self._mesh)
        self._programs = LearnerPrograms(
            model,
            policy,
            algorithm=algorithm,
            config=config,
            temperature=temperature,
            mesh=self._mesh,
            rate=self._rate,
            scored=score_by is not None,
        )
        self._objective = self._programs.objective
        observed = None
        if algorithm.observation_loss.coef:
            observed = functools.partial(observed_positions, is_text=is_text or all_ids)
        self.packer = BatchPacker(config, images, vocab_size=model.vocab_size, observed=observed)
        self.scorer = Scorer(self._programs, images)
        self.policy = OptimizedParams(
            policy.params,
            frozen=policy.frozen,
            programs=self._programs.policy,
        )
        self._merge = policy.merge

        self._teachers = teachers
        self._reference: tuple[Params, Params] | None = None
        if algorithm.kl.keeps_reference and teachers is None:
            self._reference = policy.reference()

        self.critic: OptimizedParams | None = None
        if has_critic:
            initial_params = critic_params(params if critic_init is None else critic_init)
            critic_model = Parameterization.critic(model, initial_params, config, mesh=self._mesh)
            critic_rate = learning_rate(self._critic_config, total_steps)
            self.critic = OptimizedParams(
                critic_model.params,
                frozen=critic_model.frozen,
                programs=self._programs.critic(critic_model, self._critic_config, rate=critic_rate),
                name="critic",
                section="critic",
            )

    @property
    def state(self) -> LearnerState:
        """The state to checkpoint: after the last :meth:`update` that is final.

        The next update donates its buffers.
        """
        if self.state_before is not None:  # an update is in progress, and may be undone
            return self.state_before.on_device()

        def scalar(number: np.generic) -> Any:
            return place(number, replicated(self._mesh))

        critic_state = None
        critic_nonfinite = None
        if self.critic is not None:
            critic_state = self.critic.state
            critic_nonfinite = scalar(np.int32(self.critic.nonfinite_steps))
        return LearnerState(
            policy=self.policy.state,
            critic=critic_state,
            kl_coef=scalar(np.float32(self._kl_coef)),
            steps=scalar(np.int32(self._steps)),
            nonfinite=scalar(np.int32(self.policy.nonfinite_steps)),
            critic_nonfinite=critic_nonfinite,
        )

    @state.setter
    def state(self, state: LearnerState) -> None:
        self.policy.state = state.policy
        self.policy.nonfinite_steps = int(state.nonfinite)
        self.policy.applied_rate = None
        if self.critic is not None and state.critic is not None:
            assert state.critic_nonfinite is not None  # saved with the critic
            self.critic.state = state.critic
            self.critic.nonfinite_steps = int(state.critic_nonfinite)
        self._kl_coef = float(state.kl_coef)
        self._steps = int(state.steps)

    @property
    def params(self) -> Params:
        """The policy's current parameters on device, adapters merged.

        They are valid until the next :meth:`update`.
        """
        return self._merge(*self.policy.weights)

    @property
    def trained(self) -> Params:
        """The trained parameters alone, e.g. adapters; valid until the next :meth:`update`."""
        return self.policy.state.params

    def averaged(self) -> Learner:
        """Return a learner with the moving average as :attr:`params` (``ema_decay``).

        It is valid until the next update.
        """
        state = self.policy.state
        averaged = copy.copy(self)
        averaged.policy = copy.copy(self.policy)
        averaged.policy.state = replace(state, params=state.opt_state.average)
        return averaged

    def merged(self, trained: Params) -> Params:
        """Return what :attr:`params` would be with these trained parameters."""
        return self._merge(trained, self.policy.frozen)

    def twin(self, name: str = "policy") -> Learner:
        """Return a learner that trains a copy of the parameters with an optimizer of its own.

        It shares the frozen parameters and runs the same programs. A learner with a critic has no
        twin.

        Args:
            name: names its policy in messages.
        """
        assert self.critic is None
        twin = copy.copy(self)
        twin.policy = OptimizedParams(
            self.trained,
            frozen=self.policy.frozen,
            programs=self._programs.policy,
            name=name,
        )
        return twin

    def previous_trained(self) -> Params | None:
        """Return :attr:`trained` before AdamW's last update, up to rounding.

        Returns:
            None if there was no update, or with another optimizer.
        """
        rate = self.policy.applied_rate
        if rate is None:  # a checkpoint was loaded: its last update was in the step before it
            last_step = max(self._steps - 1 - self._warmup_steps, 0)
            rate = float(np.asarray(self._rate(last_step)))
        return undo_update(self.policy.state, self._config, rate=rate)

    def previous_params(self) -> Params | None:
        """Return :attr:`params` before AdamW's last update, as :meth:`previous_trained` does."""
        previous_trained = self.previous_trained()
        if previous_trained is None:
            return None
        return self.merged(previous_trained)

    def logprobs(self, groups: Sequence[Group], *, trained: Params | None = None) -> PerTerm:
        """Return each trajectory's log-probs of its tokens with loss, float64 [S].

        Args:
            groups: their trajectories are scored in this order.
            trained: parameters in place of :attr:`trained`.
        """
        trajectories = [t for group in groups for t in group.trajectories]
        batch = self.packer.pack(trajectories)
        weights = self.policy.weights
        if trained is not None:
            weights = (trained, self.policy.frozen)
        return self.scorer.logprobs(weights, batch)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        count = self.scorer.programs_compiled + self.policy.programs_compiled
        if self.critic is not None:
            count += self.critic.programs_compiled
        for teacher in self._teachers or ():
            count += teacher.programs_compiled
        return count

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda completed, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """Train on groups: ``ppo_epochs`` times ``num_minibatches`` optimizer updates.

        Each update is over an equal share of the prompts.

        Args:
            groups: each with at least one trajectory.
            masked: ids of trajectories that count in baselines only.
            tick: called with (micro-batches done, total) for a progress display.
            cancellation: cancels the step for a caller that wants the state before it.
            check: inspects the agreement of engine and learner before the first optimizer update.

        Raises:
            StepCancelled: the step was cancelled; nothing has changed.
            NonFiniteError: in ``max_nonfinite_steps`` steps in a row no update of a model was
                finite; this one is undone.
        """
        began = time.perf_counter()
        cancellation = cancellation or StepCancellation()
        minis, experience = self.prepare(groups, masked=masked, since=check.since)
        comparison = experience.comparison
        if comparison is not None:
            check.inspect(comparison)

        models = 1 if self.critic is None else 2
        num_updates = len(minis) * self._config.ppo_epochs * models
        progress = self._progress(minis, tick, cancellation)
        policy_updates: list[UpdateRecord] = []
        critic_updates: list[UpdateRecord] = []
        with all_or_nothing(self, cancellation, updates=num_updates):
            for update in self._updates(minis, experience, progress):
                if comparison is None and update.model is self.policy:
                    # Without old log-probs, the policy's first pass is what can be compared: only
                    # this one is of the parameters that the engine has.
                    comparison = Comparison.from_statistics(update.statistics)
                    check.inspect(comparison)

                record = _apply(update, cancellation)
                if update.model is self.policy:
                    policy_updates.append(record)
                else:
                    critic_updates.append(record)
                del update  # its gradients make room for the next ones
            self._end_step(policy_updates, critic_updates)

        # During the critic's warm-up, trajectories are trained on if they train the critic.
        counted_updates = critic_updates if self._is_warming_up else policy_updates
        self._steps += 1
        metrics = step_metrics(
            policy_updates,
            critic_updates,
            [mini.batch for mini in minis],
            seconds=time.perf_counter() - began,
            has_experts=self.model.experts is not None,
        )
        metrics |= experience.metrics
        metrics |= self._control_kl(experience, policy_updates)
        return step_result(experience, counted_updates, metrics, masked=masked)

    @property
    def _is_warming_up(self) -> bool:
        """Whether the next step trains the critic alone."""
        return self._steps < self._warmup_steps

    # --- pack, score, build experience ------------------------------------------------------------

    def prepare(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        since: int = 0,
    ) -> tuple[list[MiniBatch], Experience]:
        """Pack mini-batches, score them, and compute what the losses need of the step.

        Args:
            masked: ids of trajectories that count in baselines only.
            since: first policy version of the parameters that score.
        """
        minis = self.packer.mini_batches(groups)
        scores = self._score(minis, groups)
        experience = build_experience(
            groups,
            self._algorithm,
            scores,
            kl_coef=self._kl_coef,
            masked=masked,
            since=since,
            mini_batches=[mini.members for mini in minis],
            observed=[count for mini in minis for count in mini.batch.num_observed],
        )
        return minis, experience

    def _score(self, minis: Sequence[MiniBatch], groups: Sequence[Group]) -> Scores:
        """Compute only the scores that something reads: each is a forward pass."""
        old_logprobs: PerTerm | None = None
        if self._score_by is not None:
            old_logprobs = score_contexts(groups, functools.partial(self._score_by, self.params))
        elif not (self._objective.on_policy or self._objective.bypass):
            old_logprobs = []
            for mini in minis:
                old_logprobs += self.scorer.logprobs(self.policy.weights, mini.batch)

        ref: Any = None
        if self._teachers is not None:
            trajectories = [t for group in groups for t in group.trajectories]
            ref = score_by_teachers(self._teachers, trajectories)
        elif self._reference is not None:
            ref = []
            for mini in minis:
                ref += self.scorer.reference(self._reference, mini.batch)
        elif self._algorithm.kl.where != "none":
            ref = self._self_taught(groups, old_logprobs)

        values: list[np.ndarray] | None = None
        if self.critic is not None:
            values = []
            for mini in minis:
                values += self.scorer.values(self.critic.weights, mini.batch)
        return Scores(old=old_logprobs, ref=ref, values=values)

    def _self_taught(self, groups: Sequence[Group], old_logprobs: PerTerm | None) -> RefScores:
        """Score trajectories by the policy itself, which has read the feedback on each.

        Where there is no feedback, the old log-probs are its scores already.

        Args:
            old_logprobs: None if they were not computed: then all trajectories are scored.
        """
        ref: Any = []
        for mini_groups in mini_batches(groups, self._config.num_minibatches):
            members = [member for group in mini_groups for member in group.trajectories]
            if old_logprobs is None:
                mini_ref: Any = [None] * len(members)
                unknown = list(range(len(members)))
            else:
                mini_ref = list(old_logprobs[len(ref) : len(ref) + len(members)])
                unknown = [n for n, member in enumerate(members) if member.teacher_prompt_ids]

            if unknown:
                batch = self.packer.pack([as_teacher_reads(members[number]) for number in unknown])
                scores = self.scorer.reference(self.policy.weights, batch)
                for number, logprobs in zip(unknown, scores, strict=True):
                    mini_ref[number] = logprobs
            ref += mini_ref
        return ref

    # --- gradients --------------------------------------------------------------------------------

    def _progress(
        self,
        minis: Sequence[MiniBatch],
        tick: Callable[[int, int], None],
        cancellation: StepCancellation,
    ) -> Progress:
        """Return the progress of a whole step."""
        models = 0
        if self.critic is not None:
            models += 1
        if not self._is_warming_up:
            models += 1
        micro_batches = sum(math.ceil(m.batch.num_rows / self.scorer.rows) for m in minis)
        total = micro_batches * self._config.ppo_epochs * models
        completed = 0

        def counted(micro_batches: Iterable[Arrays]) -> Iterator[Arrays]:
            nonlocal completed
            for arrays in micro_batches:
                yield arrays
                cancellation.check()
                completed += 1
                tick(completed, total)

        return counted

    def _updates(
        self,
        minis: Sequence[MiniBatch],
        experience: Experience,
        progress: Progress,
    ) -> Iterator[GradientUpdate]:
        """Yield every update of the step, each computed once the one before it was applied."""
        for _ in range(self._config.ppo_epochs):
            for mini, terms in zip(minis, experience.updates, strict=True):
                for model, batch in self.batches(mini, terms):
                    if not batch.terms["weight"].any():
                        # The optimizer's momentum would still move the parameters.
                        logger.warning(
                            "every token of an update was masked or rejected: it was skipped"
                        )
                        continue

                    step = self._steps
                    if model is self.policy:
                        step -= self._warmup_steps  # its schedule begins after the warm-up
                    # No name here holds the gradients: they are freed once they are applied.
                    yield GradientUpdate(
                        model,
                        *self.gradients(model, batch, progress),
                        members=mini.members,
                        step=step,
                    )

    def batches(self, mini: MiniBatch, terms: UpdateTerms) -> list[tuple[OptimizedParams, Batch]]:
        """Return each model that is trained, the critic first, and its batch of a mini-batch."""
        batches = []
        if self.critic is not None:
            batches.append((self.critic, mini.batch.with_terms(**terms.critic)))
        if self._is_warming_up:
            return batches

        policy_terms = dict(terms.policy)
        if self._algorithm.policy_loss.loss_mode in SELECTORS:
            policy_terms["chosen"] = select_terms(
                self.scorer.logprobs(self.policy.weights, mini.batch),
                policy_terms,
                terms.active,
                self._objective.loss,
                seed=int(self.policy.state.updates),
            )
        policy_batch = mini.batch.with_terms(**policy_terms)
        if terms.candidates is not None:
            ids, logprobs = zip(*terms.candidates, strict=True)
            policy_batch = policy_batch.with_candidates(ids, logprobs)
        if terms.observation_weights is not None:
            policy_batch = policy_batch.with_observations(terms.observation_weights)
        batches.append((self.policy, policy_batch))
        return batches

    def gradients(
        self,
        model: OptimizedParams,
        batch: Batch,
        progress: Progress,
    ) -> tuple[Params, Statistics]:
        """Return the gradient and the statistics of a model's batch.

        Args:
            progress: passes the micro-batches on, and may count them.
        """
        balance = {}
        if model is self.policy:
            balance = self.scorer.router_balance(model.weights, batch)
        for arrays in self.scorer.blanks(batch, model):  # compile what later steps may need
            model.gradients([arrays | balance])
        micro_batches = (arrays | balance for arrays in self.scorer.micro_batches(batch))
        return model.gradients(progress(micro_batches))

    # --- end of the step --------------------------------------------------------------------------

    def _end_step(
        self,
        policy_updates: Sequence[UpdateRecord],
        critic_updates: Sequence[UpdateRecord],
    ) -> None:
        """Let each model count the step by its own updates.

        Raises:
            NonFiniteError: a model has reached the limit of steps in a row.
        """
        limit = self._config.max_nonfinite_steps
        self.policy.end_step(policy_updates)
        if self.critic is not None:
            self.critic.end_step(critic_updates)
            # The critic is named first: its values enter the policy's gradient.
            self.critic.require_finite(limit)
        self.policy.require_finite(limit)

    # --- KL to the reference ----------------------------------------------------------------------

    def _control_kl(
        self, experience: Experience, policy_updates: Sequence[UpdateRecord]
    ) -> dict[str, float]:
        """Adapt the coefficient to the KL of the step, if the policy was updated.

        Returns:
            metrics.
        """
        kl = self._algorithm.kl
        if kl.where == "none":
            return {}

        is_policy_updated = any(update.finite for update in policy_updates)
        is_measured = bool(np.isfinite(experience.kl))
        if kl.controller == "adaptive" and is_policy_updated and is_measured:
            coef = adapt_kl_coef(
                self._kl_coef,
                experience.kl,
                len(experience.active),
                target=kl.target,
                horizon=kl.horizon,
            )
            # A checkpoint keeps a float32: a resumed run goes on with the very same number.
            self._kl_coef = float(np.float32(coef))

        metrics = {}
        if is_measured:
            metrics["kl_reference"] = experience.kl
        metrics["kl_coef"] = self._kl_coef
        return metrics


def _apply(update: GradientUpdate, cancellation: StepCancellation) -> UpdateRecord:
    """Apply an update unless the step was cancelled; return its record."""
    model = update.model
    model.compile_apply(update.gradients)  # the lock of the step must never wait for a compiler
    with cancellation.update():
        applied = model.apply(update.gradients, update.step)
        if not applied.finite:
            cancellation.unchanged()
    return UpdateRecord(statistics=update.statistics, members=update.members, **vars(applied))
