"""Training on given sequences, without a rollout: supervised, on preferences, or as a client of a service says.

::

    sequences ─► forward ──────────────► log-probs of their scored tokens
    sequences ─► forward_backward ─────► the same, and the loss; its gradient is added to those since the last update
                 optim_step ───────────► AdamW with the numbers of this call; a non-finite gradient changes nothing

Rows are packed, and prefixes shared, as those of the RL learner. Losses are sums: the gradient does not depend on how a
batch is split into calls. All losses run in one program; which one, and its constants, are its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.config.algorithm import PolicyLossConfig
from jax_agent_rl.learner.batch import Batch, TrainingSequence, terms_of
from jax_agent_rl.learner.losses import POLICY_LOSSES, LossConfig, Terms
from jax_agent_rl.learner.objective import ObjectiveConfig, router_balance, scored_sequences
from jax_agent_rl.learner.optimized_params import (
    Applied,
    Arrays,
    LearnerState,
    OptimizedParams,
    Statistics,
    apply_update,
    bind,
)
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import Scorer, stack
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.sharding import make_mesh, place, replicated

LOSSES = {
    "cross_entropy": "gpg",
    "importance_sampling": "vanilla",
    "ppo": "vanilla",
    "cispo": "cispo",
    "dro": "dro",
    "gspo": "gspo",
}
"""The policy loss that computes each loss: cross-entropy is a policy gradient of advantage 1, importance sampling PPO
without a clip."""
_BRANCHES = sorted(set(LOSSES.values()))


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """The result of one pass.

    Attributes:
        loss: the sum over all tokens.
        logprobs: of each sequence's targets, float64 [S] or [S, K].
        metrics: of the weighted tokens ``entropy`` in nats, and ``clip_fraction`` and ``ratio_mean`` of a loss that has
            ratios; ``router_aux`` of a mixture whose routers are balanced.
    """

    loss: float
    logprobs: list[np.ndarray]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """The numbers of one update; the names are Tinker's. ``grad_clip_norm`` 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SequenceLearner:
    """A policy, or its adapters, and an optimizer.

    Args:
        model: the model's hyperparameters.
        params: initial parameters; copied.
        config: batching, precision, adapters and mesh. The optimizer's numbers come with each :meth:`optim_step`.
        temperature: divides the logits.
        reference: keep a copy of the initial parameters for :meth:`forward`; adapters need none.
        lengths: number of row lengths on a CPU, each with programs of its own.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        *,
        config: LearnerConfig,
        temperature: float = 1.0,
        reference: bool = False,
        lengths: int = 2,
    ) -> None:
        self.model = model
        self._mesh = make_mesh(config.mesh)
        policy = Parameterization.policy(model, params, config, mesh=self._mesh)
        self._programs = LearnerPrograms(
            model,
            policy,
            algorithm=AlgorithmConfig(),
            config=config,
            temperature=temperature,
            mesh=self._mesh,
            rate=optax.constant_schedule(0.0),
            loss=sequence_loss,
        )
        self._scorer = Scorer(self._programs, None, lengths=lengths)
        self._policy = OptimizedParams(policy.params, frozen=policy.frozen, programs=self._programs.policy)
        self._merge = policy.merge
        self._reference = policy.reference() if reference or config.lora else None
        self._gradients: Params | None = None
        places, everywhere = self._programs.policy.places, self._programs.policy.everywhere
        made = (places, everywhere, everywhere, everywhere)
        self._apply = jax.jit(bind(_apply, config), donate_argnums=0, out_shardings=made)

    @property
    def state(self) -> LearnerState:
        """The state to checkpoint, in the form of the RL learner's; the next :meth:`optim_step` donates its buffers."""
        updates, nonfinite = np.int32(self._policy.state.updates), np.int32(self._policy.nonfinite_steps)
        scalars = (place(x, replicated(self._mesh)) for x in (np.float32(0), updates, nonfinite))
        return LearnerState(self._policy.state, None, *scalars)

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._policy.state = state.policy
        self._policy.nonfinite_steps = int(state.nonfinite)
        self._gradients = None

    @property
    def params(self) -> Params:
        """The current parameters on device, adapters merged; valid until the next :meth:`optim_step`."""
        return self._merge(*self._policy.weights)

    @property
    def trained(self) -> Params:
        """The trained parameters alone, e.g. adapters; valid until the next :meth:`optim_step`."""
        return self._policy.state.params

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        return self._scorer.programs_compiled + self._policy.programs_compiled + self._apply._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def twin(self, trained: Params | None = None) -> SequenceLearner:
        """Return a learner with the same programs and frozen parameters and an optimizer of its own.

        Args:
            trained: its trained parameters; None: a copy of this one's.
        """
        twin, initial = copy.copy(self), self.trained if trained is None else trained
        twin._policy = OptimizedParams(initial, frozen=self._policy.frozen, programs=self._programs.policy)
        twin._gradients = None
        return twin

    def forward(
        self, data: Sequence[TrainingSequence], *, reference: bool = False, trained: Params | None = None
    ) -> list[np.ndarray]:
        """Return the log-probs of each sequence's targets, float64 [S] or [S, K].

        Args:
            data: at least one sequence.
            reference: under the initial parameters instead of the current ones.
            trained: these instead of the current trained parameters.

        Raises:
            ValueError: a sequence is longer than a packed row, or no reference was kept.
        """
        if (weights := self._reference if reference else self._weights(trained)) is None:
            raise ValueError("no reference was kept: construct the learner with reference=True")
        return self._scorer.logprobs(weights, self._pack(data))

    def top_logprobs(
        self, data: Sequence[TrainingSequence], count: int, *, trained: Params | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ``count`` likeliest ids at each scored token, int64 [S, count], and their log-probs, float64.

        ``trained`` and errors are those of :meth:`forward`.
        """
        return self._scorer.top_logprobs(self._weights(trained), self._pack(data), count)

    def _weights(self, trained: Params | None) -> tuple[Params, Params]:
        return self._policy.weights if trained is None else (trained, self._policy.frozen)

    def forward_backward(
        self, data: Sequence[TrainingSequence], *, loss: str = "cross_entropy", **constants: float
    ) -> ForwardBackward:
        """Compute a loss and add its gradient to those since the last :meth:`optim_step`.

        Args:
            data: at least one sequence.
            loss: one of :data:`LOSSES`.
            constants: of ``ppo``, ``cispo`` and ``gspo`` the bounds of the ratio, ``clip_low_threshold`` (0.8;
                0.9997) and ``clip_high_threshold`` (1.2; 1.0004); of ``dro`` ``beta`` (0.05).

        Raises:
            ValueError: an unknown loss or constant, a sequence without what the loss reads, or one that is longer than
                a packed row. The gradients are as they were.
        """
        numbers = _numbers(loss, constants)
        batch = self._pack(data).with_terms(**terms_of(loss, data))
        balance = self._scorer.router_balance(self._policy.weights, batch)
        programs, parameters = self._programs.policy, self._policy.state.params
        gradients = programs.zeros(parameters) if self._gradients is None else self._gradients
        self._gradients, results = None, []  # donated
        for arrays in self._scorer.micro_batches(batch):
            programs.widths.add(arrays["token_ids"].shape[1])
            numbered = arrays | balance | {name: place(x, programs.everywhere) for name, x in numbers.items()}
            gradients, statistics = programs.accumulate(parameters, self._policy.frozen, gradients, numbered)
            results.append(statistics)
        self._gradients = gradients
        results = jax.device_get(results)
        totals = jax.tree.map(lambda *x: float(np.sum(x, dtype=np.float64)), *(r["sum"] for r in results))
        count, value = max(totals.pop("tokens"), 1.0), totals.pop("loss")
        if loss == "cross_entropy":
            del totals["ratio_mean"], totals["clip_fraction"]
        logprobs = stack([r["terms"]["logprob"] for r in results], batch.term_target.shape)
        metrics = {name: total if name == "router_aux" else total / count for name, total in totals.items()}
        return ForwardBackward(loss=value, logprobs=batch.gather_terms(logprobs), metrics=metrics)

    def require_finite(self, limit: int) -> None:
        """Raise NonFiniteError after ``limit`` calls of :meth:`optim_step` in a row with non-finite gradients."""
        self._policy.require_finite(limit)

    def optim_step(self, numbers: AdamParams) -> Applied:
        """Update the parameters by the gradients since the last update, and forget those.

        A gradient that is not finite changes nothing. Without any, AdamW's momentum and weight decay still apply.
        """
        traced = {
            "learning_rate": numbers.learning_rate,
            "adam_b1": numbers.beta1,
            "adam_b2": numbers.beta2,
            "adam_eps": numbers.eps,
            "weight_decay": numbers.weight_decay,
            "max_grad_norm": numbers.grad_clip_norm or np.inf,
        }
        programs = self._programs.policy
        placed = {name: place(np.float32(x), programs.everywhere) for name, x in traced.items()}
        gradients = programs.zeros(self._policy.state.params) if self._gradients is None else self._gradients
        self._gradients = None
        self._policy.state, norm, finite, rate = self._apply(self._policy.state, gradients, placed)
        applied = Applied(norm=float(norm), finite=bool(finite), rate=float(rate))
        self._policy.end_step([applied])
        return applied

    def _pack(self, data: Sequence[TrainingSequence]) -> Batch:
        vocab_size = self.model.vocab_size
        for number, sequence in enumerate(data):
            ids = np.append(sequence.token_ids, [] if sequence.targets is None else sequence.targets)
            if not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(f"sequence {number} has the id {wrong}; the model's are 0 to {vocab_size - 1}")
        if len(counts := {sequence.per_token for sequence in data}) > 1:
            found = ", ".join(str(count or 1) for count in counts)
            raise ValueError(f"sequences of one batch have {found} targets per token; make them equal")
        targets = [s.token_ids[s.loss_mask] if s.targets is None else s.targets for s in data]
        are_own = all(sequence.targets is None for sequence in data)
        trajectories = [s.trajectory(n) for n, s in enumerate(data)]
        return self._scorer.pack_one(trajectories, targets=None if are_own else targets)


def sequence_loss(objective: ObjectiveConfig, model: Decoder, batch: Arrays) -> tuple[jax.Array, Statistics]:
    """Return the micro-batch's share of the loss that ``batch["loss"]`` numbers, and statistics.

    Statistics are sums, and float32 [R, K] or, of k targets per token, [R, K, k] under ``terms``. Terms of weight 0 are
    scored, too.
    """
    weight = batch["term_weight"]
    logprob, entropy, load = scored_sequences(objective, model, batch)
    names = ("old_logprob", "advantage", "ratio_mask")
    shape, per_row = logprob.shape, (len(logprob), -1)
    given = {name: batch[f"term_{name}"].reshape(per_row) for name in names}
    weight, logprob, entropy = (x.reshape(per_row) for x in (weight, logprob, entropy))
    counted = jnp.float32(weight != 0)
    terms = Terms(
        logprob=logprob,
        old_logprob=given["old_logprob"],
        rollout_logprob=given["old_logprob"],
        advantage=given["advantage"],
        active=given["ratio_mask"],
        sequence=jnp.repeat(batch["term_sequence"], logprob.shape[1] // shape[1], axis=1),
        chosen=jnp.zeros_like(logprob),
    )
    config = LossConfig(
        low=1 - batch["clip_low_threshold"],  # pyright: ignore[reportArgumentType]  # traced: no clip compiles anew
        high=batch["clip_high_threshold"] - 1,  # pyright: ignore[reportArgumentType]
        dual=None,
        own=PolicyLossConfig.model_construct(dro_beta=batch["beta"]),
    )
    per_term = jax.lax.switch(
        batch["loss"], [lambda name=name: POLICY_LOSSES[name](terms, config) for name in _BRANCHES]
    )
    balance = router_balance(batch, load)
    total = jnp.sum(weight * per_term.loss) + objective.router_aux_loss_coef * sum(balance.values())
    sums = {
        "loss": total,
        "tokens": jnp.sum(counted),
        "clip_fraction": jnp.sum(counted * per_term.clipped),
        "ratio_mean": jnp.sum(counted * per_term.ratio),
        "entropy": jnp.sum(counted * entropy),
        **balance,
    }
    return total, jax.lax.stop_gradient({"sum": sums, "terms": {"logprob": logprob.reshape(shape)}})


def _apply(config: LearnerConfig, state: Any, gradients: Params, numbers: Arrays) -> Any:
    rate = numbers["learning_rate"]
    return apply_update(config.model_copy(update=numbers), lambda _: rate, state, gradients, jnp.int32(0))


def _numbers(loss: str, constants: Mapping[str, float]) -> dict[str, np.generic]:
    """Return what a loss is told beside its batch; raise ValueError if it does not know a constant."""
    if loss not in LOSSES:
        raise ValueError(f"no loss is called {loss!r}; choose one of {', '.join(LOSSES)}")
    clipped = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    of_paper = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}  # Zheng et al. 2025, arXiv 2507.18071
    known = {"ppo": clipped, "cispo": clipped, "gspo": of_paper, "dro": {"beta": 0.05}}.get(loss, {})
    if unknown := sorted(constants.keys() - known.keys()):
        raise ValueError(f"{loss} has no constant {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    unclipped = {"clip_low_threshold": -np.inf, "clip_high_threshold": np.inf, "beta": 0.0}
    numbers = {name: np.float32(value) for name, value in (unclipped | known | dict(constants)).items()}
    return {**numbers, "loss": np.int32(_BRANCHES.index(LOSSES[loss]))}
