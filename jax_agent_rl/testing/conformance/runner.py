"""Runs the checks in order on one backend.

::

    make ─► start ─► check … check ─► checks that close it ─► close
                       │
                       ├─ after each: cancel its requests, resume, restore the base weights
                       └─ if the backend died or hangs: make a new one and continue
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.testing.conformance.backend_under_test import BASE, SHORTEST_CONTEXT, BackendUnderTest
from jax_agent_rl.testing.conformance.check import CHECKS, Check
from jax_agent_rl.testing.conformance.probe import CheckFailed, DoesNotApply, Probe
from jax_agent_rl.testing.leaks import Footprint

_CLEAN_UP_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check.

    Attributes:
        check: the check's name.
        outcome: ``passed``, ``failed`` or ``skipped``.
        detail: why it failed or was skipped.
        seconds: its duration.
    """

    check: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of one backend."""

    backend: str
    results: tuple[Result, ...] = field(default_factory=tuple)

    def count(self, outcome: str) -> int:
        return sum(r.outcome == outcome for r in self.results)

    @property
    def ok(self) -> bool:
        return self.count("failed") == 0

    def to_json(self) -> dict:
        """Return the counts of each outcome and every result."""
        counts = {outcome: self.count(outcome) for outcome in ("passed", "failed", "skipped")}
        return {"backend": self.backend, **counts, "results": [asdict(r) for r in self.results]}


async def run_suite(
    subject: BackendUnderTest, *, only: Sequence[str] = (), say: Callable[[Result], None] | None = None
) -> Report:
    """Run the suite and close the backend.

    Args:
        subject: the backend under test.
        only: names of checks to run; empty for all.
        say: called with each result as it arrives.

    Raises:
        ConfigError: ``only`` names an unknown check, or the backend's context is too short for the suite.
        Exception: whatever the backend's ``start`` raises.
    """
    if unknown := sorted(set(only) - CHECKS.keys()):
        raise ConfigError(f"there are no checks {unknown}; there are {', '.join(CHECKS)}")
    checks = [c for c in CHECKS.values() if not only or c.name in only]
    return await _Run(subject, say).all(sorted(checks, key=lambda c: c.last))  # stable: in order of registration


class _Run:
    def __init__(self, subject: BackendUnderTest, say: Callable[[Result], None] | None) -> None:
        self._subject = subject
        self._say = say or (lambda result: None)
        self._numbers = itertools.count()
        self._footprint = Footprint.now()

    async def all(self, checks: Sequence[Check]) -> Report:
        backend = await self._start()
        results: list[Result] = []
        try:
            for check in checks:
                result, healthy = await self._one(check, backend)
                results.append(result)
                self._say(result)
                if not healthy:
                    await _quietly(backend.close())
                    if check is not checks[-1]:
                        backend = await self._start()
        finally:
            await _quietly(backend.close())
        return Report(backend=self._subject.name, results=tuple(results))

    async def _start(self) -> RolloutBackend:
        backend = self._subject.make()
        await backend.start()
        room = backend.capabilities.max_model_len
        if room < SHORTEST_CONTEXT:
            await backend.close()
            raise ConfigError(f"the suite needs max_model_len >= {SHORTEST_CONTEXT}, {self._subject.name} has {room}")
        return backend

    async def _one(self, check: Check, backend: RolloutBackend) -> tuple[Result, bool]:
        """Return the result, and whether the backend is still usable."""
        if missing := check.missing(backend.capabilities):
            return Result(check=check.name, outcome="skipped", detail=missing), True
        probe = Probe(self._subject, backend, numbers=self._numbers, footprint=self._footprint)
        begin = time.monotonic()
        outcome, detail = "passed", ""
        try:
            async with asyncio.timeout(self._subject.patience):
                await check.run(probe)
        except DoesNotApply as reason:
            outcome, detail = "skipped", str(reason)
        except CheckFailed as error:
            outcome, detail = "failed", str(error)
        except TimeoutError:
            outcome, detail = "failed", _hang(self._subject.patience)
        except Exception as error:  # the backend's own error is a failure like any other
            outcome, detail = "failed", _surprise(check, error)
        result = Result(check=check.name, outcome=outcome, detail=detail, seconds=time.monotonic() - begin)
        return result, not check.last and await self._restore(probe)

    async def _restore(self, probe: Probe) -> bool:
        """Return the backend to idle, resumed and on the base weights; False if that fails."""
        backend = probe.backend
        try:
            async with asyncio.timeout(_CLEAN_UP_SECONDS):
                await probe.clean_up()
                if backend.capabilities.pause_modes:
                    await backend.resume()
                if probe.serving != BASE:
                    await probe.serve(BASE)
                health = await backend.health()
                return health.ok and (health.running, health.waiting) == (0, 0) or await _drains(backend)
        except Exception:  # whatever failed, a fresh backend replaces this one
            return False


async def _drains(backend: RolloutBackend, seconds: float = 5.0) -> bool:
    """Whether cancelled requests leave the backend in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        health = await backend.health()
        if health.ok and (health.running, health.waiting) == (0, 0):
            return True
        await asyncio.sleep(0.02)
    return False


async def _quietly(closing) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLEAN_UP_SECONDS):
            await closing


def _hang(seconds: float) -> str:
    return str(
        CheckFailed(
            "the check ends",
            expected=f"an answer within {seconds:g} s",
            got="none",
            cause="a request or call hangs: a lost wake-up, a pause nobody ends, or a slot that is never freed",
        )
    )


def _surprise(check: Check, error: Exception) -> str:
    return str(
        CheckFailed(
            check.claim,
            expected="no error",
            got=f"{type(error).__name__}: {error}",
            cause="the backend refuses or fails something its Capabilities promise",
        )
    )
