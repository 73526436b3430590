"""A few helper processes that answer one question at a time, and are killed when they take too long.

Some code cannot run in this process: it sets signal handlers (``SIGALRM``), or may spin for ever without letting go of
the interpreter, as a regular expression can that backtracks. A worker is ``python -m MODULE``, which reads one JSON
object a line from its standard input and writes one a line to its standard output (:func:`answer_questions`)::

    ask({"solution": …})  ──► a free worker (started when first needed)  ──► {"score": 1.0}
                              no answer within the timeout: killed, its successor starts with the next question

Workers end by themselves when their standard input does, so none outlives this process. What comes from them is JSON,
and the caller's ``__main__`` is not imported again, as it would be by :mod:`multiprocessing`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jax_agent_rl.errors import RewardError, RewardTimeoutError
from jax_agent_rl.utils.threads import DaemonThreads

_START_SECONDS = 120.0  # a user's file may import a lot


class WorkerPool:
    """Blocking; call it from threads.

    Args:
        module: what to run, as ``python -m`` wants it.
        size: most workers, and so most questions at a time, >= 1.
        purpose: what they do, for messages.
        hello: the first question to each worker, which answers when it is ready; a question's time begins after that.
    """

    def __init__(self, module: str, *, size: int, purpose: str, hello: Mapping[str, Any] | None = None):
        if size < 1:
            raise ValueError(f"size={size}: must be >= 1")
        self._module = module
        self._purpose = purpose
        self._hello = hello
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(self, question: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """One answer; ``timeout`` seconds include waiting for a free worker.

        Raises:
            RewardTimeoutError: there was none in time. The worker is killed.
            RewardError: the worker ended, or answered ``{"error": …}``.
        """
        deadline = time.monotonic() + timeout
        if not self._free.acquire(timeout=timeout):
            raise RewardTimeoutError(f"{self._purpose}: no worker was free within {timeout:g} seconds")
        try:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
                known = worker is not None
                worker = worker or _Worker(self._module)
                self._busy.add(worker)
            try:
                if not known and self._hello is not None:
                    self._greet(worker, self._hello)
                    deadline = time.monotonic() + timeout
                answer = self._answer(worker, question, deadline, timeout)
                with self._lock:
                    self._idle.append(worker)
            finally:
                with self._lock:
                    self._busy.discard(worker)
        finally:
            self._free.release()
        if "error" in answer:
            raise RewardError(f"{self._purpose}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the workers; those that are asked something fail, and later questions start new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.end()
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

    def _answer(self, worker: _Worker, question: Mapping[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
        try:
            return json.loads(worker.exchange(json.dumps(question).encode() + b"\n", deadline))
        except TimeoutError:
            worker.kill()
            raise RewardTimeoutError(f"{self._purpose} took longer than {timeout:g} seconds") from None
        except (OSError, EOFError, ValueError) as error:
            code = worker.kill()
            raise RewardError(f"{self._purpose}: the worker ended ({error or f'exit code {code}'})") from None


class _Worker:
    """One process and its two pipes, non-blocking so that no write or read outlasts the deadline."""

    def __init__(self, module: str):
        command = [sys.executable, "-m", module]
        pipe = subprocess.PIPE
        # A group of its own: Ctrl-C reaches the parent's, also while this one still imports; the parent decides.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, process_group=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, line: bytes, deadline: float) -> bytes:
        """Sends a line and reads one; TimeoutError past the deadline, EOFError when the process is gone."""
        unsent = memoryview(line)
        while unsent:
            self._wait(self._stdin, selectors.EVENT_WRITE, deadline)
            unsent = unsent[self._stdin.write(unsent) or 0 :]
        received = b""
        while not received.endswith(b"\n"):
            self._wait(self._stdout, selectors.EVENT_READ, deadline)
            piece = self._stdout.read(1 << 16)
            if not piece:
                raise EOFError
            received += piece
        return received

    def end(self) -> None:
        """Ends the process; who talks to it notices, and does the rest."""
        self._process.kill()

    def kill(self) -> int:
        """Ends the process, and returns its exit code."""
        self._process.kill()
        self._stdin.close()
        self._stdout.close()
        return self._process.wait()

    @staticmethod
    def _wait(pipe: Any, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError


class FunctionWorkers:
    """Runs synchronous functions of ``reward.path`` where they can be killed.

    Args:
        path: ``reward.path``; every worker imports it.
        size: most of them, and so most functions at a time; more wait, which is not part of their time.
    """

    def __init__(self, path: str, *, size: int):
        hello = {"path": path, "sys_path": sys.path}
        module = "jax_agent_rl.rewards.function_worker"
        self._pool = WorkerPool(module, size=size, purpose=f"reward.path={path!r}", hello=hello)
        self._threads = DaemonThreads(kind="reward", error=RewardError)
        self._slots = asyncio.Semaphore(size)

    async def score(
        self, data_source: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, timeout: float
    ) -> tuple[float, dict[str, float]]:
        """The score and its named parts.

        Args:
            data_source: whose function is called.
            args, kwargs: the call's, which pickle can write.
            timeout: seconds it may take; the worker is killed then.

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
            question = {"call": base64.b64encode(call).decode(), "seconds": timeout}
            return self._pool.ask(question, timeout=timeout)

        async with self._slots:
            answer = await self._threads.run(ask, name=f"the reward of {data_source!r}")
        return answer["score"], answer["parts"]

    def close(self) -> None:
        """Ends the workers, busy ones too."""
        self._pool.close()


def answer_questions(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """A worker's side: answers until standard input ends. An exception becomes the answer ``{"error": …}``.

    What the code prints, or a program that it starts, goes to standard error: it must not look like an answer.
    """
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in questions:
        try:
            reply = answer(json.loads(line))
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
