"""The results of a generation: sampled ids, or the scores of given ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from jax_agent_rl.types.routed_experts import RoutedExperts, join_routed
from jax_agent_rl.types.supports import Support


class StopReason(StrEnum):
    """Why one *generation* ended."""

    EOS = "eos"
    """The model's end-of-sequence id was sampled. It is the last id of the output, with its
    log-prob."""
    STOP = "stop"
    """A stop string or an extra stop token id was produced; ``TokenOutput.stop_match`` says which.
    """
    LENGTH = "length"
    """``max_tokens`` ids were sampled, or the model's context is full."""
    ABORTED = "aborted"
    """Cancelled from outside. The ids so far are valid and the generation can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """Result of one generation: ids, never text.

    Attributes:
        token_ids: sampled ids, the stop token included.
        log_probs: natural-log probability of each id under the distribution it was sampled from.
        policy_versions: version of the weights that produced each id.
        stop_match: the stop string (or the stop id, as text) that ended it, else None.
        context_digest: :func:`digest_ids` of the prompt plus ``token_ids`` as the engine saw them.
        cached_tokens: prompt ids whose KV was reused instead of computed.
        num_preempted: times the request lost its slot and was recomputed.
        constrained: for each id whether a grammar kept it from being sampled freely, so that it
            carries no loss; empty if none was, or if the supports say what it was sampled from.
        routed_experts: the choices at those positions of the context that were asked for and fed,
            see ``Capabilities.routed_experts``.
        supports: for each id the support of its draw, over which its log-prob is normalized; None:
            all ids. Empty if no draw was restricted, see ``Capabilities.sampling_replay``.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason
    stop_match: str | None = None
    context_digest: str
    cached_tokens: int = 0
    num_preempted: int = 0
    constrained: tuple[bool, ...] = ()
    routed_experts: RoutedExperts | None = None
    supports: tuple[Support | None, ...] = ()

    def __post_init__(self) -> None:
        num_ids = len(self.token_ids)
        num_log_probs = len(self.log_probs)
        num_versions = len(self.policy_versions)
        num_marks = len(self.constrained or self.token_ids)  # an empty field has no marks to count
        num_supports = len(self.supports or self.token_ids)
        if {num_log_probs, num_versions, num_marks, num_supports} != {num_ids}:
            raise ValueError(
                f"TokenOutput has {num_ids} ids, {num_log_probs} log-probs,"
                f" {num_versions} versions, {num_marks} grammar marks, {num_supports} supports"
            )

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each id that carries loss: those sampled freely."""
        if not self.constrained:
            return (1,) * len(self.token_ids)
        return tuple(int(not mark) for mark in self.constrained)

    def then(self, resumption: TokenOutput) -> TokenOutput:
        """Return this (aborted) output joined with its resumption; each id keeps its version.

        >>> a = TokenOutput(token_ids=(5,), log_probs=(-1.0,), policy_versions=(1,),
        ...                 stop_reason=StopReason.ABORTED, context_digest="x")
        >>> b = TokenOutput(token_ids=(2,), log_probs=(-0.5,), policy_versions=(2,),
        ...                 stop_reason=StopReason.EOS, context_digest="y")
        >>> a.then(b).policy_versions
        (1, 2)
        """
        constrained: tuple[bool, ...] = ()
        if self.constrained or resumption.constrained:
            for part in (self, resumption):
                constrained += part.constrained or (False,) * len(part.token_ids)

        supports: tuple[Support | None, ...] = ()
        if self.supports or resumption.supports:
            for part in (self, resumption):
                supports += part.supports or (None,) * len(part.token_ids)

        return replace(
            resumption,
            token_ids=self.token_ids + resumption.token_ids,
            log_probs=self.log_probs + resumption.log_probs,
            policy_versions=self.policy_versions + resumption.policy_versions,
            cached_tokens=self.cached_tokens,
            num_preempted=self.num_preempted + resumption.num_preempted,
            constrained=constrained,
            routed_experts=join_routed(self.routed_experts, resumption.routed_experts),
            supports=supports,
        )

    def first(self, count: int, **changes: Any) -> TokenOutput:
        """Return the first ``count`` ids with their values.

        Its digest is empty, since this output's is of another context.

        Args:
            changes: other fields to replace.
        """
        routed_experts = self.routed_experts
        if routed_experts is not None:
            num_left_out = max(0, len(self.token_ids) - count)
            routed_experts = routed_experts.until(routed_experts.end - num_left_out)

        changes.setdefault("context_digest", "")
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            policy_versions=self.policy_versions[:count],
            constrained=self.constrained[:count],
            routed_experts=routed_experts,
            supports=self.supports[:count],
            **changes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Log-probs of given ids under a model, at temperature 1 over the whole vocabulary.

    Attributes:
        log_probs: of each scored id.
        top_ids: for each scored id, the likeliest ids at its position, the likeliest first; empty
            unless asked for.
        top_log_probs: log-probs of the ``top_ids``.
    """

    log_probs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_log_probs: tuple[tuple[float, ...], ...] = ()
