"""Pools of worker processes that handle one request at a time and are killed on timeout.

Some code cannot run in this process: it sets signal handlers (``SIGALRM``), or may never release the interpreter, like
a backtracking regular expression. A worker is a Python program that reads one JSON object per line from standard input
and writes one per line to standard output (:func:`serve`)::

    ask({"solution": …})  ──► an idle worker (started on demand)  ──► {"score": 1.0}
                              no answer within the timeout: killed, the next request starts another

Workers end with their standard input, so none outlives this process. Unlike :mod:`multiprocessing`, this reads only
JSON from them and does not import the caller's ``__main__`` again.
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
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from jax_agent_rl.errors import JaxAgentRLError, RewardError, RewardTimeoutError
from jax_agent_rl.rewards.registry import RewardFunction, find_reward, load_rewards, split_score
from jax_agent_rl.utils.failures import describe_error, user_code_error
from jax_agent_rl.utils.threads import DaemonThreads

_START_SECONDS = 120.0  # a user's file may import a lot
MAX_ANSWER_BYTES = 16 << 20
PROGRAM = "from jax_agent_rl.rewards.workers import serve; serve()"


class WorkerPool:
    """Pool of worker processes. Its calls block, so call it from threads.

    Args:
        program: Python source that each worker runs.
        size: number of workers, and so of concurrent requests, >= 1.
        purpose: description for messages.
        hello: first request to each worker, answered when it is ready; the time limit of others begins then.
    """

    def __init__(self, program: str, *, size: int, purpose: str, hello: Mapping[str, Any] | None = None):
        if size < 1:
            raise ValueError(f"size={size}: must be >= 1")
        self._program = program
        self._purpose = purpose
        self._hello = hello
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Return the answer to one request; ``timeout`` seconds include waiting for an idle worker.

        Raises:
            RewardTimeoutError: no answer in time; the worker is killed.
            RewardError: the worker ended, or answered ``{"error": …}``.
        """
        deadline = time.monotonic() + timeout
        if not self._free.acquire(timeout=timeout):
            raise RewardTimeoutError(f"{self._purpose}: no worker was free within {timeout:g} seconds")
        try:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
                known = worker is not None
                worker = worker or _Worker(self._program)
                self._busy.add(worker)
            try:
                if not known and self._hello is not None:
                    self._greet(worker, self._hello)
                    deadline = time.monotonic() + timeout
                answer = self._answer(worker, request, deadline, timeout)
                with self._lock:
                    self._idle.append(worker)
            finally:
                with self._lock:
                    self._busy.discard(worker)
        finally:
            self._free.release()
        if "error" in answer:
            error = RewardError(f"{self._purpose}: {answer['error']}")
            error.failed_at = answer.get("failed_at", "")
            raise error
        return answer

    def close(self) -> None:
        """End the workers; running requests fail, later ones start new workers."""
        with self._lock:
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.process.kill()  # the thread that waits for it cleans up
        for worker in idle:
            worker.kill()

    def _greet(self, worker: _Worker, hello: Mapping[str, Any]) -> None:
        try:
            ready = self._answer(worker, hello, time.monotonic() + _START_SECONDS, _START_SECONDS)
        except RewardTimeoutError as error:
            raise RewardError(f"{error} to start a worker") from None
        if "error" in ready:
            worker.kill()
            raise RewardError(f"{self._purpose}: {ready['error']}")

    def _answer(self, worker: _Worker, request: Mapping[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
        try:
            return json.loads(worker.exchange(json.dumps(request).encode() + b"\n", deadline))
        except TimeoutError:
            worker.kill()
            raise RewardTimeoutError(f"{self._purpose} took longer than {timeout:g} seconds") from None
        except _TooLong:
            worker.kill()
            raise RewardError(f"{self._purpose}: a worker answered with more than {MAX_ANSWER_BYTES} bytes") from None
        except (OSError, EOFError, ValueError) as error:
            code = worker.kill()
            raise RewardError(f"{self._purpose}: the worker ended ({error or f'exit code {code}'})") from None


class _TooLong(Exception):
    """A worker's answer has more than ``MAX_ANSWER_BYTES``."""


class _Worker:
    """One process and its two pipes, non-blocking so that no I/O outlasts the deadline."""

    def __init__(self, program: str):
        command = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        # Its own process group: Ctrl-C reaches only the parent, which decides.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, process_group=0)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, line: bytes, deadline: float) -> bytes:
        """Send a line and return one.

        Raises:
            TimeoutError: the deadline passed.
            EOFError: the process is gone.
            _TooLong: the line is.
        """
        unsent = memoryview(line)
        while unsent:
            self._wait(self._stdin, selectors.EVENT_WRITE, deadline)
            unsent = unsent[self._stdin.write(unsent) or 0 :]
        received = bytearray()
        while not received.endswith(b"\n"):
            self._wait(self._stdout, selectors.EVENT_READ, deadline)
            piece = self._stdout.read(1 << 16)
            if not piece:
                raise EOFError
            received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise _TooLong
        return bytes(received)

    def kill(self) -> int:
        """End the process and return its exit code."""
        self.process.kill()
        self._stdin.close()
        self._stdout.close()
        return self.process.wait()

    @staticmethod
    def _wait(pipe: Any, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError


class FunctionWorkers:
    """Synchronous functions of ``reward.path`` in processes that can be killed.

    Args:
        path: ``reward.path``, imported by every worker.
        size: number of workers, and so of concurrent calls; waiting for one does not count towards their time.
    """

    def __init__(self, path: str, *, size: int):
        hello = {"path": path, "sys_path": sys.path}
        self._pool = WorkerPool(PROGRAM, size=size, purpose=f"reward.path={path!r}", hello=hello)
        self._threads = DaemonThreads(kind="reward", error=RewardError)
        self._slots = asyncio.Semaphore(size)

    async def score(
        self, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, timeout: float
    ) -> tuple[float, dict[str, float]]:
        """Call the function of a data source and return its score and named parts.

        Args:
            data_source: whose function to call.
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
                    f"what the reward function of {data_source!r} asks for cannot be sent to a worker ({error!r}); put "
                    "plain data into the rows, or set reward.workers=0"
                ) from error
            request = {"call": base64.b64encode(call).decode(), "seconds": timeout}
            return self._pool.ask(request, timeout=timeout)

        async with self._slots:
            answer = await self._threads.run(ask, name=f"the reward of {data_source!r}")
        return answer["score"], answer["parts"]

    def close(self) -> None:
        """End the workers, including busy ones."""
        self._pool.close()


# --- in a worker process ----------------------------------------------------------------------------------------------

_ORPHAN_SECONDS = 5.0


def serve() -> None:
    """Answer requests until standard input ends: the program of :class:`FunctionWorkers` and of math-verify's workers.

    An exception becomes the answer ``{"error": …}``::

        {"path", "sys_path"}               imports ``reward.path``          {"ready": true}
        {"call", "seconds"}                calls one of its functions       {"score", "parts"}
        {"solution", "truth", "seconds"}   compares mathematical answers    {"score": 0 or 1, "extracted"}

    ``call`` is the pickled data source and arguments. math-verify limits its time with SIGALRM, which works only in the
    main thread of a process.

    Output of the called code and of its subprocesses goes to standard error, so that it cannot be taken for an answer.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are the parent's
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        try:
            reply = _answer(json.loads(line))
        except RewardError as error:
            reply = {"error": str(error), "failed_at": error.failed_at}
        except JaxAgentRLError as error:
            reply = {"error": str(error)}
        except BaseException as error:
            reply = {"error": describe_error(error)}
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
            return _verify_answer(request)
        except ImportError as error:
            return {"error": f"{error}; install the extra: pip install 'jax_agent_rl[math]'"}
    data_source, args, kwargs = pickle.loads(base64.b64decode(request["call"]))
    # The parent kills a late worker. If the parent has died, this timer ends the process without the interpreter.
    faulthandler.dump_traceback_later(request["seconds"] + _ORPHAN_SECONDS, file=2, exit=True)
    reward = find_reward(data_source)
    assert reward is not None, "the parent has the same file"
    try:
        score, parts = split_score(_call(reward, data_source, args, kwargs), reward, data_source)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"score": score, "parts": parts}


def _call(reward: RewardFunction, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    async def wait(result: Awaitable[Any]) -> Any:
        return await result

    try:
        result = reward.compute_score(*args, **kwargs)
        return asyncio.run(wait(result)) if inspect.isawaitable(result) else result
    except BaseException as error:  # it may try to exit
        raise user_code_error(RewardError, f"the reward function of {data_source!r}", error) from error


def _verify_answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from math_verify import parse, verify

    seconds = int(request["seconds"])
    truth = parse(f"\\boxed{{{request['truth']}}}", parsing_timeout=seconds)
    if not truth:
        raise ValueError(f"ground_truth {request['truth']!r:.200} is not mathematics that can be parsed")
    answer = parse(request["solution"], parsing_timeout=seconds)
    equal = bool(answer) and verify(truth, answer, timeout_seconds=seconds)
    return {"score": float(equal), "extracted": str(answer[-1]) if answer else ""}
