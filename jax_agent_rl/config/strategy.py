"""The ``rollout.strategy`` section: tree-structured rollouts, in the notation of their papers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import Positive, Section, WhenKey


class TreeGrpoConfig(Section):
    """`tree_grpo`, arXiv 2509.21240. A group has m * k trajectories."""

    m: Positive = Field(default=2, description="Trees per group: initial chains.")
    n: Positive = Field(default=2, description="Nodes of each tree drawn per round; each is continued once.")
    l: Positive = Field(default=1, description="Rounds of expansion.")  # noqa: E741
    k: Positive = Field(default=3, description="Leaves kept of the 1 + l * n leaves of each tree.")


class TreerlConfig(Section):
    """`treerl`, arXiv 2506.11902. A group has m * (1 + l * n * t) trajectories."""

    m: Positive = Field(default=6, description="Trees per group: initial chains.")
    n: Positive = Field(default=2, description="Tokens of each tree forked per round, the most uncertain ones.")
    l: Positive = Field(default=1, description="Rounds of forking.")  # noqa: E741
    t: Positive = Field(default=2, description="Branches per forked token.")


class ArpoConfig(Section):
    """`arpo`, arXiv 2507.19849. A group has rollout.group_size trajectories."""

    initial_rollouts: Positive = Field(default=4, description="Initial chains per group; the rest are branches.")
    beam_size: int = Field(
        default=2, ge=2, description="Maximum number of continuations of a turn, the original included."
    )
    branch_probability: float = Field(
        default=0.5, ge=0, le=1, description="Probability of branching where the entropy does not change."
    )
    entropy_weight: float = Field(
        default=0.2, ge=0, description="Weight of an increase in entropy, in nats per token, in that probability."
    )
    entropy_tokens: Positive = Field(
        default=20, description="Number of tokens, from the start of a turn, over which entropy is estimated."
    )


class StrategyConfig(Section):
    """Where the trajectories of a group start: at the prompt, or at a turn or token of another one."""

    name: Literal["chain", "tree_grpo", "treerl", "arpo"] = Field(
        default="chain",
        description="chain: all from the prompt. tree_grpo branches at random turns, treerl at the most uncertain "
        "tokens, arpo after tool results that raise the entropy.",
    )
    tree_grpo: Annotated[TreeGrpoConfig, WhenKey("rollout.strategy.name", "tree_grpo")] = Field(
        default_factory=TreeGrpoConfig
    )
    treerl: Annotated[TreerlConfig, WhenKey("rollout.strategy.name", "treerl")] = Field(default_factory=TreerlConfig)
    arpo: Annotated[ArpoConfig, WhenKey("rollout.strategy.name", "arpo")] = Field(default_factory=ArpoConfig)


def strategy_problems(strategy: StrategyConfig, *, group_size: int, adv_estimator: str) -> Iterator[str]:
    """Yield every inconsistency of the section, with its fix.

    Args:
        strategy: the section.
        group_size: ``rollout.group_size``.
        adv_estimator: ``algorithm.adv_estimator``.
    """
    if strategy.name == "chain":
        if adv_estimator in ("tree_grpo", "treerl", "arpo"):
            yield (
                f"algorithm.adv_estimator={adv_estimator} compares branches, rollout.strategy.name=chain makes none; "
                f"set rollout.strategy.name={adv_estimator}, or algorithm.adv_estimator=grpo"
            )
        return
    if adv_estimator == "remax":
        yield (
            "algorithm.adv_estimator=remax compares a trajectory with a greedy chain from the prompt; set "
            "rollout.strategy.name=chain, or another estimator (tree_grpo, treerl, arpo)"
        )
    yield from _size_problems(strategy, group_size)


def _size_problems(strategy: StrategyConfig, group_size: int) -> Iterator[str]:
    grpo, rl, arpo = strategy.tree_grpo, strategy.treerl, strategy.arpo
    if strategy.name == "tree_grpo" and grpo.k > 1 + grpo.l * grpo.n:
        yield (
            f"rollout.strategy.tree_grpo.k={grpo.k} leaves are to be kept of each tree, but it has only 1 + l * n = "
            f"{1 + grpo.l * grpo.n}; lower k, or raise n or l"
        )
    if strategy.name == "tree_grpo" and group_size != grpo.m * grpo.k:
        yield (
            f"rollout.strategy=tree_grpo makes groups of m * k = {grpo.m} * {grpo.k} = {grpo.m * grpo.k} trajectories, "
            f"rollout.group_size is {group_size}; set rollout.group_size={grpo.m * grpo.k}"
        )
    size = rl.m * (1 + rl.l * rl.n * rl.t)
    if strategy.name == "treerl" and group_size != size:
        yield (
            f"rollout.strategy=treerl makes groups of m * (1 + l * n * t) = {rl.m} * (1 + {rl.l} * {rl.n} * {rl.t}) = "
            f"{size} trajectories, rollout.group_size is {group_size}; set rollout.group_size={size}"
        )
    if strategy.name == "arpo" and arpo.initial_rollouts >= group_size:
        yield (
            f"rollout.strategy.arpo.initial_rollouts={arpo.initial_rollouts} leaves nothing of "
            f"rollout.group_size={group_size} to branch; lower it (half is usual)"
        )
