"""Scores a trajectory by the function of its row's data source, in bounded time."""

from __future__ import annotations

import inspect
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax_agent_rl.chat.thinking import with_closed_thinking
from jax_agent_rl.checks import as_score
from jax_agent_rl.errors import RewardError, RewardTimeoutError
from jax_agent_rl.outcomes import PROGRESS
from jax_agent_rl.rewards.registry import (
    RewardFunction,
    Score,
    Solution,
    describe_unknown,
    find_reward,
    reward_failure,
    row_fields,
    split_score,
)
from jax_agent_rl.rewards.workers import FunctionWorkers
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.failures import user_code
from jax_agent_rl.utils.timeouts import DaemonThreads, in_time

THREADS = DaemonThreads(kind="reward", error=RewardError)
"""Threads of functions that are not async."""
_NO_SERVICES: Mapping[str, Any] = MappingProxyType({})


async def score(
    trajectory: Trajectory,
    *,
    timeout: float = 60.0,
    services: Mapping[str, Any] = _NO_SERVICES,
    workers: FunctionWorkers | None = None,
) -> Trajectory:
    """Return the trajectory with its ``reward``, ``reward_parts``, ``feedback`` and metrics.

    ``metrics`` gains ``reward_seconds``, ``tool_reward`` and ``turn_score`` (sums over the
    trajectory).

    Args:
        timeout: seconds the function may take, ``reward.timeout``; then its thread is abandoned,
            see :mod:`jax_agent_rl.utils.timeouts`.
        services: what functions may request besides the trajectory and the row, e.g. ``judge``.
        workers: runs the synchronous functions of ``reward.path``; None: threads do.

    Raises:
        RewardError: its data source has no function, the row lacks a requested field, the function
            raised or returned partial scores of other turns, or float32 cannot hold its score, a
            part of it, or its sum with the tools' rewards.
        RewardTimeoutError: the function took longer than ``timeout``.
    """
    start_time = time.perf_counter()
    data_source = str(trajectory.row.get("data_source"))
    reward = find_reward(data_source)
    if reward is None:
        raise RewardError(describe_unknown([data_source]))

    def timeout_error() -> RewardError:
        problem = (
            f"did not return within reward.timeout={timeout:g} seconds; raise it, or give the"
            " function a time limit of its own"
        )
        return reward_failure(RewardTimeoutError, reward, data_source, problem)

    with user_code(RewardError, f"the reward function of {data_source!r}"):
        args, kwargs = _arguments(reward, trajectory, services)
        # A service, such as the judge, belongs to this process and cannot be sent to a worker.
        requests_service = bool(services.keys() & kwargs.keys())
        if workers is not None and reward.path and not reward.is_async and not requests_service:
            try:
                total, parts, feedback = await workers.score(
                    data_source, args, kwargs, timeout=timeout
                )
            except RewardTimeoutError:
                raise timeout_error() from None
        else:
            result = await in_time(
                lambda: _call(reward, data_source, args, kwargs),
                timeout,
                what=f"the reward function of {data_source!r}",
                late=timeout_error,
                error=lambda problem: reward_failure(RewardError, reward, data_source, problem),
            )
            total, parts, feedback = split_score(result, reward, data_source)
    _check_sums(trajectory, total)
    _check_progress(trajectory, parts, reward, data_source)

    metrics = {
        **trajectory.metrics,
        "reward_seconds": time.perf_counter() - start_time,
        "tool_reward": sum(call.reward for call in trajectory.tool_calls),
        "turn_score": sum(trajectory.turn_scores),
    }
    return replace(trajectory, reward=total, reward_parts=parts, metrics=metrics, feedback=feedback)


def _check_sums(trajectory: Trajectory, score: float) -> None:
    """Raise RewardError if a sum of what the trajectory earned could overflow float32."""
    # Sums of absolute values bound every sum that an estimator may form of a part of them.
    tool_total = sum(abs(call.reward) for call in trajectory.tool_calls)
    turn_total = sum(abs(turn_score) for turn_score in trajectory.turn_scores)
    try:
        as_score(abs(score) + tool_total, "the sum of its score and its tools' rewards")
        as_score(turn_total, "the sum of its turns' scores")
    except ValueError as error:
        raise RewardError(f"{trajectory.trajectory_id}: {error}") from None


def _check_progress(
    trajectory: Trajectory, parts: Mapping[str, float], reward: RewardFunction, data_source: str
) -> None:
    """Raise RewardError if there are partial scores, but not one for each turn."""
    num_scores = sum(name.startswith(f"{PROGRESS}/") for name in parts)
    num_turns = sum(len(context.turns) for context in (*trajectory.segments, trajectory))
    if num_scores not in (0, num_turns):
        raise reward_failure(
            RewardError,
            reward,
            data_source,
            f"returned progress of {num_scores} turns for a trajectory of {num_turns}; return one"
            " partial score for each turn",
        )


def solution_text(trajectory: Trajectory, which: Solution = "last_turn") -> str:
    """Return the text a reward function reads, turns joined by blank lines.

    Reasoning stands in think blocks; :func:`jax_agent_rl.chat.thinking.answer_of` is the text
    without them.
    """
    roles = {"assistant"}
    if which == "conversation":
        roles = {"assistant", "tool", "user"}

    turns_left = trajectory.num_turns
    texts: list[str] = []
    # From the end to the first sampled turn: the prompt may hold assistant messages as well.
    for message in reversed(trajectory.messages):
        if message["role"] in roles:
            text = message["content"]
            if texts:
                # A turn that was cut while thinking must not hide what follows it.
                text = with_closed_thinking(text)
            texts.append(text)
        if message["role"] == "assistant":
            turns_left -= 1
        if turns_left == 0:
            break
        if which == "last_turn" and texts:
            break
    return "\n\n".join(reversed(texts))


def _arguments(
    reward: RewardFunction, trajectory: Trajectory, services: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a function's call for this trajectory."""
    row = trajectory.row
    outcome = {
        "finish_reason": trajectory.finish_reason,
        "num_turns": trajectory.num_turns,
        "tool_rewards": [call.reward for call in trajectory.tool_calls],
        "tool_scores": dict(trajectory.tool_scores),
        "turn_scores": list(trajectory.turn_scores),
    }
    classic = {
        "data_source": str(row.get("data_source")),
        "solution_str": solution_text(trajectory, reward.solution),
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": {**(row.get("extra_info") or {}), **outcome},
    }
    from_trajectory = {
        "trajectory": trajectory,
        "role": trajectory.role,
        "messages": trajectory.messages,
        **outcome,
    }
    available = ChainMap(classic, from_trajectory, dict(services), dict(row_fields(row)))
    try:
        return reward.bind(available)
    except KeyError as error:
        raise RewardError(
            f"the reward function of {classic['data_source']!r} asks for {error}, which the row has"
            " neither as a field nor in extra_info or reward_model"
        ) from None


async def _call(
    reward: RewardFunction, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Score:
    """Await an async function; run another in a thread."""
    function = reward.compute_score
    if reward.is_async:
        return await function(*args, **kwargs)  # type: ignore[misc]

    result = await THREADS.run(
        lambda: function(*args, **kwargs), name=f"the reward of {data_source!r}"
    )
    if inspect.isawaitable(result):  # a plain function may return a coroutine
        return await result
    return result
