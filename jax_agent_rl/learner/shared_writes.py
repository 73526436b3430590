"""Background writes of several processes to one checkpoint: what fails on one fails on all, at once.

Between writing and renaming, Orbax lets the processes wait for each other. One whose disk is full never comes, and the
others would wait out a timeout of many minutes. Here it says so in the key-value store of jax's coordination service,
and everybody's waiting ends with its message.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

FAILED = "jax_agent_rl/checkpoint_failed"
FOREVER = 10**10  # milliseconds


class SharedWrites:
    """One process's view of what all of them write. After a failure nothing more is written: the run is to end."""

    def __init__(self) -> None:
        self._client = ocp.multihost.get_jax_distributed_client()
        self._meet = ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        self._failed: Future[str] = Future()
        self._caller: int | None = None  # the thread that starts writes
        threading.Thread(target=self._listen, name="checkpoint-failures", daemon=True).start()

    def check(self) -> None:
        """Raises OSError if a write has failed on any process; never waits."""
        if self._failed.done():
            raise OSError(self._failed.result())

    def agree(self) -> None:
        """:meth:`check`, with the same outcome on all processes; each has to call it before it starts a write."""
        self._caller = threading.get_ident()
        if multihost_utils.process_allgather(np.asarray(self._failed.done())).any():
            raise OSError(self._failed.result())

    def fail(self, error: BaseException) -> None:
        """Tells all processes, this one too. The first failure counts."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one already
            self._client.key_value_set(FAILED, f"on process {jax.process_index()}, {error}")

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax's background threads wait at for the other processes.

        Raises:
            OSError: a write has failed on one of them.
        """
        # Orbax's own threads come here from a ``finally``, too, when this process's write has just failed. (What the
        # thread that starts writes is handling, a cancellation perhaps, is its own affair.)
        if threading.get_ident() != self._caller and (error := sys.exception()) is not None:
            self.fail(error)
        met: Future[Any] = Future()

        def meet() -> None:
            try:
                self._meet(key=key, timeout_ms=timeout_ms)
            except BaseException as error:
                met.set_exception(error)
            else:
                met.set_result(None)

        # A thread of its own, for nothing can call it off the barrier; as a daemon it does not keep the process alive.
        threading.Thread(target=meet, name="checkpoint-barrier", daemon=True).start()
        wait((met, self._failed), return_when=FIRST_COMPLETED)
        if not met.done():
            self.check()
        met.result()

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordination service has ended, with the run
            self._failed.set_result(self._client.blocking_key_value_get(FAILED, FOREVER))
