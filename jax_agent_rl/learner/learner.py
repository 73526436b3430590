"""The learner: groups of trajectories in, one or more optimizer updates, metrics out.

::

    groups ─► pack ─► score (old, reference, values: only what is read) ─► experience: advantages, weights (numpy)
           ─► for each epoch and mini-batch (by prompt):  critic: micro-batches, AdamW
                                                          policy: micro-batches, AdamW

Gradients are accumulated over micro-batches of fixed shape, so the number of trajectories may vary from step to step
without a new compilation. Nothing here knows about engines, tools or asyncio.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.errors import NonFiniteError
from jax_agent_rl.learner.batch import Batch, Sharing, pack
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck, unread
from jax_agent_rl.learner.critic import critic_params
from jax_agent_rl.learner.experience import (
    Experience,
    PerTerm,
    Scores,
    build_experience,
    mini_batch_terms,
    scores_of_contexts,
)
from jax_agent_rl.learner.image_packing import blanks, image_packing
from jax_agent_rl.learner.losses.covariance import CHOOSE
from jax_agent_rl.learner.losses.kl import AdaptiveKL
from jax_agent_rl.learner.metrics import Record, step_metrics
from jax_agent_rl.learner.optimized_params import Arrays, OptimizedParams
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.schedule import learning_rate
from jax_agent_rl.learner.scored_batch import mini_batches
from jax_agent_rl.learner.state import KeptState, LearnerState, UpdateResult
from jax_agent_rl.learner.undo import undone
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.sharding import make_mesh, place, replicated, row_sharding, row_shards
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.types import Group

logger = logging.getLogger(__name__)
ScoreContexts = Callable[[Params, Sequence[Sequence[int]]], list[np.ndarray]]
"""For each context of n ids float32 [n - 1]: the log-prob of every id but the first."""


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """Trajectories of one optimizer update; ``which`` are their numbers in the step."""

    batch: Batch
    sharing: Sharing
    which: slice


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """The batch of one update with the terms of each model's loss."""

    of_policy: Batch
    of_critic: Batch


class Learner:
    """Owns the policy, with adv_estimator gae a critic, and with a KL term the reference policy.

    Args:
        model: the model's hyperparameters.
        params: initial parameters; copied. They are also the reference's.
        temperature: the rollout's sampling temperature.
        critic: the critic's optimizer.
        critic_init: a language model to start the critic from; the policy if None.
        score_by: what computes old log-probs; the learner's own packed passes if None.
        vision_processor: how the model sees; None where trajectories show nothing.
        total_steps: training steps of the run, over which a learning rate decays; None where none does.
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
        total_steps: int | None = None,
    ) -> None:
        self.model = model
        self._algorithm, self._config, self._critic_config = algorithm, config, critic or CriticConfig()
        self._mesh = make_mesh(config.mesh)
        self._rows = config.micro_batch_size * row_shards(self._mesh)
        self._nonfinite_in_a_row = 0
        self._kl_coef, self._steps = float(np.float32(algorithm.kl.coef)), 0
        self._score_by, self._vision_processor = score_by, image_packing(vision_processor, config)
        self._pack = functools.partial(
            pack,
            pack_length=config.pack_length,
            share_prefixes=config.share_prefixes,
            vision_processor=self._vision_processor,
        )
        self._before: KeptState | None = None
        self._inspect = unread
        self._compiled: set[Any] = set()  # programs, for every number of patches
        self._policy_waits = self._critic_config.critic_warmup if algorithm.adv_estimator == "gae" else 0
        self._rate = learning_rate(config, None if total_steps is None else total_steps - self._policy_waits)
        policy = Parameterization.of(model, params, config, mesh=self._mesh)
        self._programs = LearnerPrograms.of(
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
        self._policy = OptimizedParams(policy.params, frozen=policy.frozen, programs=self._programs.policy)
        self._whole = policy.whole
        self._reference = policy.reference() if algorithm.kl.where != "none" else None
        self._critic: OptimizedParams | None = None
        if algorithm.adv_estimator == "gae":
            initial = critic_params(params if critic_init is None else critic_init)
            rate = learning_rate(self._critic_config, total_steps)
            programs, trained, frozen = self._programs.critic(initial, self._critic_config, rate=rate)
            self._critic = OptimizedParams(trained, frozen=frozen, programs=programs)

    @property
    def state(self) -> LearnerState:
        """For a checkpoint: after the last :meth:`update` that cannot be undone. The next one donates its buffers."""
        if (before := self._before) is not None:
            return before.placed()
        numbers = (np.float32(self._kl_coef), np.int32(self._steps), np.int32(self._nonfinite_in_a_row))
        scalars = (place(x, replicated(self._mesh)) for x in numbers)
        return LearnerState(self._policy.state, self._critic and self._critic.state, *scalars)

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._policy.state = state.policy
        if self._critic is not None and state.critic is not None:
            self._critic.state = state.critic
        self._kl_coef, self._steps = float(state.kl_coef), int(state.steps)
        self._nonfinite_in_a_row = int(state.nonfinite)

    @property
    def params(self) -> Params:
        """The policy's current parameters, on device; adapters are merged into the model.

        Valid until the next :meth:`update`, which donates them.
        """
        return self._whole(*self._policy.weights)

    def params_before(self) -> Params | None:
        """:attr:`params` as they were before the last optimizer update, to rounding; None if there was none."""
        rate = float(np.asarray(self._rate(max(self._steps - 1 - self._policy_waits, 0))))
        before = undone(self._policy.state, self._config, rate=rate)
        return None if before is None else self._whole(before, self._policy.frozen)

    def logprobs(self, groups: Sequence[Group]) -> PerTerm:
        """For each trajectory log-probs of its tokens with loss under :attr:`params`, float64 [S]."""
        batch, _ = self._pack([t for g in groups for t in g.trajectories])
        return batch.of_terms(self._passes(self._programs.score, self._policy.weights, batch))

    def store(self, folder: str) -> str:
        """Writes :attr:`params` to a version's folder, see ``models.stored``; returns the digest of its manifest.

        Raises:
            OSError: they cannot be written.
        """
        stored.write_part(folder, self.params, part=0)
        return stored.publish(folder, parts=1)

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        reading = (self._programs.score, self._programs.values, self._programs.route)
        own = sum(f._cache_size() for f in reading)
        return own + self._policy.programs_compiled + (self._critic.programs_compiled if self._critic else 0)

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda done, total: None,
        gate: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        """Trains on groups: ``ppo_epochs`` times ``num_minibatches`` updates, each over an equal share of the prompts.

        Args:
            groups: each with at least one trajectory.
            masked: ids of trajectories that count in baselines only.
            tick: called with (micro-batches done, total) for a progress display.
            gate: closed by whoever wants the state before this call.
            check: takes how engine and learner agree, before the first optimizer update.

        Raises:
            UpdateAbandoned: the gate was closed; nothing has changed.
            NonFiniteError: ``max_nonfinite_steps`` updates in a row were skipped; nothing else has changed.
        """
        begin, gate = time.perf_counter(), gate or StepCancellation()
        minis, made = self._prepare(groups, masked=masked, since=check.since)
        self._inspect = check.before_update(made.comparison(self._objective.bypass))
        with self._all_or_none(len(minis), gate):
            policy, critic = self._train_all(minis, made, tick, gate)
        self._steps += 1
        skipped = not all(record.finite for record in (*policy, *critic))
        self._control_kl(made, skipped)
        metrics = step_metrics(policy, critic, [m.sharing for m in minis], seconds=time.perf_counter() - begin)
        trajectories = (t for g in groups for t in g.trajectories)
        inactive = {t.trajectory_id for t, mask in zip(trajectories, made.active, strict=True) if not mask.any()}
        return UpdateResult(
            metrics=metrics | made.metrics | self._kl_metrics(made),
            skipped=skipped,
            rejected=frozenset(inactive.difference(masked)),
            tokens=made.by_trajectory(groups),
        )

    # --- preparation ------------------------------------------------------------------------------------------

    def _prepare(
        self, groups: Sequence[Group], *, masked: Collection[str] = (), since: int = 0
    ) -> tuple[list[_MiniBatch], Experience]:
        """Packs mini-batches of whole prompts, scores them, and computes what the losses need."""
        minis, begin = [], 0
        for part in mini_batches(groups, self._config.num_minibatches):
            trajectories = [t for group in part for t in group.trajectories]
            batch, sharing = self._pack(trajectories)
            which = slice(begin, begin + len(trajectories))
            minis.append(_MiniBatch(batch=batch, sharing=sharing, which=which))
            begin = which.stop
        scores = self._scores(minis, groups)
        return minis, build_experience(
            groups, self._algorithm, scores, kl_coef=self._kl_coef, masked=masked, since=since
        )

    def _scores(self, minis: Sequence[_MiniBatch], groups: Sequence[Group]) -> Scores:
        """Only what something will read: each is a forward pass."""
        old = ref = values = None
        if self._score_by is not None:
            old = scores_of_contexts(groups, functools.partial(self._score_by, self.params))
        elif not (self._objective.on_policy or self._objective.bypass):
            old = self._logprobs(minis, self._policy.weights)
        if self._reference is not None:
            ref = self._logprobs(minis, self._reference)
        if self._critic is not None:
            run = functools.partial(self._passes, self._programs.values, self._critic.weights)
            values = [v for m in minis for v in m.batch.of_states(run(m.batch))]
        return Scores(old=old, ref=ref, values=values)

    def _logprobs(self, minis: Sequence[_MiniBatch], weights: tuple[Params, Params]) -> PerTerm:
        return [x for m in minis for x in m.batch.of_terms(self._passes(self._programs.score, weights, m.batch))]

    def _passes(self, program: Callable[..., jax.Array], weights: tuple[Params, Params], batch: Batch) -> np.ndarray:
        """Runs a program of (trained, frozen) weights over all rows of a batch's layout."""
        layout = replace(batch, terms={})
        for arrays in self._blanks(layout, program):
            program(*weights, batch=arrays)
        parts = [np.asarray(program(*weights, batch=arrays)) for arrays in self._place(layout)]
        return np.concatenate(parts)[: batch.num_rows]

    def _place(self, batch: Batch) -> Iterator[Arrays]:
        for arrays in batch.micro_batches(self._rows):
            yield self._placed(arrays)

    def _placed(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        return {name: place(value, row_sharding(self._mesh)) for name, value in arrays.items()}

    def _blanks(self, batch: Batch, program: Any) -> Iterator[Arrays]:
        """Micro-batches without weight, for a program that has its first batch: with them it is compiled for every
        number of patches, and for none later.
        """
        if self._vision_processor is not None and program not in self._compiled:
            self._compiled.add(program)
            yield from map(self._placed, blanks(next(batch.micro_batches(self._rows)), self._vision_processor))

    # --- optimizer updates -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _all_or_none(self, minis: int, gate: StepCancellation) -> Iterator[None]:
        """Around a step's updates. Where there are several, the state before them is kept in host memory."""
        if (minis * self._config.ppo_epochs == 1 and self._critic is None) or jax.process_count() > 1:
            yield
            return
        self._before = KeptState.of(self.state)
        try:
            with gate.revocable():
                yield
        except BaseException:
            self.state = self._before.placed()
            raise
        finally:
            self._before = None

    def _train_all(
        self, minis: Sequence[_MiniBatch], made: Experience, tick: Callable[[int, int], None], gate: StepCancellation
    ) -> tuple[list[Record], list[Record]]:
        """All epochs and mini-batches; records of the policy's and of the critic's updates."""
        warming_up = self._steps < self._policy_waits
        models = int(not warming_up) + int(self._critic is not None)
        total = sum(-(-m.batch.num_rows // self._rows) for m in minis) * self._config.ppo_epochs * models
        done = itertools.count(1)
        policy: list[Record] = []
        critic: list[Record] = []

        def ticked() -> None:
            gate.check()
            tick(next(done), total)

        for mini in [*minis] * self._config.ppo_epochs:
            batches = self._with_terms(mini, made)
            if self._critic is not None:
                critic += self._train(self._critic, batches.of_critic, ticked, gate)
            if not warming_up:
                policy += self._train(self._policy, batches.of_policy, ticked, gate)
        return policy, critic

    def _with_terms(self, mini: _MiniBatch, made: Experience) -> _Batches:
        policy, critic = mini_batch_terms(made, mini.which, self._algorithm, kl_coef=self._kl_coef)
        if self._algorithm.policy_loss.loss_mode in CHOOSE:
            policy["chosen"] = self._choose(mini, made.active[mini.which], policy)
        return _Batches(of_policy=mini.batch.with_terms(**policy), of_critic=mini.batch.with_terms(**critic))

    def _choose(self, mini: _MiniBatch, active: Sequence[np.ndarray], terms: Mapping[str, PerTerm]) -> PerTerm:
        """The terms a covariance loss singles out, over the whole mini-batch and under the current policy."""
        current = self._logprobs([mini], self._policy.weights)
        logprob, old, advantage = (
            np.concatenate([v[m] for v, m in zip(values, active, strict=True)])
            for values in (current, terms.get("old_logprob", current), terms["advantage"])
        )
        chosen = [np.zeros(len(mask)) for mask in active]
        if len(logprob):
            choose = CHOOSE[self._algorithm.policy_loss.loss_mode]
            rng = np.random.default_rng(int(self._policy.state.updates))
            picked = choose(logprob, old, advantage, self._objective.loss, rng)
            parts = np.split(picked, np.cumsum([mask.sum() for mask in active])[:-1])
            for own, mask, part in zip(chosen, active, parts, strict=True):
                own[mask] = part
        return chosen

    def _train(
        self, model: OptimizedParams, batch: Batch, tick: Callable[[], None], gate: StepCancellation
    ) -> list[Record]:
        """One update; none if no token of it is to be trained on (the optimizer's momentum would still move it)."""
        if not batch.terms["weight"].any():
            logger.warning("every token of an update was masked or rejected: it was skipped")
            return []
        balance = self._balance(batch) if model is self._policy else {}
        for arrays in self._blanks(batch, model):
            model.gradients([arrays | balance])
        gradients, statistics = model.gradients((arrays | balance for arrays in self._place(batch)), tick)
        if model is self._policy:
            self._inspect(statistics)
        waited = self._policy_waits if model is self._policy else 0
        applied = model.apply(gradients, self._steps - waited, gate)
        self._guard(applied.finite, applied.norm)
        return [Record(statistics=statistics, **vars(applied))]

    def _balance(self, batch: Batch) -> Arrays:
        """How the whole update's tokens are routed: the load-balancing loss is no plain sum over micro-batches."""
        if not self._objective.router_aux_loss_coef:
            return {}
        parts = self._place(replace(batch, terms={}))
        weights = self._policy.weights
        chosen = sum(np.asarray(self._programs.route(*weights, batch=arrays), np.float64) for arrays in parts)
        tokens = self.model.num_layers * batch.copies.sum()
        numbers = {"router_share": np.float32(chosen / tokens), "router_tokens": np.float32(tokens)}
        return {name: place(value, replicated(self._mesh)) for name, value in numbers.items()}

    def _guard(self, finite: bool, norm: float) -> None:
        """Counts updates skipped in a row."""
        if finite:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        limit = self._config.max_nonfinite_steps
        logger.warning("gradient norm is %s: the update was skipped (%d in a row)", norm, self._nonfinite_in_a_row)
        if self._nonfinite_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} updates in a row had non-finite gradients; the parameters are those before them. "
                "Lower learner.learning_rate, or look at the rewards of the last step in trajectories.jsonl"
            )

    # --- distance to the reference ----------------------------------------------------------------------------

    def _control_kl(self, made: Experience, skipped: bool) -> None:
        kl = self._algorithm.kl
        if kl.controller == "adaptive" and not skipped and np.isfinite(made.kl):
            controller = AdaptiveKL(target=kl.target, horizon=kl.horizon)
            # Rounded to what a checkpoint keeps, so that a resumed run goes on with the very same number.
            self._kl_coef = float(np.float32(controller.next(self._kl_coef, made.kl, len(made.active))))

    def _kl_metrics(self, made: Experience) -> dict[str, float]:
        if self._reference is None:
            return {}
        measured = {"kl_reference": made.kl} if np.isfinite(made.kl) else {}
        return measured | {"kl_coef": self._kl_coef}
