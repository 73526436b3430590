"""Reward functions, chosen by each row's ``data_source``.

::

    @register_reward("my_task")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)          # or {"score": 1.0, "format": 0.5}; or async def

``solution_str`` is the text of the last assistant turn: tool results never reach it, so an answer that only a tool
wrote earns nothing. ``extra_info`` is the row's, plus ``finish_reason``, ``num_turns``, ``tool_rewards`` (one per call,
in order), ``tool_scores`` (each tool's ``calc_reward`` of the whole trajectory, by name) and ``turn_scores`` (one per
reply of a simulated user). A function that runs past ``reward.timeout`` loses its trajectory, not the run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax_agent_rl.errors import ConfigError, RewardError, RewardTimeoutError, TrajectoryError
from jax_agent_rl.threads import DaemonThreads
from jax_agent_rl.types import Trajectory
from jax_agent_rl.user_code import load_user_module

Score = float | Mapping[str, Any]
ComputeScore = Callable[[str, str, Any, Mapping[str, Any]], Score | Awaitable[Score]]
Solution = Literal["last_turn", "assistant", "conversation"]
"""Text a reward function reads: the last assistant turn, all assistant turns, or tool results as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A registered function, and the text it wants to read."""

    compute_score: ComputeScore
    solution: Solution


_REWARDS: dict[str, RewardFunction] = {}
_THREADS = DaemonThreads(kind="reward", error=RewardError)


def register_reward(*data_sources: str, solution: Solution = "last_turn") -> Callable[[ComputeScore], ComputeScore]:
    """Registers ``compute_score(data_source, solution_str, ground_truth, extra_info)`` for rows of these sources.

    It may be async, and returns a number or a dict with ``"score"``; other numbers of the dict become
    ``Trajectory.reward_parts``. A synchronous function runs in a thread, so it may block.

    Args:
        data_sources: values of the row field ``data_source``.
        solution: see :data:`Solution`.

    Raises:
        ConfigError: a data source has a function already.
    """

    def register(function: ComputeScore) -> ComputeScore:
        for data_source in data_sources:
            known = _REWARDS.get(data_source)
            if known is not None:
                raise ConfigError(
                    f"two reward functions for data_source {data_source!r}: "
                    f"{_place(known.compute_score)} and {_place(function)}; rename one"
                )
            _REWARDS[data_source] = RewardFunction(compute_score=function, solution=solution)
        return function

    return register


def load_rewards(path: str | None) -> None:
    """Imports ``reward.path``, a Python file or module that registers more functions; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a data source twice.
    """
    if path is not None:
        load_user_module(path, key="reward.path")


def require_rewards(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a data set with rows that nothing could score; call it before a run.

    Raises:
        ConfigError: naming all unknown data sources.
    """
    unknown = sorted({str(row.get("data_source")) for row in rows} - _REWARDS.keys())
    if unknown:
        raise ConfigError(
            f"no reward function for data_source {', '.join(map(repr, unknown))}; there are {sorted(_REWARDS)}; "
            "register one with @register_reward in the file named by reward.path"
        )


async def score(trajectory: Trajectory, *, timeout: float = 60.0) -> Trajectory:
    """Returns the trajectory with its ``reward``, ``reward_parts`` and ``metrics["reward_seconds"]``.

    Args:
        timeout: seconds the function may take, ``reward.timeout``. A thread that has not returned by then is
            abandoned, see :mod:`jax_agent_rl.threads`.

    Raises:
        RewardError: no function for its data source, the function raised, or its score is not a finite number.
        RewardTimeoutError: the function took longer than ``timeout``.
    """
    began = time.perf_counter()
    row = trajectory.row
    data_source = str(row.get("data_source"))
    reward = _REWARDS.get(data_source)
    if reward is None:
        raise RewardError(f"no reward function for data_source {data_source!r}; there are {sorted(_REWARDS)}")
    ground_truth = (row.get("reward_model") or {}).get("ground_truth")
    arguments = (data_source, solution_text(trajectory, reward.solution), ground_truth, _extra_info(trajectory))
    try:
        result = await _in_time(_call(reward.compute_score, arguments), data_source, timeout)
    except TrajectoryError:
        raise
    except Exception as error:
        raise RewardError(f"the reward function of {data_source!r} raised {type(error).__name__}: {error}") from error
    total, parts = _check(result, data_source)
    seconds = time.perf_counter() - began
    return replace(
        trajectory, reward=total, reward_parts=parts, metrics={**trajectory.metrics, "reward_seconds": seconds}
    )


def solution_text(trajectory: Trajectory, which: Solution = "last_turn") -> str:
    """The text a reward function reads; turns are joined by blank lines."""
    turns = trajectory.num_turns
    wanted = ("assistant", "tool") if which == "conversation" else ("assistant",)
    texts: list[str] = []
    for message in reversed(trajectory.messages):  # the prompt may hold assistant messages too: stop before it
        if message["role"] in wanted:
            texts.append(message["content"])
        turns -= message["role"] == "assistant"
        if turns == 0 or which == "last_turn" and texts:
            break
    return "\n\n".join(reversed(texts))


def _extra_info(trajectory: Trajectory) -> dict[str, Any]:
    return {
        **(trajectory.row.get("extra_info") or {}),
        "finish_reason": trajectory.finish_reason,
        "num_turns": trajectory.num_turns,
        "tool_rewards": [call.reward for call in trajectory.tool_calls],
        "tool_scores": dict(trajectory.tool_scores),
        "turn_scores": list(trajectory.turn_scores),
    }


async def _call(function: ComputeScore, arguments: tuple[str, str, Any, Mapping[str, Any]]) -> Score:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await _THREADS.run(lambda: function(*arguments), name=f"the reward of {arguments[0]!r}")
    return await result if inspect.isawaitable(result) else result


async def _in_time(work: Coroutine[Any, Any, Score], data_source: str, timeout: float) -> Score:
    """Awaits ``work`` in a task of its own, which is left behind if it ignores its cancellation."""
    task = asyncio.ensure_future(_no_exit(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()
    if not done:
        raise RewardTimeoutError(
            f"the reward function of {data_source!r} did not return within reward.timeout={timeout:g} seconds; "
            "raise it, or give the function a time limit of its own"
        )
    if task.cancelled():  # by the function itself; must not look like a cancellation of the trajectory
        raise RewardError(f"the reward function of {data_source!r} cancelled itself")
    return task.result()


async def _no_exit(work: Coroutine[Any, Any, Score]) -> Score:
    """``sys.exit()`` in a reward function loses its trajectory, not the run."""
    try:
        return await work
    except SystemExit as error:
        raise RewardError(f"the reward function tried to exit with {error.code!r}") from None


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


def _place(function: Callable[..., Any]) -> str:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return repr(function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
