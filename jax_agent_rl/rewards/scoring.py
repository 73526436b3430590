"""Scores one trajectory: finds its function, calls it in bounded time, and checks what it says.

``solution_str`` is the text of the last assistant turn unless the function was registered with another ``solution``:
tool results never reach it, so an answer that only a tool wrote earns nothing. Three kinds of reward stay apart: what
tools gave (``tool_rewards``, one per call; ``tool_scores``, one per tool, of the whole trajectory), what the world gave
per turn (``turn_scores``), and what the function returns, the final reward; a function that wants to mix them asks for
them by name. A function that runs past ``reward.timeout`` loses its trajectory, not the run.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax_agent_rl.errors import RewardError, RewardTimeoutError, TrajectoryError
from jax_agent_rl.in_time import in_time
from jax_agent_rl.rewards.arguments import available_arguments
from jax_agent_rl.rewards.registry import RewardFunction, Score, Solution, find_reward, known_data_sources
from jax_agent_rl.threads import DaemonThreads
from jax_agent_rl.types import Trajectory

_THREADS = DaemonThreads(kind="reward", error=RewardError)
_NO_SERVICES: Mapping[str, Any] = MappingProxyType({})


async def score(
    trajectory: Trajectory,
    *,
    timeout: float = 60.0,
    services: Mapping[str, Any] = _NO_SERVICES,
) -> Trajectory:
    """Returns the trajectory with its ``reward``, ``reward_parts`` and metrics.

    ``metrics`` gains ``reward_seconds``, ``tool_reward`` and ``turn_score`` (sums over the trajectory).

    Args:
        timeout: seconds the function may take, ``reward.timeout``. A thread that has not returned by then is
            abandoned, see :mod:`jax_agent_rl.threads`.
        services: what functions may ask for by name besides the trajectory and the row, e.g. ``judge``.

    Raises:
        RewardError: no function for its data source, the row lacks a field it asks for, it raised, or its score is
            not a finite number.
        RewardTimeoutError: the function took longer than ``timeout``.
    """
    began = time.perf_counter()
    data_source = str(trajectory.row.get("data_source"))
    reward = find_reward(data_source)
    if reward is None:
        raise RewardError(f"no reward function for data_source {data_source!r}; there are {known_data_sources()}")
    try:
        result = await in_time(
            _call(reward, trajectory, services),
            timeout,
            late=lambda: RewardTimeoutError(
                f"the reward function of {data_source!r} did not return within reward.timeout={timeout:g} seconds; "
                "raise it, or give the function a time limit of its own"
            ),
            error=lambda problem: RewardError(f"the reward function of {data_source!r} {problem}"),
        )
    except TrajectoryError:
        raise
    except Exception as error:
        raise RewardError(f"the reward function of {data_source!r} raised {type(error).__name__}: {error}") from error
    total, parts = _check(result, data_source)
    metrics = {
        **trajectory.metrics,
        "reward_seconds": time.perf_counter() - began,
        "tool_reward": sum(call.reward for call in trajectory.tool_calls),
        "turn_score": sum(trajectory.turn_scores),
    }
    return replace(trajectory, reward=total, reward_parts=parts, metrics=metrics)


def solution_text(trajectory: Trajectory, which: Solution = "last_turn") -> str:
    """The text a reward function reads; turns are joined by blank lines."""
    turns = trajectory.num_turns
    wanted = ("assistant",) if which != "conversation" else ("assistant", "tool", "user")
    texts: list[str] = []
    for message in reversed(trajectory.messages):  # the prompt may hold assistant messages too: stop before it
        if message["role"] in wanted:
            texts.append(message["content"])
        turns -= message["role"] == "assistant"
        if turns == 0 or which == "last_turn" and texts:
            break
    return "\n\n".join(reversed(texts))


async def _call(reward: RewardFunction, trajectory: Trajectory, services: Mapping[str, Any]) -> Score:
    available = available_arguments(
        trajectory, solution_str=solution_text(trajectory, reward.solution), services=services
    )
    data_source, function = available["data_source"], reward.compute_score
    try:
        args, kwargs = reward.parameters.bind(available)
    except KeyError as error:
        raise RewardError(
            f"the reward function of {data_source!r} asks for {error}, which the row has neither as a field nor in "
            "extra_info or reward_model"
        ) from None
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*args, **kwargs)  # type: ignore[misc]
    result = await _THREADS.run(lambda: function(*args, **kwargs), name=f"the reward of {data_source!r}")
    return await result if inspect.isawaitable(result) else result


def _check(result: Any, data_source: str) -> tuple[float, dict[str, float]]:
    """Splits a result into its score and its named parts."""
    named = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in named:
        raise RewardError(f'the reward of {data_source!r} has no "score": {result!r}')
    value = named["score"]
    if not _is_finite(value):
        raise RewardError(f"the reward of {data_source!r} must be a finite number, got {value!r}")
    return float(value), {key: float(part) for key, part in named.items() if key != "score" and _is_finite(part)}


def _is_finite(value: Any) -> bool:
    """True for bools, ints, floats and numpy scalars that are finite."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False
