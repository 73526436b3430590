"""A few helper processes that answer one question at a time, and are killed when they take too long.

Some libraries cannot run in this process: they set signal handlers (``SIGALRM``), or may spin for ever in C. A worker
is ``python -m MODULE``, which reads one JSON object a line from its standard input and writes one a line to its
standard output::

    ask({"solution": …})  ──► a free worker (started when first needed)  ──► {"score": 1.0}
                              no answer within the timeout: killed, its successor starts with the next question

Workers end by themselves when their standard input does, so none outlives this process. Nothing is pickled, and the
caller's ``__main__`` is not imported again, as it would be by :mod:`multiprocessing`.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import RewardError, RewardTimeoutError


class WorkerPool:
    """Blocking; call it from threads.

    Args:
        module: what to run, as ``python -m`` wants it.
        size: most workers, and so most questions at a time, >= 1.
        purpose: what they do, for messages.
    """

    def __init__(self, module: str, *, size: int, purpose: str):
        if size < 1:
            raise ValueError(f"size={size}: must be >= 1")
        self._module = module
        self._purpose = purpose
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

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
            worker = worker or _Worker(self._module)
            answer = self._answer(worker, question, deadline, timeout)
            with self._lock:
                self._idle.append(worker)
        finally:
            self._free.release()
        if "error" in answer:
            raise RewardError(f"{self._purpose}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the idle workers; later questions start new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

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
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
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
