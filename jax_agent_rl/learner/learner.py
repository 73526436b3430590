"""The learner: groups of trajectories in, one or more optimizer updates, metrics out.

::

    groups ─► pack ────► mini-batches of packed rows, whole prompts each       scoring, packing
           ─► score ───► old and reference log-probs, values; what is read     scoring
           ─► build ───► Experience: advantages, corrections, active tokens    experience
           ─► for each epoch and mini-batch, the critic first, then the policy:
                terms ─────► Batch: what each token contributes to the loss    experience
                gradients ─► sums over micro-batches of fixed shape            optimized_params
                apply ─────► clip, update; non-finite ones change nothing      optimizer
           ─► end of the step: each model counts its non-finite steps          optimized_params
           ─► UpdateResult: also whose updates were applied                    metrics

``programs`` compiles what the stages run: the losses of ``objective`` and the scoring passes.
Micro-batches have a fixed shape, so another number of trajectories compiles nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.experience import (
    Experience,
    PerTerm,
    Scores,
    build_experience,
    mini_batch_terms,
    score_contexts,
)
from jax_agent_rl.learner.image_packing import image_packing
from jax_agent_rl.learner.losses.kl import adapt_kl_coef
from jax_agent_rl.learner.losses.policy import SELECTORS, select_terms
from jax_agent_rl.learner.metrics import (
    UNCHECKED,
    AgreementCheck,
    Comparison,
    UpdateRecord,
    UpdateResult,
    replay_metrics,
    step_metrics,
)
from jax_agent_rl.learner.optimized_params import (
    HostState,
    LearnerState,
    OptimizedParams,
    all_or_nothing,
)
from jax_agent_rl.learner.optimizer import learning_rate, undo_update
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import MiniBatch, ScoreContexts, Scorer
from jax_agent_rl.learner.teachers import Teacher, score_by_teachers
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh, place, replicated
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.types import Group

logger = logging.getLogger(__name__)


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
        teachers: references of the KL in place of the initial policy. A trajectory is scored by the
            first teacher that fits its row, unless it brings a teacher's scores. None: the
            reference is the initial policy.
        total_steps: training steps of the run, over which a learning rate decays; None if unknown.
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
        # Takes the statistics of the next policy update, if no pass before it compares the engine.
        self._inspect_next_update: Callable[[Comparison], None] | None = None

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
        self._scorer = Scorer(self._programs, images)
        self._policy = OptimizedParams(
            policy.params,
            frozen=policy.frozen,
            programs=self._programs.policy,
        )
        self._merge = policy.merge

        self._teachers = teachers
        self._reference: tuple[Params, Params] | None = None
        if algorithm.kl.where != "none" and teachers is None:
            self._reference = policy.reference()

        self._critic: OptimizedParams | None = None
        if has_critic:
            initial_params = critic_params(params if critic_init is None else critic_init)
            critic_model = Parameterization.critic(model, initial_params, config, mesh=self._mesh)
            critic_rate = learning_rate(self._critic_config, total_steps)
            self._critic = OptimizedParams(
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
        if self._critic is not None:
            critic_state = self._critic.state
            critic_nonfinite = scalar(np.int32(self._critic.nonfinite_steps))
        return LearnerState(
            policy=self._policy.state,
            critic=critic_state,
            kl_coef=scalar(np.float32(self._kl_coef)),
            steps=scalar(np.int32(self._steps)),
            nonfinite=scalar(np.int32(self._policy.nonfinite_steps)),
            critic_nonfinite=critic_nonfinite,
        )

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._policy.state = state.policy
        self._policy.nonfinite_steps = int(state.nonfinite)
        self._policy.applied_rate = None
        if self._critic is not None and state.critic is not None:
            assert state.critic_nonfinite is not None  # saved with the critic
            self._critic.state = state.critic
            self._critic.nonfinite_steps = int(state.critic_nonfinite)
        self._kl_coef = float(state.kl_coef)
        self._steps = int(state.steps)

    @property
    def params(self) -> Params:
        """The policy's current parameters on device, adapters merged.

        They are valid until the next :meth:`update`.
        """
        return self._merge(*self._policy.weights)

    @property
    def trained(self) -> Params:
        """The trained parameters alone, e.g. adapters; valid until the next :meth:`update`."""
        return self._policy.state.params

    def averaged(self) -> Learner:
        """Return a learner with the moving average as :attr:`params` (``ema_decay``).

        It is valid until the next update.
        """
        state = self._policy.state
        averaged = copy.copy(self)
        averaged._policy = copy.copy(self._policy)
        averaged._policy.state = replace(state, params=state.opt_state.average)
        return averaged

    def merged(self, trained: Params) -> Params:
        """Return what :attr:`params` would be with these trained parameters."""
        return self._merge(trained, self._policy.frozen)

    def twin(self, name: str = "policy") -> Learner:
        """Return a learner that trains a copy of the parameters with an optimizer of its own.

        It shares the frozen parameters and runs the same programs. A learner with a critic has no
        twin.

        Args:
            name: names its policy in messages.
        """
        assert self._critic is None
        twin = copy.copy(self)
        twin._policy = OptimizedParams(
            self.trained,
            frozen=self._policy.frozen,
            programs=self._programs.policy,
            name=name,
        )
        return twin

    def previous_trained(self) -> Params | None:
        """Return :attr:`trained` before AdamW's last update, up to rounding.

        Returns:
            None if there was no update, or with another optimizer.
        """
        rate = self._policy.applied_rate
        if rate is None:  # a checkpoint was loaded: its last update was in the step before it
            last_step = max(self._steps - 1 - self._warmup_steps, 0)
            rate = float(np.asarray(self._rate(last_step)))
        return undo_update(self._policy.state, self._config, rate=rate)

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
        batch = self._scorer.pack_one(trajectories)
        weights = self._policy.weights
        if trained is not None:
            weights = (trained, self._policy.frozen)
        return self._scorer.logprobs(weights, batch)

    def store(self, folder: str, dtype: str) -> str:
        """Write :attr:`params` to a version's folder, in the format of ``models.stored``.

        Returns:
            the manifest's digest.

        Raises:
            OSError: they cannot be written.
        """
        stored.write_part(folder, self.params, part=0, dtype=dtype)
        return stored.publish(folder, parts=1)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        count = self._scorer.programs_compiled + self._policy.programs_compiled
        if self._critic is not None:
            count += self._critic.programs_compiled
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
        minis, experience = self._prepare(groups, masked=masked, since=check.since)

        # Without old log-probs, the first update's own forward pass is what can be compared.
        self._inspect_next_update = None
        comparison = experience.comparison(self._objective.bypass)
        if comparison is None:
            self._inspect_next_update = check.inspect
        else:
            check.inspect(comparison)

        # A single update changes everything or nothing by itself.
        is_single_update = len(minis) * self._config.ppo_epochs == 1 and self._critic is None
        undo = contextlib.nullcontext() if is_single_update else all_or_nothing(self, cancellation)
        with undo:
            policy_updates, critic_updates = self._optimize(minis, experience, tick, cancellation)
            self._end_step(policy_updates, critic_updates)
        # During the critic's warm-up, trajectories are trained on if they train the critic.
        counted_updates = critic_updates if self._is_warming_up else policy_updates
        self._steps += 1

        batches = [mini.batch for mini in minis]
        seconds = time.perf_counter() - began
        metrics = step_metrics(policy_updates, critic_updates, batches, seconds=seconds)
        if self._programs.model.experts is not None:
            metrics |= replay_metrics(batches)
        metrics |= experience.metrics
        is_policy_updated = any(update.finite for update in policy_updates)
        metrics |= self._control_kl(experience, is_policy_updated)

        is_any_finite = any(update.finite for update in counted_updates)
        return UpdateResult(
            metrics=metrics,
            skipped=bool(counted_updates) and not is_any_finite,
            rejected=experience.inactive(groups).difference(masked),
            unapplied=experience.unapplied(groups, counted_updates),
            tokens=experience.by_trajectory(groups),
        )

    @property
    def _is_warming_up(self) -> bool:
        """Whether the next step trains the critic alone."""
        return self._steps < self._warmup_steps

    # --- pack, score, build experience ------------------------------------------------------------

    def _prepare(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        since: int = 0,
    ) -> tuple[list[MiniBatch], Experience]:
        """Pack mini-batches, score them, and compute what the losses need of the step."""
        minis = self._scorer.pack(groups)
        scores = self._score(minis, groups)
        experience = build_experience(
            groups,
            self._algorithm,
            scores,
            kl_coef=self._kl_coef,
            masked=masked,
            since=since,
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
                old_logprobs += self._scorer.logprobs(self._policy.weights, mini.batch)

        ref: Any = None
        if self._teachers is not None:
            trajectories = [t for group in groups for t in group.trajectories]
            ref = score_by_teachers(self._teachers, trajectories)
        elif self._reference is not None:
            ref = []
            for mini in minis:
                ref += self._scorer.reference(self._reference, mini.batch)

        values: list[np.ndarray] | None = None
        if self._critic is not None:
            values = []
            for mini in minis:
                values += self._scorer.values(self._critic.weights, mini.batch)
        return Scores(old=old_logprobs, ref=ref, values=values)

    # --- terms, gradients, apply ------------------------------------------------------------------

    def _optimize(
        self,
        minis: Sequence[MiniBatch],
        experience: Experience,
        tick: Callable[[int, int], None],
        cancellation: StepCancellation,
    ) -> tuple[list[UpdateRecord], list[UpdateRecord]]:
        """Run all epochs and mini-batches.

        Returns:
            records of the policy's updates, and of the critic's.
        """
        trains_policy = not self._is_warming_up
        epochs = self._config.ppo_epochs
        micro_batches = sum(math.ceil(m.batch.num_rows / self._scorer.rows) for m in minis)
        models = [trains_policy, self._critic is not None].count(True)
        total = micro_batches * epochs * models
        completed = 0

        def count_micro_batch() -> None:
            nonlocal completed
            cancellation.check()
            completed += 1
            tick(completed, total)

        policy_updates: list[UpdateRecord] = []
        critic_updates: list[UpdateRecord] = []
        for _ in range(epochs):
            for mini in minis:
                policy_batch, critic_batch = self._with_terms(mini, experience)
                if self._critic is not None:
                    critic_updates += self._train(
                        self._critic, critic_batch, mini.members, count_micro_batch, cancellation
                    )
                if trains_policy:
                    policy_updates += self._train(
                        self._policy, policy_batch, mini.members, count_micro_batch, cancellation
                    )
        return policy_updates, critic_updates

    def _with_terms(self, mini: MiniBatch, experience: Experience) -> tuple[Batch, Batch]:
        """Return the mini-batch with the terms of the policy's loss, and with the critic's."""
        policy_terms, critic_terms = mini_batch_terms(
            experience,
            mini.members,
            self._algorithm,
            kl_coef=self._kl_coef,
        )
        if self._algorithm.policy_loss.loss_mode in SELECTORS:
            policy_terms["chosen"] = select_terms(
                self._scorer.logprobs(self._policy.weights, mini.batch),
                policy_terms,
                experience.active[mini.members],
                self._objective.loss,
                seed=int(self._policy.state.updates),
            )

        policy_batch = mini.batch.with_terms(**policy_terms)
        if experience.candidates is not None:
            ids, logprobs = zip(*experience.candidates[mini.members], strict=True)
            policy_batch = policy_batch.with_candidates(ids, logprobs)
        return policy_batch, mini.batch.with_terms(**critic_terms)

    def _train(
        self,
        model: OptimizedParams,
        batch: Batch,
        members: slice,
        tick: Callable[[], None],
        cancellation: StepCancellation,
    ) -> list[UpdateRecord]:
        """Run one update of a model; return its record.

        Without any token to train on there is no update: the optimizer's momentum would still move
        the parameters.
        """
        if not batch.terms["weight"].any():
            logger.warning("every token of an update was masked or rejected: it was skipped")
            return []

        is_policy = model is self._policy
        balance = self._scorer.router_balance(model.weights, batch) if is_policy else {}
        for arrays in self._scorer.blanks(batch, model):  # compile what later steps may need
            model.gradients([arrays | balance])
        micro_batches = (arrays | balance for arrays in self._scorer.micro_batches(batch))
        gradients, statistics = model.gradients(micro_batches, tick)

        # Only the first update is of the parameters that the engine has.
        inspect = self._inspect_next_update
        if is_policy and inspect is not None:
            self._inspect_next_update = None
            inspect(Comparison.from_statistics(statistics))

        step = self._steps
        if is_policy:
            step -= self._warmup_steps  # its schedule begins after the critic's warm-up
        applied = model.apply(gradients, step, cancellation)
        return [UpdateRecord(statistics=statistics, members=members, **vars(applied))]

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
        self._policy.end_step(policy_updates)
        if self._critic is not None:
            self._critic.end_step(critic_updates)
            # The critic is named first: its values enter the policy's gradient.
            self._critic.require_finite(limit)
        self._policy.require_finite(limit)

    # --- KL to the reference ----------------------------------------------------------------------

    def _control_kl(self, experience: Experience, is_policy_updated: bool) -> dict[str, float]:
        """Adapt the coefficient to the KL of the step, if the policy was updated.

        Returns:
            metrics.
        """
        kl = self._algorithm.kl
        if kl.where == "none":
            return {}

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
