"""Arguments of reward functions, filled by parameter name from the trajectory, its row and the run's services.

Names are looked up in this order:

1. ``data_source, solution_str, ground_truth, extra_info`` (the classic four);
2. the trajectory: ``trajectory, messages, finish_reason, num_turns, tool_rewards, tool_scores, turn_scores``;
3. services of the run, e.g. ``judge``;
4. fields of the row, of its ``extra_info``, of its ``reward_model``.

A function with ``*args`` gets the classic four by position.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.types import Trajectory

CLASSIC = ("data_source", "solution_str", "ground_truth", "extra_info")
FROM_TRAJECTORY = ("trajectory", "messages", "finish_reason", "num_turns", "tool_rewards", "tool_scores", "turn_scores")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """The parameters of a reward function.

    Attributes:
        required: names without a default.
        optional: names with one; left out when nothing has the name.
        positional: whether it takes ``*args``.
        open: whether it takes ``**kwargs``, and so gets all of the classic four.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    positional: bool
    open: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read a signature; raise ``ValueError`` or ``TypeError`` if there is none (some built-ins)."""
        parameters = inspect.signature(function).parameters.values()
        kinds = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            positional=inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds,
            open=inspect.Parameter.VAR_KEYWORD in kinds,
        )

    def bind(self, available: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of one call.

        Raises:
            KeyError: ``available`` lacks a required name.
        """
        if self.positional:
            return tuple(available[name] for name in CLASSIC), {}
        wanted = [*self.required, *(name for name in self.optional if name in available)]
        if self.open:
            wanted += [name for name in CLASSIC if name not in wanted]
        return (), {name: available[name] for name in wanted}

    def missing_in(self, row: Mapping[str, Any], services: Collection[str]) -> list[str]:
        """Return the required names that neither a trajectory of this row nor the run will have."""
        if self.positional:
            return []
        known = {*CLASSIC, *FROM_TRAJECTORY, *services, *row_fields(row)}
        return [name for name in self.required if name not in known]


def row_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a row by name: its own, then those of ``extra_info``, then those of ``reward_model``."""
    sections = (row.get("extra_info") or {}, row.get("reward_model") or {})
    return ChainMap(*({key: value for key, value in part.items() if value is not None} for part in (row, *sections)))


def available_arguments(trajectory: Trajectory, *, solution_str: str, services: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return everything that the reward function of an unscored trajectory may name."""
    row = trajectory.row
    about = {
        "finish_reason": trajectory.finish_reason,
        "num_turns": trajectory.num_turns,
        "tool_rewards": [call.reward for call in trajectory.tool_calls],
        "tool_scores": dict(trajectory.tool_scores),
        "turn_scores": list(trajectory.turn_scores),
    }
    classic = {
        "data_source": str(row.get("data_source")),
        "solution_str": solution_str,
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": {**(row.get("extra_info") or {}), **about},
    }
    own = {"trajectory": trajectory, "messages": trajectory.messages, **about}
    return ChainMap(classic, own, dict(services), dict(row_fields(row)))
