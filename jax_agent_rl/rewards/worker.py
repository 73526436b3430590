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
from jax_agent_rl.rewards.scoring import checked

_ORPHAN_SECONDS = 5.0


def answer_questions() -> None:
    """Answer questions until standard input ends; an exception becomes the answer ``{"error": …}``.

    Output of the called code and of its subprocesses goes to standard error, so that it cannot pass for an answer.
    """
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in questions:
        try:
            reply = _answer(json.loads(line))
        except JaxAgentRLError as error:
            reply = {"error": str(error)}
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    if "path" in question:
        sys.path[:] = question["sys_path"]
        load_rewards(question["path"])
        return {"ready": True}
    if "solution" in question:
        logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot parse
        try:
            return verify_answer(question)
        except ImportError as error:
            return {"error": f"{error}; install the extra: pip install 'jax_agent_rl[math]'"}
    data_source, args, kwargs = pickle.loads(base64.b64decode(question["call"]))
    # The parent kills a late worker. If the parent is gone, this timer ends the process without the interpreter.
    faulthandler.dump_traceback_later(question["seconds"] + _ORPHAN_SECONDS, file=2, exit=True)
    try:
        score, parts = checked(_call(data_source, args, kwargs), data_source)
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


def verify_answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Score 1 if any answer in the solution equals the truth, else 0.

    Raises:
        ValueError: the truth cannot be parsed, a fault of the data.
    """
    from math_verify import parse, verify

    seconds = int(question["seconds"])
    truth = parse(f"\\boxed{{{question['truth']}}}", parsing_timeout=seconds)
    if not truth:
        raise ValueError(f"ground_truth {question['truth']!r:.200} is not mathematics that can be parsed")
    answer = parse(question["solution"], parsing_timeout=seconds)
    equal = bool(answer) and verify(truth, answer, timeout_seconds=seconds)
    return {"score": float(equal), "extracted": str(answer[-1]) if answer else ""}


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are the parent's
    answer_questions()
