"""The process that calls synchronous functions of ``reward.path``: ``python -m jax_agent_rl.rewards.function_worker``.

Reads ``{"path", "sys_path"}`` first and imports that file; then ``{"call", "seconds"}`` a line, the call being the
pickled data source and arguments, and writes ``{"score", "parts"}``.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import inspect
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import JaxAgentRLError, RewardError
from jax_agent_rl.rewards.registry import find_reward, load_rewards
from jax_agent_rl.rewards.scoring import checked
from jax_agent_rl.rewards.workers import answer_questions

_ORPHAN_SECONDS = 5.0


def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    """Imports the file, or calls a function."""
    try:
        if "path" in question:
            sys.path[:] = question["sys_path"]
            load_rewards(question["path"])
            return {"ready": True}
        data_source, args, kwargs = pickle.loads(base64.b64decode(question["call"]))
        # The parent kills a worker that is late. Without a parent nobody would: this needs no interpreter.
        faulthandler.dump_traceback_later(question["seconds"] + _ORPHAN_SECONDS, file=2, exit=True)
        try:
            score, parts = checked(_call(data_source, args, kwargs), data_source)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return {"score": score, "parts": parts}
    except JaxAgentRLError as error:
        return {"error": str(error)}


def _call(data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    reward = find_reward(data_source)
    assert reward is not None, "the parent has the same file"
    try:
        result = reward.compute_score(*args, **kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except BaseException as error:  # it may try to exit
        raise RewardError(f"the reward function of {data_source!r} raised {type(error).__name__}: {error}") from error


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are the parent's
    answer_questions(answer)
