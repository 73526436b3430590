"""Training on given sequences, without a rollout.

It serves supervised training, training on preferences, and clients of a training service.

::

    sequences ─► forward ──────────► log-probs of their scored tokens
    sequences ─► forward_backward ─► the same, and the loss; its gradient is accumulated
                 optim_step ───────► AdamW with the numbers of this call; forgets the gradient

Rows are packed and share prefixes as in the RL learner. Losses are sums: the gradient does
not depend on how a batch is split into calls. One program computes all losses: the number of the
loss and its constants are arguments. A non-finite gradient changes nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.config.algorithm import PolicyLossConfig
from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.losses.policy import POLICY_LOSSES, LossConfig, Terms
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
from jax_agent_rl.learner.packing import BatchPacker
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.learner.programs import LearnerPrograms
from jax_agent_rl.learner.scoring import Scorer, stack
from jax_agent_rl.learner.sequences import TrainingSequence, sequence_terms
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
"""The policy loss that computes each loss. Cross-entropy is a policy gradient with advantage 1;
importance sampling is PPO without a clip."""

_BRANCHES = sorted(set(LOSSES.values()))
"""The policy losses in the order in which the program numbers them."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """The result of one pass.

    Attributes:
        loss: the sum over all tokens.
        logprobs: of each sequence's targets, float64 [S] or [S, K].
        metrics: ``entropy`` of the weighted tokens, in nats. For a loss with ratios also
            ``clip_fraction`` and ``ratio_mean``, for balanced routers ``router_aux``.
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
        params: initial parameters; copied.
        config: batching, precision, adapters and mesh. The optimizer's numbers come with each
            :meth:`optim_step`.
        temperature: divides the logits.
        reference: keep a copy of the initial parameters for :meth:`forward`; adapters need none.
        lengths: number of row lengths on a CPU, each with programs of its own.

    Attributes:
        gradients: accumulated since the last update; None without any.
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
        self._packer = BatchPacker(config, None, vocab_size=model.vocab_size)
        self._scorer = Scorer(self._programs, None, lengths=lengths)
        self._policy = OptimizedParams(
            policy.params, frozen=policy.frozen, programs=self._programs.policy
        )
        self._merge = policy.merge
        self._reference = policy.reference() if reference or config.lora else None
        self.gradients: Params | None = None

        programs = self._programs.policy
        everywhere = programs.everywhere
        self._apply = jax.jit(
            bind(_apply, config),
            donate_argnums=0,
            out_shardings=(programs.state_shardings, everywhere, everywhere, everywhere),
        )

    @property
    def state(self) -> LearnerState:
        """The state to checkpoint, in the form of the RL learner's.

        The next :meth:`optim_step` donates its buffers.
        """

        def scalar(number: np.generic) -> jax.Array:
            return place(number, replicated(self._mesh))

        return LearnerState(
            policy=self._policy.state,
            critic=None,
            kl_coef=scalar(np.float32(0)),
            steps=scalar(np.int32(self._policy.state.updates)),
            nonfinite=scalar(np.int32(self._policy.nonfinite_steps)),
        )

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._policy.state = state.policy
        self._policy.nonfinite_steps = int(state.nonfinite)
        self.gradients = None

    @property
    def params(self) -> Params:
        """The current parameters on device, adapters merged.

        They are valid until the next :meth:`optim_step`.
        """
        return self._merge(*self._policy.weights)

    @property
    def trained(self) -> Params:
        """The trained parameters alone, e.g. adapters; valid until the next :meth:`optim_step`."""
        return self._policy.state.params

    @property
    def programs_compiled(self) -> int:
        """Distinct programs compiled so far; constant once warm."""
        apply_programs = self._apply._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        return self._scorer.programs_compiled + self._policy.programs_compiled + apply_programs

    def twin(self, trained: Params | None = None) -> SequenceLearner:
        """Return a learner with the same programs and frozen parameters and a new optimizer.

        Args:
            trained: its trained parameters. None: a copy of this learner's.
        """
        twin = copy.copy(self)
        twin._policy = OptimizedParams(
            self.trained if trained is None else trained,
            frozen=self._policy.frozen,
            programs=self._programs.policy,
        )
        twin.gradients = None
        return twin

    def forward(
        self,
        data: Sequence[TrainingSequence],
        *,
        reference: bool = False,
        trained: Params | None = None,
    ) -> list[np.ndarray]:
        """Return the log-probs of each sequence's targets, float64 [S] or [S, K].

        Args:
            data: at least one sequence.
            reference: use the initial parameters instead of the current ones.
            trained: use these instead of the current trained parameters.

        Raises:
            ValueError: a sequence is longer than a packed row, or no reference was kept.
        """
        weights = self._reference if reference else self._weights(trained)
        if weights is None:
            raise ValueError("no reference was kept: construct the learner with reference=True")
        return self._scorer.logprobs(weights, self._pack(data))

    def top_logprobs(
        self,
        data: Sequence[TrainingSequence],
        count: int,
        *,
        trained: Params | None = None,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ``count`` likeliest ids at each scored token, and their log-probs.

        The ids are int64 [S, count], the log-probs float64. ``trained`` and errors are those of
        :meth:`forward`.
        """
        return self._scorer.top_logprobs(self._weights(trained), self._pack(data), count)

    def _weights(self, trained: Params | None) -> tuple[Params, Params]:
        if trained is None:
            return self._policy.weights
        return trained, self._policy.frozen

    def forward_backward(
        self,
        data: Sequence[TrainingSequence],
        *,
        loss: str = "cross_entropy",
        **constants: float,
    ) -> ForwardBackward:
        """Compute a loss, and accumulate its gradient until the next :meth:`optim_step`.

        Args:
            data: at least one sequence.
            loss: one of :data:`LOSSES`.
            constants: for ``ppo``, ``cispo`` and ``gspo`` the bounds of the ratio,
                ``clip_low_threshold`` (0.8; 0.9997) and ``clip_high_threshold`` (1.2; 1.0004); for
                ``dro`` ``beta`` (0.05).

        Raises:
            ValueError: an unknown loss or constant, a sequence that lacks what the loss reads, or
                one that is longer than a packed row. The gradients are as they were.
        """
        loss_arguments = _loss_arguments(loss, constants)
        batch = self._pack(data).with_terms(**sequence_terms(loss, data))
        programs = self._programs.policy
        placed = {name: place(x, programs.everywhere) for name, x in loss_arguments.items()}
        shared = self._scorer.router_balance(self._policy.weights, batch) | placed

        params = self._policy.state.params
        gradients = self._take_gradients()
        results = []
        for arrays in self._scorer.micro_batches(batch):
            programs.widths.add(arrays["token_ids"].shape[1])
            gradients, statistics = programs.accumulate(
                params, self._policy.frozen, gradients, arrays | shared
            )
            results.append(statistics)
        self.gradients = gradients

        results = jax.device_get(results)
        sums = {}
        for name in results[0]["sum"]:
            values = [result["sum"][name] for result in results]
            sums[name] = float(np.sum(values, dtype=np.float64))
        logprobs = stack(
            [result["terms"]["logprob"] for result in results], batch.term_target.shape
        )
        return ForwardBackward(
            loss=sums["loss"],
            logprobs=batch.gather_terms(logprobs),
            metrics=_metrics(loss, sums),
        )

    def _take_gradients(self) -> Params:
        """Return the gradients since the last update, and forget them: the caller donates them."""
        gradients = self.gradients
        self.gradients = None
        if gradients is None:
            gradients = self._programs.policy.zeros(self._policy.state.params)
        return gradients

    def require_finite(self, limit: int) -> None:
        """Raise NonFiniteError after ``limit`` non-finite updates in a row."""
        self._policy.require_finite(limit)

    def optim_step(self, numbers: AdamParams) -> Applied:
        """Update the parameters by the gradients since the last update, and forget these.

        A gradient that is not finite changes nothing. Without any gradient, AdamW's momentum and
        weight decay still apply.
        """
        config_values = {
            "learning_rate": numbers.learning_rate,
            "adam_b1": numbers.beta1,
            "adam_b2": numbers.beta2,
            "adam_eps": numbers.eps,
            "weight_decay": numbers.weight_decay,
            "max_grad_norm": numbers.grad_clip_norm or np.inf,
        }
        everywhere = self._programs.policy.everywhere
        placed = {name: place(np.float32(x), everywhere) for name, x in config_values.items()}

        state, norm, finite, rate = self._apply(self._policy.state, self._take_gradients(), placed)
        self._policy.state = state
        applied = Applied(norm=float(norm), finite=bool(finite), rate=float(rate))
        self._policy.end_step([applied])
        return applied

    def _pack(self, data: Sequence[TrainingSequence]) -> Batch:
        """Pack sequences into rows.

        Raises:
            ValueError: an id is not of the model, or sequences differ in their targets per token.
        """
        vocab_size = self.model.vocab_size
        for number, sequence in enumerate(data):
            targets = [] if sequence.targets is None else sequence.targets
            ids = np.append(sequence.token_ids, targets)
            smallest = ids.min()
            largest = ids.max()
            if smallest < 0 or largest >= vocab_size:
                wrong_id = int(smallest if smallest < 0 else largest)
                raise ValueError(
                    f"sequence {number} has the id {wrong_id};"
                    f" the model's are 0 to {vocab_size - 1}"
                )

        targets_per_token = {sequence.per_token for sequence in data}
        if len(targets_per_token) > 1:
            counts = ", ".join(str(count or 1) for count in targets_per_token)
            raise ValueError(
                f"sequences of one batch have {counts} targets per token; make them equal"
            )

        trajectories = [sequence.trajectory(number) for number, sequence in enumerate(data)]
        if all(sequence.targets is None for sequence in data):
            return self._packer.pack(trajectories)
        return self._packer.pack(trajectories, targets=[_targets(s) for s in data])


def _targets(sequence: TrainingSequence) -> np.ndarray:
    """Return the ids that are scored: the sequence's own, if it does not name others."""
    if sequence.targets is None:
        return sequence.token_ids[sequence.loss_mask]
    return sequence.targets


def _metrics(loss: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one pass: means over the weighted tokens."""
    tokens = max(sums["tokens"], 1.0)
    metrics = {"entropy": sums["entropy"] / tokens}
    if loss != "cross_entropy":  # it has no ratio
        metrics["clip_fraction"] = sums["clip_fraction"] / tokens
        metrics["ratio_mean"] = sums["ratio_mean"] / tokens
    if "router_aux" in sums:
        metrics["router_aux"] = sums["router_aux"]
    return metrics


def sequence_loss(
    objective: ObjectiveConfig, model: Decoder, batch: Arrays
) -> tuple[jax.Array, Statistics]:
    """Return the micro-batch's share of the loss that ``batch["loss"]`` numbers, and statistics.

    Statistics are sums, and under ``terms`` numbers of each term, float32 [R, K], or [R, K, k] with
    k targets per token. Terms of weight 0 are scored as well.
    """
    scored_logprob, scored_entropy, load = scored_sequences(objective, model, batch)
    shape = scored_logprob.shape

    def flat(x: jax.Array) -> jax.Array:
        """Reshape [R, K, k] to [R, K k]: for a loss, each target is a term."""
        return x.reshape(len(x), -1)

    logprob = flat(scored_logprob)
    entropy = flat(scored_entropy)
    weight = flat(batch["term_weight"])
    old_logprob = flat(batch["term_old_logprob"])
    targets_per_token = logprob.shape[1] // shape[1]
    terms = Terms(
        logprob=logprob,
        old_logprob=old_logprob,
        rollout_logprob=old_logprob,
        advantage=flat(batch["term_advantage"]),
        active=flat(batch["term_ratio_mask"]),
        sequence=jnp.repeat(batch["term_sequence"], targets_per_token, axis=1),
        chosen=jnp.zeros_like(logprob),
    )
    config = LossConfig(
        # Traced, so that another clip range does not compile anew.
        low=1 - batch["clip_low_threshold"],  # pyright: ignore[reportArgumentType]
        high=batch["clip_high_threshold"] - 1,  # pyright: ignore[reportArgumentType]
        dual=None,
        policy_loss=PolicyLossConfig.model_construct(dro_beta=batch["beta"]),
    )
    branches = [functools.partial(POLICY_LOSSES[name], terms, config) for name in _BRANCHES]
    per_term = jax.lax.switch(batch["loss"], branches)

    balance = router_balance(batch, load)
    total = jnp.sum(weight * per_term.loss) + objective.router_aux_loss_coef * sum(balance.values())
    counted = jnp.float32(weight != 0)
    sums = {
        "loss": total,
        "tokens": jnp.sum(counted),
        "clip_fraction": jnp.sum(counted * per_term.clipped),
        "ratio_mean": jnp.sum(counted * per_term.ratio),
        "entropy": jnp.sum(counted * entropy),
        **balance,
    }
    statistics = {"sum": sums, "terms": {"logprob": scored_logprob}}
    return total, jax.lax.stop_gradient(statistics)


def _apply(config: LearnerConfig, state: Any, gradients: Params, numbers: Arrays) -> Any:
    rate = numbers["learning_rate"]
    return apply_update(
        config.model_copy(update=numbers), lambda _: rate, state, gradients, jnp.int32(0)
    )


_UNUSED_CONSTANTS = {
    "clip_low_threshold": -np.inf,
    "clip_high_threshold": np.inf,
    "beta": 0.0,
}
"""Values of the constants that a loss does not have: nothing is clipped."""

_DEFAULT_CONSTANTS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    # Zheng et al. 2025, arXiv 2507.18071
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    "dro": {"beta": 0.05},
}


def _loss_arguments(loss: str, constants: Mapping[str, float]) -> dict[str, np.generic]:
    """Return the arguments of :func:`sequence_loss` beside the batch: the loss and its constants.

    Raises:
        ValueError: the loss is unknown, or does not have one of the constants.
    """
    if loss not in LOSSES:
        raise ValueError(f"no loss is called {loss!r}; choose one of {', '.join(LOSSES)}")
    defaults = _DEFAULT_CONSTANTS.get(loss, {})
    unknown = sorted(constants.keys() - defaults.keys())
    if unknown:
        choices = ", ".join(defaults) or "none"
        raise ValueError(f"{loss} has no constant {', '.join(unknown)}; it has {choices}")

    arguments: dict[str, np.generic] = {"loss": np.int32(_BRANCHES.index(LOSSES[loss]))}
    for name, value in {**_UNUSED_CONSTANTS, **defaults, **constants}.items():
        arguments[name] = np.float32(value)
    return arguments
