"""Runs the checks one after the other on one backend.

::

    make ─► start ─► check … check ─► checks that close it ─► close
                       │
                       ├─ after each: cancel what it left, resume, put the base weights back
                       └─ the backend died or hangs: a new one is made, the suite goes on
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
from jax_agent_rl.testing.conformance.check import CHECKS, Check, CheckFailed, DoesNotApply
from jax_agent_rl.testing.conformance.footprint import Footprint
from jax_agent_rl.testing.conformance.probe import Probe
from jax_agent_rl.testing.conformance.subject import BASE, SHORTEST_CONTEXT, BackendUnderTest

_CLEAN_UP_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one check.

    Attributes:
        check: its name.
        outcome: ``passed``, ``failed`` or ``skipped``.
        detail: why it failed or was skipped.
        seconds: how long it took.
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
        """``passed``, ``failed`` and ``skipped`` counts, and every result."""
        counts = {outcome: self.count(outcome) for outcome in ("passed", "failed", "skipped")}
        return {"backend": self.backend, **counts, "results": [asdict(r) for r in self.results]}


async def run_suite(
    subject: BackendUnderTest, *, only: Sequence[str] = (), say: Callable[[Result], None] | None = None
) -> Report:
    """Runs the suite (or the checks named in ``only``) and closes the backend.

    Args:
        subject: what is tested.
        only: names of checks; empty for all.
        say: called with each result as it comes.

    Raises:
        ConfigError: ``only`` names no check, or the backend's context is too short for the suite.
        Exception: whatever the backend's ``start`` raises: without a start there is nothing to test.
    """
    run = _Run(subject, say)
    return await run.all(_chosen(only))


def _chosen(only: Sequence[str]) -> list[Check]:
    import jax_agent_rl.testing.conformance.checks  # noqa: F401  (registers them)

    if unknown := sorted(set(only) - CHECKS.keys()):
        raise ConfigError(f"there are no checks {unknown}; there are {', '.join(CHECKS)}")
    wanted = [c for c in CHECKS.values() if not only or c.name in only]
    return sorted(wanted, key=lambda c: c.last)  # stable: the order of registration otherwise


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
        """The result, and whether the backend can be used further."""
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
        except Exception as error:  # the backend's own: a finding like any other
            outcome, detail = "failed", _surprise(check, error)
        result = Result(check=check.name, outcome=outcome, detail=detail, seconds=time.monotonic() - begin)
        return result, not check.last and await self._restore(probe)

    async def _restore(self, probe: Probe) -> bool:
        """Brings the backend back to idle, resumed and on the base weights; False if it cannot be."""
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
        except Exception:  # whatever it is, a fresh backend is the answer
            return False


async def _drains(backend: RolloutBackend, seconds: float = 5.0) -> bool:
    """Whether cancelled requests leave within a few seconds."""
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
