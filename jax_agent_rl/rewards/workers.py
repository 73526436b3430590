"""Rewards in worker processes: functions of ``reward.path``, and math-verify.

Their code may set signal handlers (``SIGALRM``) or never release the interpreter, see
:mod:`jax_agent_rl.utils.worker_pool`.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Awaitable, Mapping
from typing import Any

from jax_agent_rl.errors import JaxAgentRLError, RewardError, RewardTimeoutError
from jax_agent_rl.rewards.registry import (
    RewardFunction,
    SplitScore,
    find_reward,
    load_rewards,
    split_score,
)
from jax_agent_rl.utils import worker_pool
from jax_agent_rl.utils.failures import describe_error, user_code_error
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.timeouts import DaemonThreads
from jax_agent_rl.utils.worker_pool import JsonWorkers, WorkerFailedError, WorkerTimeoutError

PROGRAM = "from jax_agent_rl.rewards.workers import serve; serve()"


class WorkerPool(JsonWorkers):
    """Workers of rewards, whose failures are RewardError."""

    def ask(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Return the answer to one request; ``timeout`` seconds include waiting for an idle worker.

        Raises:
            RewardTimeoutError: no answer in time; the worker is killed.
            RewardError: the worker ended, or answered ``{"error": …}``.
        """
        try:
            answer = super().ask(request, timeout=timeout)
        except WorkerTimeoutError as error:
            raise RewardTimeoutError(str(error)) from None
        except WorkerFailedError as error:
            raise RewardError(str(error)) from None
        if "error" in answer:
            error = RewardError(f"{self.purpose}: {answer['error']}")
            error.failed_at = answer.get("failed_at", "")
            raise error
        return answer


class FunctionWorkers:
    """Synchronous functions of ``reward.path`` in processes that can be killed.

    Args:
        path: ``reward.path``, imported by every worker.
        size: number of workers, and so of concurrent calls; waiting for one does not count towards
            their time.
    """

    def __init__(self, path: str, *, size: int):
        hello = {"path": path, "sys_path": sys.path}
        self._pool = WorkerPool(PROGRAM, size=size, purpose=f"reward.path={path!r}", hello=hello)
        self._threads = DaemonThreads(kind="reward", error=RewardError)
        self._slots = asyncio.Semaphore(size)

    async def score(
        self, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, timeout: float
    ) -> SplitScore:
        """Call the function of a data source and return its score, named parts and feedback.

        Args:
            data_source: selects the function.
            args: positional arguments, picklable.
            kwargs: keyword arguments, picklable.
            timeout: seconds after which the worker is killed.

        Raises:
            RewardTimeoutError: it took longer.
            RewardError: it raised, returned no score, or ended its process.
        """

        def ask() -> dict[str, Any]:
            try:
                call = pickle.dumps((data_source, args, dict(kwargs)))
            except Exception as error:
                raise RewardError(
                    f"what the reward function of {data_source!r} asks for cannot be sent to a"
                    f" worker ({error!r}); put plain data into the rows, or set reward.workers=0"
                ) from error
            request = {"call": base64.b64encode(call).decode(), "seconds": timeout}
            return self._pool.ask(request, timeout=timeout)

        async with self._slots:
            answer = await self._threads.run(ask, name=f"the reward of {data_source!r}")
        return SplitScore(**answer)

    def close(self) -> None:
        """End the workers, including busy ones."""
        self._pool.close()


# --- in a worker process --------------------------------------------------------------------------

_ORPHAN_SECONDS = 5.0


def serve() -> None:
    """Answer requests until standard input ends.

    This is the program of :class:`FunctionWorkers` and of math-verify's workers. An exception
    becomes the answer ``{"error": …}``::

        request                            action                           answer
        {"path", "sys_path"}               imports ``reward.path``          {"ready": true}
        {"call", "seconds"}                calls one of its functions       {"score", "parts",
                                                                             "feedback"}
        {"solution", "truth", "seconds"}   compares mathematical answers    {"score", "extracted"}

    ``call`` is the pickled data source and arguments. math-verify limits its time with SIGALRM,
    which works only in the main thread of a process.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are the parent's
    worker_pool.serve(_answer_or_error)


def _answer_or_error(request: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return answer(request)
    except RewardError as error:
        return {"error": str(error), "failed_at": error.failed_at}
    except JaxAgentRLError as error:
        return {"error": str(error)}
    except BaseException as error:
        return {"error": describe_error(error)}


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer one of the requests that :func:`serve` lists."""
    if "path" in request:
        sys.path[:] = request["sys_path"]
        load_rewards(request["path"])
        return {"ready": True}

    if "solution" in request:
        logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot parse
        try:
            return _verify_answer(request)
        except ImportError as error:
            return {"error": f"{error}; install the extra: {install_command('math')}"}

    data_source, args, kwargs = pickle.loads(base64.b64decode(request["call"]))
    # The parent kills a late worker. If the parent has died, this timer ends the process even while
    # the function holds the interpreter.
    faulthandler.dump_traceback_later(request["seconds"] + _ORPHAN_SECONDS, file=2, exit=True)
    reward = find_reward(data_source)
    assert reward is not None, "the parent has the same file"
    try:
        result = _call(reward, data_source, args, kwargs)
        split = split_score(result, reward, data_source)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return split._asdict()


def _call(
    reward: RewardFunction, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return a function's result; raise RewardError, with the place in the code, if it raises."""

    async def wait(result: Awaitable[Any]) -> Any:
        return await result

    try:
        result = reward.compute_score(*args, **kwargs)
        if inspect.isawaitable(result):  # a plain function may return a coroutine
            return asyncio.run(wait(result))
        return result
    except BaseException as error:  # it may try to exit
        raise user_code_error(
            RewardError, f"the reward function of {data_source!r}", error
        ) from error


def _verify_answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether math-verify finds the solution's answer equal to the truth, and that answer.

    Raises:
        ValueError: the truth cannot be parsed.
    """
    from math_verify import parse, verify

    seconds = int(request["seconds"])
    truth = parse(f"\\boxed{{{request['truth']}}}", parsing_timeout=seconds)
    if not truth:
        raise ValueError(
            f"ground_truth {request['truth']!r:.200} is not mathematics that can be parsed"
        )

    answer = parse(request["solution"], parsing_timeout=seconds)
    if not answer:
        return {"score": 0.0, "extracted": ""}
    is_equal = verify(truth, answer, timeout_seconds=seconds)
    return {"score": float(is_equal), "extracted": str(answer[-1])}
