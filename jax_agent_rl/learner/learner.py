"""The learner: groups of trajectories in, one or more optimizer updates, metrics out.

::

    groups ─► pack ────► mini-batches of packed rows, whole prompts each                 scoring.Scorer, packing
           ─► score ───► old and reference log-probs, values (only what is read)         scoring.Scorer
           ─► build ───► Experience: advantages, corrections, active tokens (numpy)      experience
           ─► for each epoch and mini-batch, the critic first, then the policy:
                terms ─────► Batch: what each token contributes to the loss              experience
                gradients ─► sums over micro-batches of fixed shape                      optimized_params
                apply ─────► clip, update; a non-finite gradient changes nothing         optimizer
           ─► end of the step: each model counts its non-finite steps by itself          optimized_params
           ─► UpdateResult: also whose updates were applied                              metrics

``programs`` compiles what the stages run: the losses of ``objective`` and the scoring passes.
Micro-batches have a fixed shape, so another number of trajectories compiles nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.experience import (
    Experience,
    PerTerm,
    Scores,
    build_experience,
    mini_batch_terms,
    score_contexts,
)
from jax_agent_rl.learner.image_packing import image_packing
from jax_agent_rl.learner.losses import adapt_kl_coef
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
from jax_agent_rl.learner.optimized_params import HostState, LearnerState, OptimizedParams, all_or_nothing
from jax_agent_rl.learner.optimizer import learning_rate, undo_update
from jax_agent_rl.learner.parameterization import Parameterization, critic_params
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import MiniBatch, ScoreContexts, Scorer, Teacher, score_by_teachers
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh, place, replicated
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.types import Group

logger = logging.getLogger(__name__)


class Learner:
    """The policy and its optimizer; with adv_estimator gae a critic, with a KL term a reference or teachers.

    Args:
        model: the model's hyperparameters.
        params: initial parameters of policy and reference; copied.
        algorithm: advantages, losses and corrections.
        config: batching, precision and the policy's optimizer.
        temperature: the rollout's sampling temperature.
        critic: the critic's optimizer.
        critic_init: a language model to start the critic from; the policy if None.
        score_by: computes old log-probs; the learner's own packed passes if None.
        vision_processor: the model's image processor; None if trajectories hold no images.
        teachers: references of the KL in place of the initial policy, for trajectories that bring no scores of theirs;
            a trajectory's is the first that fits it. None: the initial policy.
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
        self._algorithm, self._config, self._critic_config = algorithm, config, critic or CriticConfig()
        self._mesh = make_mesh(config.mesh)
        self._kl_coef, self._steps = float(np.float32(algorithm.kl.coef)), 0
        self._score_by = score_by
        self.state_before: HostState | None = None
        self._uninspected: Callable[[Comparison], None] | None = None  # takes the statistics of the next policy update
        self._warmup_steps = self._critic_config.critic_warmup if algorithm.adv_estimator == "gae" else 0
        self._rate = learning_rate(config, None if total_steps is None else total_steps - self._warmup_steps)
        images = image_packing(vision_processor, config)
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
        self._policy = OptimizedParams(policy.params, frozen=policy.frozen, programs=self._programs.policy)
        self._merge = policy.merge
        self._teachers = teachers
        self._reference = policy.reference() if algorithm.kl.where != "none" and teachers is None else None
        self._critic: OptimizedParams | None = None
        if algorithm.adv_estimator == "gae":
            initial = critic_params(params if critic_init is None else critic_init)
            rate = learning_rate(self._critic_config, total_steps)
            own = Parameterization.critic(model, initial, config, mesh=self._mesh)
            programs = self._programs.critic(own, self._critic_config, rate=rate)
            self._critic = OptimizedParams(
                own.params, frozen=own.frozen, programs=programs, name="critic", section="critic"
            )

    @property
    def state(self) -> LearnerState:
        """The state to checkpoint: after the last :meth:`update` that is final. The next one donates its buffers."""
        if (before := self.state_before) is not None:
            return before.on_device()

        def scalar(number: np.generic) -> Any:
            return place(number, replicated(self._mesh))

        critic = self._critic
        return LearnerState(
            policy=self._policy.state,
            critic=None if critic is None else critic.state,
            kl_coef=scalar(np.float32(self._kl_coef)),
            steps=scalar(np.int32(self._steps)),
            nonfinite=scalar(np.int32(self._policy.nonfinite_steps)),
            critic_nonfinite=None if critic is None else scalar(np.int32(critic.nonfinite_steps)),
        )

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._policy.state = state.policy
        self._policy.nonfinite_steps = int(state.nonfinite)
        self._policy.applied_rate = None
        if self._critic is not None and state.critic is not None and state.critic_nonfinite is not None:
            self._critic.state = state.critic
            self._critic.nonfinite_steps = int(state.critic_nonfinite)
        self._kl_coef = float(state.kl_coef)
        self._steps = int(state.steps)

    @property
    def params(self) -> Params:
        """The policy's current parameters on device, adapters merged; valid until the next :meth:`update`."""
        return self._merge(*self._policy.weights)

    @property
    def trained(self) -> Params:
        """The trained parameters alone, e.g. adapters; valid until the next :meth:`update`."""
        return self._policy.state.params

    def averaged(self) -> Learner:
        """Return a learner with the moving average as :attr:`params` (``ema_decay``); valid until the next update."""
        state = self._policy.state
        averaged = copy.copy(self)
        averaged._policy = copy.copy(self._policy)
        averaged._policy.state = replace(state, params=state.opt_state.average)
        return averaged

    def merged(self, trained: Params) -> Params:
        """Return what :attr:`params` would be with these trained parameters."""
        return self._merge(trained, self._policy.frozen)

    def twin(self, name: str = "policy") -> Learner:
        """Return a learner with a copy of the trained parameters and a new optimizer, and the same frozen ones.

        It runs the same programs. A learner with a critic has no twin.

        Args:
            name: of its policy, for messages.
        """
        assert self._critic is None
        twin, programs = copy.copy(self), self._programs.policy
        twin._policy = OptimizedParams(self.trained, frozen=self._policy.frozen, programs=programs, name=name)
        return twin

    def trained_before(self) -> Params | None:
        """Return :attr:`trained` before AdamW's last update, to rounding; None without one, or of another optimizer."""
        rate = self._policy.applied_rate
        if rate is None:  # of a checkpoint: the update was that of the step before it
            rate = float(np.asarray(self._rate(max(self._steps - 1 - self._warmup_steps, 0))))
        return undo_update(self._policy.state, self._config, rate=rate)

    def params_before(self) -> Params | None:
        """Return :attr:`params` before AdamW's last update, as :meth:`trained_before` does."""
        before = self.trained_before()
        return None if before is None else self.merged(before)

    def logprobs(self, groups: Sequence[Group], *, trained: Params | None = None) -> PerTerm:
        """Return each trajectory's log-probs of its tokens with loss, float64 [S].

        Args:
            groups: of the trajectories.
            trained: parameters in place of :attr:`trained`.
        """
        batch = self._scorer.pack_one([t for g in groups for t in g.trajectories])
        weights = self._policy.weights if trained is None else (trained, self._policy.frozen)
        return self._scorer.logprobs(weights, batch)

    def store(self, folder: str, dtype: str) -> str:
        """Write :attr:`params`, in this dtype, to a version's folder; return its manifest's digest (``models.stored``).

        Raises:
            OSError: they cannot be written.
        """
        stored.write_part(folder, self.params, part=0, dtype=dtype)
        return stored.publish(folder, parts=1)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        models = [model for model in (self._policy, self._critic, *(self._teachers or ())) if model is not None]
        return self._scorer.programs_compiled + sum(model.programs_compiled for model in models)

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda done, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """Train on groups: ``ppo_epochs`` times ``num_minibatches`` updates, each over an equal share of the prompts.

        Args:
            groups: each with at least one trajectory.
            masked: ids of trajectories that count in baselines only.
            tick: called with (micro-batches done, total) for a progress display.
            cancellation: cancels the step for a caller that wants the state before it.
            check: inspects the agreement of engine and learner before the first optimizer update.

        Raises:
            StepCancelled: the step was cancelled; nothing has changed.
            NonFiniteError: in ``max_nonfinite_steps`` steps in a row no update of a model was finite; this one is
                undone.
        """
        begin, cancellation = time.perf_counter(), cancellation or StepCancellation()
        minis, experience = self._prepare(groups, masked=masked, since=check.since)
        comparison = experience.comparison(self._objective.bypass)
        if comparison is not None:
            check.inspect(comparison)
        self._uninspected = check.inspect if comparison is None else None
        is_single = len(minis) * self._config.ppo_epochs == 1 and self._critic is None
        with contextlib.nullcontext() if is_single else all_or_nothing(self, cancellation):
            policy, critic = self._optimize(minis, experience, tick, cancellation)
            self._end_step(policy, critic)
        # While only the critic learns, it is what trajectories are used for.
        trained = critic if self._is_warming_up else policy
        self._steps += 1
        batches = [mini.batch for mini in minis]
        metrics = step_metrics(policy, critic, batches, seconds=time.perf_counter() - begin)
        if self._programs.model.experts is not None:
            metrics |= replay_metrics(batches)
        is_updated = any(record.finite for record in policy)
        return UpdateResult(
            metrics=metrics | experience.metrics | self._control_kl(experience, is_updated),
            skipped=bool(trained) and not any(record.finite for record in trained),
            rejected=experience.inactive(groups).difference(masked),
            unapplied=experience.unapplied(groups, trained),
            tokens=experience.by_trajectory(groups),
        )

    @property
    def _is_warming_up(self) -> bool:
        """Whether the next step trains the critic alone."""
        return self._steps < self._warmup_steps

    # --- pack, score, build experience --------------------------------------------------------------------------

    def _prepare(
        self, groups: Sequence[Group], *, masked: Collection[str] = (), since: int = 0
    ) -> tuple[list[MiniBatch], Experience]:
        """Pack mini-batches, score them, and compute what the losses need of the step."""
        minis = self._scorer.pack(groups)
        scores = self._score(minis, groups)
        experience = build_experience(
            groups, self._algorithm, scores, kl_coef=self._kl_coef, masked=masked, since=since
        )
        return minis, experience

    def _score(self, minis: Sequence[MiniBatch], groups: Sequence[Group]) -> Scores:
        """Compute only the scores that something reads: each is a forward pass."""
        old = values = None
        ref: Any = None
        if self._teachers is not None:
            ref = score_by_teachers(self._teachers, [t for group in groups for t in group.trajectories])
        if self._score_by is not None:
            old = score_contexts(groups, functools.partial(self._score_by, self.params))
        elif not (self._objective.on_policy or self._objective.bypass):
            old = [x for mini in minis for x in self._scorer.logprobs(self._policy.weights, mini.batch)]
        if self._reference is not None:
            ref = [x for mini in minis for x in self._scorer.reference(self._reference, mini.batch)]
        if self._critic is not None:
            values = [v for mini in minis for v in self._scorer.values(self._critic.weights, mini.batch)]
        return Scores(old=old, ref=ref, values=values)

    # --- terms, gradients, apply --------------------------------------------------------------------------------

    def _optimize(
        self,
        minis: Sequence[MiniBatch],
        experience: Experience,
        tick: Callable[[int, int], None],
        cancellation: StepCancellation,
    ) -> tuple[list[UpdateRecord], list[UpdateRecord]]:
        """Run all epochs and mini-batches; return records of the policy's and of the critic's updates."""
        models = int(not self._is_warming_up) + int(self._critic is not None)
        total = sum(-(-m.batch.num_rows // self._scorer.rows) for m in minis) * self._config.ppo_epochs * models
        done = itertools.count(1)
        policy: list[UpdateRecord] = []
        critic: list[UpdateRecord] = []

        def ticked() -> None:
            cancellation.check()
            tick(next(done), total)

        for mini in [*minis] * self._config.ppo_epochs:
            policy_batch, critic_batch = self._with_terms(mini, experience)
            if self._critic is not None:
                critic += self._train(self._critic, critic_batch, mini.members, ticked, cancellation)
            if not self._is_warming_up:
                policy += self._train(self._policy, policy_batch, mini.members, ticked, cancellation)
        return policy, critic

    def _with_terms(self, mini: MiniBatch, experience: Experience) -> tuple[Batch, Batch]:
        """Return the mini-batch with the terms of the policy's loss, and with those of the critic's."""
        policy, critic = mini_batch_terms(experience, mini.members, self._algorithm, kl_coef=self._kl_coef)
        if self._algorithm.policy_loss.loss_mode in SELECTORS:
            policy["chosen"] = select_terms(
                self._scorer.logprobs(self._policy.weights, mini.batch),
                policy,
                experience.active[mini.members],
                self._objective.loss,
                seed=int(self._policy.state.updates),
            )
        batch = mini.batch.with_terms(**policy)
        if experience.candidates is not None:
            ids, logprobs = zip(*experience.candidates[mini.members], strict=True)
            batch = batch.with_candidates(ids, logprobs)
        return batch, mini.batch.with_terms(**critic)

    def _train(
        self,
        model: OptimizedParams,
        batch: Batch,
        members: slice,
        tick: Callable[[], None],
        cancellation: StepCancellation,
    ) -> list[UpdateRecord]:
        """Run one update; none if no token of it is trained on (the optimizer's momentum would still move it)."""
        if not batch.terms["weight"].any():
            logger.warning("every token of an update was masked or rejected: it was skipped")
            return []
        is_policy = model is self._policy
        balance = self._scorer.router_balance(model.weights, batch) if is_policy else {}
        for arrays in self._scorer.blanks(batch, model):
            model.gradients([arrays | balance])
        micro_batches = (arrays | balance for arrays in self._scorer.micro_batches(batch))
        gradients, statistics = model.gradients(micro_batches, tick)
        if is_policy and self._uninspected is not None:  # later updates are of parameters that the engine does not have
            inspect, self._uninspected = self._uninspected, None
            inspect(Comparison.from_statistics(statistics))
        step = self._steps
        if is_policy:
            step -= self._warmup_steps  # its schedule begins after the critic's warm-up
        applied = model.apply(gradients, step, cancellation)
        return [UpdateRecord(statistics=statistics, members=members, **vars(applied))]

    def _end_step(self, policy: Sequence[UpdateRecord], critic: Sequence[UpdateRecord]) -> None:
        """Let each model count the step by its own updates; raise NonFiniteError at the limit of one."""
        limit = self._config.max_nonfinite_steps
        self._policy.end_step(policy)
        if self._critic is not None:  # first, as what it says of values reaches the policy's gradient
            self._critic.end_step(critic)
            self._critic.require_finite(limit)
        self._policy.require_finite(limit)

    # --- KL to the reference ------------------------------------------------------------------------------------

    def _control_kl(self, experience: Experience, is_updated: bool) -> dict[str, float]:
        """Adapt the coefficient to what the step measured, if any update of the policy was applied; return metrics."""
        kl = self._algorithm.kl
        if kl.where == "none":
            return {}
        if kl.controller == "adaptive" and is_updated and np.isfinite(experience.kl):
            count = len(experience.active)
            coef = adapt_kl_coef(self._kl_coef, experience.kl, count, target=kl.target, horizon=kl.horizon)
            # Rounded to what a checkpoint keeps, so that a resumed run goes on with the very same number.
            self._kl_coef = float(np.float32(coef))
        measured = {"kl_reference": experience.kl} if np.isfinite(experience.kl) else {}
        return measured | {"kl_coef": self._kl_coef}
