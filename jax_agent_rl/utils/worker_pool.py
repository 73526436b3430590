"""Worker processes that handle one request at a time, and are killed if it takes too long.

Some work cannot be done in this process: it sets signal handlers, may never release the
interpreter, or may take all memory. A worker is a Python program that reads one JSON object per
line from standard input and writes one per line to standard output::

    ask({"solution": …})  ──► an idle worker (started on demand)  ──► {"score": 1.0}
                              no answer within the timeout: killed, the next request starts another

Workers end with their standard input, so none outlives this process. Unlike :mod:`multiprocessing`,
this reads only JSON from them, forks nothing, and does not import the caller's ``__main__`` again.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.startup import own_environment, own_python

START_SECONDS = 120.0
"""Time limit of a worker's start: what it imports may be a lot."""
MAX_ANSWER_BYTES = 16 << 20


class WorkerFailedError(Exception):
    """A worker that ended, could not start, or answered what it should not."""


class WorkerTimeoutError(WorkerFailedError):
    """A worker that did not answer in time; it was killed."""


class WorkersBusyError(WorkerTimeoutError):
    """A request that no worker was free for in time."""


class JsonWorkers:
    """Workers that run one program. Calls block, so make them from threads.

    Args:
        program: Python source that each worker runs.
        size: number of workers, and so of concurrent requests, >= 1.
        purpose: description for messages.
        hello: first request to each worker, which it answers when it is ready. The time limit of
            the next request begins then.
    """

    def __init__(
        self, program: str, *, size: int, purpose: str, hello: Mapping[str, Any] | None = None
    ):
        if size < 1:
            raise ValueError(f"size={size}: must be >= 1")
        self._program = program
        self.purpose = purpose
        self._hello = hello
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(
        self, request: Mapping[str, Any], *, timeout: float, wait: float | None = None
    ) -> dict[str, Any]:
        """Return the answer to one request.

        Args:
            request: what :func:`serve` gives to its function.
            timeout: seconds for the answer.
            wait: seconds for an idle worker. None is ``timeout`` seconds for both together.

        Raises:
            WorkersBusyError: no worker was free in time.
            WorkerTimeoutError: no answer in time; the worker is killed.
            WorkerFailedError: the worker ended, or did not start.
        """
        deadline = time.monotonic() + timeout
        max_wait = timeout if wait is None else wait
        if not self._free.acquire(timeout=max_wait):
            raise WorkersBusyError(
                f"{self.purpose}: no worker was free within {max_wait:g} seconds"
            )
        if wait is not None:
            deadline = time.monotonic() + timeout

        try:
            with self._lock:
                is_new = not self._idle
                if is_new:
                    worker = _Worker(self._program)
                else:
                    worker = self._idle.pop()
                self._busy.add(worker)

            try:
                if is_new and self._hello is not None:
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
        return answer

    def close(self) -> None:
        """End the workers; running requests fail, later ones start new workers."""
        with self._lock:
            idle_workers = self._idle
            self._idle = []
            for worker in self._busy:
                worker.process.kill()  # the thread that waits for it cleans up
        for worker in idle_workers:
            worker.kill()

    def _greet(self, worker: _Worker, hello: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            answer = self._answer(worker, hello, deadline, START_SECONDS)
        except WorkerTimeoutError as error:
            raise WorkerFailedError(f"{error} to start a worker") from None
        if "error" in answer:
            worker.kill()
            raise WorkerFailedError(f"{self.purpose}: {answer['error']}")

    def _answer(
        self, worker: _Worker, request: Mapping[str, Any], deadline: float, timeout: float
    ) -> dict[str, Any]:
        try:
            line = worker.exchange(json.dumps(request).encode() + b"\n", deadline)
            # A score may be NaN: its check names it.
            answer = decode_json(line, non_finite=True, lone_surrogates=True)
            if not isinstance(answer, dict):
                raise ValueError("it answered no object")
            return answer
        except TimeoutError:
            worker.kill()
            raise WorkerTimeoutError(
                f"{self.purpose} took longer than {timeout:g} seconds"
            ) from None
        except _TooLong:
            worker.kill()
            raise WorkerFailedError(
                f"{self.purpose}: a worker answered with more than {MAX_ANSWER_BYTES} bytes"
            ) from None
        except (OSError, EOFError, ValueError) as error:
            code = worker.kill()
            raise WorkerFailedError(
                f"{self.purpose}: the worker ended ({error or f'exit code {code}'})"
            ) from None


class _TooLong(Exception):
    """A worker's answer has more than ``MAX_ANSWER_BYTES``."""


class _Worker:
    """One process and its two pipes, non-blocking so that no I/O outlasts the deadline."""

    def __init__(self, program: str):
        # Its own process group: Ctrl-C reaches only the parent, which decides.
        self.process = subprocess.Popen(
            own_python("-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=own_environment(),
            bufsize=0,
            process_group=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin = self.process.stdin
        self._stdout = self.process.stdout
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)

    def exchange(self, line: bytes, deadline: float) -> bytes:
        """Send a line and return one.

        Raises:
            TimeoutError: the deadline passed.
            EOFError: the process is gone.
            _TooLong: the answer is too long.
        """
        unsent = memoryview(line)
        while unsent:
            self._wait(self._stdin, selectors.EVENT_WRITE, deadline)
            num_sent = self._stdin.write(unsent) or 0
            unsent = unsent[num_sent:]

        received = bytearray()
        while not received.endswith(b"\n"):
            self._wait(self._stdout, selectors.EVENT_READ, deadline)
            chunk = self._stdout.read(1 << 16)
            if not chunk:
                raise EOFError
            received += chunk
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


def serve(answer: Any) -> None:
    """Answer requests until standard input ends, in a worker.

    What the called code and its subprocesses print goes to standard error, so that it cannot be
    taken for an answer.

    Args:
        answer: called with a request, a dict; returns the answer, a mapping. It must raise nothing.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        request = json.loads(line)
        answers.write(json.dumps(answer(request)) + "\n")
        answers.flush()
