"""The worker process of :mod:`jax_agent_rl.rewards.workers`: ``python -m jax_agent_rl.rewards.worker``.

It answers one JSON object per line::

    {"path", "sys_path"}               imports ``reward.path``          {"ready": true}
    {"call", "seconds"}                calls one of its functions       {"score", "parts"}
    {"solution", "truth", "seconds"}   compares mathematical answers    {"score": 0 or 1, "extracted"}

``call`` is the pickled data source and arguments. math-verify limits its time with SIGALRM, which works only in the
main thread of a process.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import inspect
import json
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import JaxAgentRLError, RewardError
from jax_agent_rl.rewards.registry import find_reward, load_rewards
from jax_agent_rl.rewards.scoring import split_score

_ORPHAN_SECONDS = 5.0


def serve() -> None:
    """Answer requests until standard input ends; an exception becomes the answer ``{"error": …}``.

    Output of the called code and of its subprocesses goes to standard error, so that it cannot be taken for an answer.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        try:
            reply = _answer(json.loads(line))
        except JaxAgentRLError as error:
            reply = {"error": str(error)}
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if "path" in request:
        sys.path[:] = request["sys_path"]
        load_rewards(request["path"])
        return {"ready": True}
    if "solution" in request:
        logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot parse
        try:
            return verify_answer(request)
        except ImportError as error:
            return {"error": f"{error}; install the extra: pip install 'jax_agent_rl[math]'"}
    data_source, args, kwargs = pickle.loads(base64.b64decode(request["call"]))
    # The parent kills a late worker. If the parent has died, this timer ends the process without the interpreter.
    faulthandler.dump_traceback_later(request["seconds"] + _ORPHAN_SECONDS, file=2, exit=True)
    try:
        score, parts = split_score(_call(data_source, args, kwargs), data_source)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"score": score, "parts": parts}


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


def verify_answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Score 1 if any answer in the solution equals the truth, else 0.

    Raises:
        ValueError: the truth cannot be parsed, an error in the data.
    """
    from math_verify import parse, verify

    seconds = int(request["seconds"])
    truth = parse(f"\\boxed{{{request['truth']}}}", parsing_timeout=seconds)
    if not truth:
        raise ValueError(f"ground_truth {request['truth']!r:.200} is not mathematics that can be parsed")
    answer = parse(request["solution"], parsing_timeout=seconds)
    equal = bool(answer) and verify(truth, answer, timeout_seconds=seconds)
    return {"score": float(equal), "extracted": str(answer[-1]) if answer else ""}


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are the parent's
    serve()
