"""The learner: groups of trajectories in, one or more optimizer updates, metrics out.

::

    groups ──► advantages ──► mini-batches (by prompt) ──► pack ──► for each micro-batch: loss, gradients += ──► AdamW

Gradients are accumulated over micro-batches of fixed shape, so the number of trajectories may vary from step to step
without a new compilation. Nothing here knows about engines, tools or asyncio.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.errors import NonFiniteError
from jax_agent_rl.learner.advantages import advantages
from jax_agent_rl.learner.batch import Batch, Sharing, pack
from jax_agent_rl.learner.losses import ClipConfig, term_weights
from jax_agent_rl.learner.objective import ObjectiveConfig, policy_loss, term_logprobs
from jax_agent_rl.learner.sharding import make_mesh, parameter_shardings, replicated, row_sharding
from jax_agent_rl.models.llama import LlamaConfig, Params
from jax_agent_rl.types import Group

logger = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything the optimizer changes: ``params``, ``opt_state``, and ``updates`` (int32, optimizer updates done)."""

    params: Params
    opt_state: Any
    updates: jax.Array


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one :meth:`Learner.update` did.

    Attributes:
        metrics: named floats for the log.
        skipped: an update had a non-finite gradient and changed nothing.
    """

    metrics: dict[str, float]
    skipped: bool


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW with linear warm-up; no weight decay on norms."""

    def decayed(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, params)

    if config.warmup_steps:
        rate = optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
    else:
        rate = config.learning_rate
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(rate, b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay, mask=decayed),
    )


class Learner:
    """Owns the train state.

    Args:
        model: the model's hyperparameters.
        params: initial parameters; copied.
        temperature: the rollout's sampling temperature.
    """

    def __init__(
        self,
        model: LlamaConfig,
        params: Params,
        *,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        temperature: float,
    ) -> None:
        self._algorithm = algorithm
        self._config = config
        self._mesh = make_mesh(config.mesh)
        self._rows = config.rows_per_micro_batch * config.mesh.data * config.mesh.fsdp
        self._optimizer = make_optimizer(config)
        self._nonfinite_in_a_row = 0
        shardings = parameter_shardings(self._mesh, model.parameter_shapes())
        # + 0: the learner donates its buffers, so it must own them.
        params = jax.tree.map(lambda x, s: jax.device_put(x + 0, s), params, shardings)
        self._shardings = _state_shardings(self._optimizer, params, shardings, replicated(self._mesh))
        init = lambda params: TrainState(params, self._optimizer.init(params), jnp.int32(0))  # noqa: E731
        self.state = jax.jit(init, out_shardings=self._shardings, donate_argnums=0)(params)
        clip = ClipConfig(low=algorithm.clip_ratio_low, high=algorithm.clip_ratio_high, dual=algorithm.clip_ratio_c)
        self._objective = ObjectiveConfig(
            clip=clip,
            temperature=temperature,
            on_policy=config.updates_per_step == 1,
            remat=config.remat,
            vocab_shards=config.mesh.tensor,
        )
        self._compile(model)

    @property
    def params(self) -> Params:
        """The current parameters, on device. Valid until the next :meth:`update`, which donates them."""
        return self.state.params

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        return sum(f._cache_size() for f in (self._accumulate, self._apply, self._zeros, self._score))

    def update(
        self, groups: Sequence[Group], *, tick: Callable[[int, int], None] = lambda done, total: None
    ) -> UpdateResult:
        """Trains on groups: ``updates_per_step`` optimizer updates, each over an equal share of the prompts.

        Args:
            groups: each with at least one trajectory that carries loss. Those that carry none (``no_loss``) count in
                the statistics of their group's rewards only.
            tick: called with (micro-batches done, total) for a progress display.

        Raises:
            NonFiniteError: ``max_nonfinite_steps`` updates in a row were skipped.
        """
        begin = time.perf_counter()
        batches = self._prepare(groups)
        total = sum(-(-batch.num_rows // self._rows) for batch, _ in batches)
        done = 0
        records, skipped = [], False
        for batch, _ in batches:
            grads, statistics = self._zeros(self.state.params), None
            for arrays in batch.micro_batches(self._rows):
                grads, new = self._accumulate(self.state.params, grads, self._place(arrays))
                statistics = new if statistics is None else _merge(statistics, new)
                done += 1
                jax.block_until_ready(new)
                tick(done, total)
            self.state, norm, finite = self._apply(self.state, grads)
            del grads
            skipped |= self._guard(bool(finite), float(norm))
            records.append((jax.device_get(statistics), float(norm)))
        seconds = time.perf_counter() - begin
        return UpdateResult(metrics=_metrics(records, [s for _, s in batches], seconds), skipped=skipped)

    # --- preparation ------------------------------------------------------------------------------------------

    def _prepare(self, groups: Sequence[Group]) -> list[tuple[Batch, Sharing]]:
        """Packed mini-batches; with several updates per step, old log-probs are computed before the first."""
        count = min(self._config.updates_per_step, len(groups))
        batches = []
        for part in np.array_split(np.arange(len(groups)), count):
            mine = [groups[i] for i in part]
            everything = [t for g in mine for t in g.trajectories]
            carries_loss = np.array([t.no_loss is None for t in everything])
            trajectories = [t for t in everything if t.no_loss is None]
            per_trajectory = np.concatenate(
                [advantages(self._algorithm.adv_estimator, np.array(g.rewards)) for g in mine]
            )[carries_loss]
            weights = term_weights(self._algorithm.loss_agg_mode, [sum(t.loss_mask) for t in trajectories])
            batches.append(
                pack(
                    trajectories,
                    per_trajectory.tolist(),
                    weights.tolist(),
                    row_length=self._config.row_length,
                    share_prefixes=self._config.share_prefixes,
                )
            )
        if not self._objective.on_policy:
            batches = [(self._with_old_logprobs(batch), sharing) for batch, sharing in batches]
        return batches

    def _with_old_logprobs(self, batch: Batch) -> Batch:
        parts = [
            np.asarray(self._score(self.state.params, self._place(arrays)))
            for arrays in batch.micro_batches(self._rows)
        ]
        old = np.concatenate(parts)[: batch.num_rows]
        return Batch(**{**vars(batch), "old_logprob": old})

    def _place(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(arrays, row_sharding(self._mesh))

    # --- device programs --------------------------------------------------------------------------------------

    def _compile(self, model: LlamaConfig) -> None:
        """Defines the jitted programs; shapes are fixed by the config, so each compiles once."""
        objective, optimizer = self._objective, self._optimizer

        def accumulate(params: Params, grads: Params, batch: dict) -> tuple[Params, dict]:
            def loss(params: Params) -> tuple[jax.Array, dict]:
                return policy_loss(model, objective, params, batch)

            (_, statistics), new = jax.value_and_grad(loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, grads, new), statistics

        def apply(state: TrainState, grads: Params) -> tuple[TrainState, jax.Array, jax.Array]:
            norm = optax.tree.norm(grads)
            finite = jnp.isfinite(norm)

            def take() -> TrainState:
                updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
                return TrainState(optax.apply_updates(state.params, updates), opt_state, state.updates + 1)

            return jax.lax.cond(finite, take, lambda: state), norm, finite

        def score(params: Params, batch: dict) -> jax.Array:
            return term_logprobs(model, objective, params, batch)

        # Output shardings are those of the inputs they replace: a call never compiles for its own result.
        state, everywhere = self._shardings, replicated(self._mesh)
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=state.params)
        self._accumulate = jax.jit(accumulate, donate_argnums=(1,), out_shardings=(state.params, everywhere))
        self._apply = jax.jit(apply, donate_argnums=(0,), out_shardings=(state, everywhere, everywhere))
        self._score = jax.jit(score)

    def _guard(self, finite: bool, norm: float) -> bool:
        """Counts skipped updates; True if this one was."""
        if finite:
            self._nonfinite_in_a_row = 0
            return False
        self._nonfinite_in_a_row += 1
        limit = self._config.max_nonfinite_steps
        logger.warning("gradient norm is %s: the update was skipped (%d in a row)", norm, self._nonfinite_in_a_row)
        if self._nonfinite_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} updates in a row had non-finite gradients; the parameters are those before them. "
                "Lower learner.learning_rate, or look at the rewards of the last step in trajectories.jsonl"
            )
        return True


def _state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Any, rest: Any) -> TrainState:
    """Optimizer moments lie where their parameters do, counters everywhere."""
    abstract = jax.eval_shape(optimizer.init, params)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, abstract, shardings, transform_non_params=lambda _: rest
    )
    return TrainState(shardings, opt_state, rest)


def _merge(a: dict, b: dict) -> dict:
    return {"sum": jax.tree.map(jnp.add, a["sum"], b["sum"]), "max": jax.tree.map(jnp.maximum, a["max"], b["max"])}


def _metrics(records: list[tuple[dict, float]], sharing: list[Sharing], seconds: float) -> dict[str, float]:
    """One flat record over all mini-batches of the step."""
    sums = {name: float(sum(s["sum"][name] for s, _ in records)) for name in records[0][0]["sum"]}
    terms = max(sums["terms"], 1.0)
    tokens, nodes = sum(s.tokens for s in sharing), sum(s.nodes for s in sharing)
    return {
        "loss": sums["loss"] / len(records),
        "grad_norm": float(np.mean([norm for _, norm in records])),
        "clip_fraction": sums["clipped"] / terms,
        "ratio_mean": sums["ratio"] / terms,
        "kl": sums["kl"] / terms,
        "entropy": sums["entropy"] / terms,
        "logprob_gap_mean": sums["gap"] / terms,
        "logprob_gap_max": float(max(s["max"]["gap"] for s, _ in records)),
        "trained_tokens": terms,
        "batch_tokens": float(tokens),
        "computed_tokens": float(nodes),
        "sharing_factor": tokens / nodes,
        "rows": float(sum(s.rows for s in sharing)),
        "learner_seconds": seconds,
        "learner_tokens_per_second": tokens / seconds,
        "computed_tokens_per_second": nodes / seconds,
    }
