"""Reward functions, chosen by each row's ``data_source``.

::

    @register_reward("my_task")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)          # or {"score": 1.0, "format": 0.5}; or async def

Arguments are passed by parameter name, so a function may also request any field of the row, the trajectory and services
of the run: see :mod:`jax_agent_rl.rewards.arguments`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rewards.arguments import Parameters
from jax_agent_rl.utils.plugins import load_user_module

Score = float | Mapping[str, Any]
ComputeScore = Callable[..., Score | Awaitable[Score]]
Solution = Literal["last_turn", "assistant", "conversation"]
"""Text that a reward function reads: the last assistant turn, all assistant turns, or tool results too."""

_Function = TypeVar("_Function", bound=ComputeScore)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A registered function, its parameters, the text it reads, and the ``reward.path`` it came from."""

    compute_score: ComputeScore
    parameters: Parameters
    solution: Solution
    path: str | None = None


_REWARDS: dict[str, RewardFunction] = {}


def register_reward(
    *data_sources: str, solution: Solution = "last_turn", override: bool = False
) -> Callable[[_Function], _Function]:
    """Register a reward function for rows of these sources.

    It may be async, and returns a number or a dict with ``"score"``; other numbers of the dict become
    ``Trajectory.reward_parts`` and metrics of the run. A synchronous function may block: those of ``reward.path`` run
    in worker processes (``reward.workers``), others in threads.

    Args:
        *data_sources: values of the row field ``data_source``; a pattern such as ``aime*`` matches those without a
            function of their own.
        solution: see :data:`Solution`.
        override: replace registered functions, e.g. built-in ones.

    Raises:
        ConfigError: a data source already has a function, and ``override`` is not set.
    """

    def register(function: _Function) -> _Function:
        entry = RewardFunction(compute_score=function, parameters=Parameters.of(function), solution=solution)
        for data_source in data_sources:
            known = _REWARDS.get(data_source)
            if known is not None and not override:
                raise ConfigError(
                    f"two reward functions for data_source {data_source!r}: "
                    f"{_place(known.compute_score)} and {_place(function)}; rename one, or set override=True"
                )
            _REWARDS[data_source] = entry
        return function

    return register


def find_reward(data_source: str) -> RewardFunction | None:
    """Return the function of a data source: by name, else by the first matching pattern."""
    if exact := _REWARDS.get(data_source):
        return exact
    return next((entry for pattern, entry in _REWARDS.items() if fnmatchcase(data_source, pattern)), None)


def known_data_sources() -> list[str]:
    """Everything that is registered, for messages."""
    return sorted(_REWARDS)


def load_rewards(path: str | None) -> None:
    """Import ``reward.path``, a Python file or module that registers more functions; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a data source twice.
    """
    if path is None:
        return
    before = dict(_REWARDS)
    load_user_module(path, key="reward.path")
    for data_source, entry in _REWARDS.items():
        if before.get(data_source) is not entry:
            _REWARDS[data_source] = replace(entry, path=path)


def require_rewards(rows: Iterable[Mapping[str, Any]], *, services: Collection[str] = ()) -> None:
    """Check before a run that every row can be scored, given the names of the run's services (``judge``).

    Raises:
        ConfigError: names all unknown data sources, and all missing fields that their functions request.
    """
    unknown: set[str] = set()
    lacking: set[tuple[str, str]] = set()
    for row in rows:
        data_source = str(row.get("data_source"))
        reward = find_reward(data_source)
        if reward is None:
            unknown.add(data_source)
        else:
            lacking |= {(data_source, name) for name in reward.parameters.missing_in(row, services)}
    problems = [_lacks(data_source, name) for data_source, name in sorted(lacking)]
    if unknown:
        problems.insert(
            0,
            f"no reward function for data_source {', '.join(map(repr, sorted(unknown)))}; there are "
            f"{known_data_sources()}; register one with @register_reward in the file named by reward.path",
        )
    if problems:
        raise ConfigError(problems)


def services_asked_for(rows: Iterable[Mapping[str, Any]], services: Collection[str]) -> set[str]:
    """Those of ``services`` that a reward function of these rows names, so that a run starts no others."""
    rewards = {data_source: find_reward(data_source) for data_source in {str(row.get("data_source")) for row in rows}}
    asked = {name for r in rewards.values() if r for name in (*r.parameters.required, *r.parameters.optional)}
    return asked & set(services)


def _lacks(data_source: str, name: str) -> str:
    if name == "judge":
        return (
            f"the reward function of {data_source!r} asks for a judge, and none is configured; set reward.judge.model"
        )
    return (
        f"the reward function of {data_source!r} asks for {name!r}, which some of its rows have neither as a field nor "
        "in extra_info or reward_model; add it to the rows or give the parameter a default"
    )


def _place(function: Callable[..., Any]) -> str:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return repr(function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
