"""Findings of checks, and how checks run: one that fails, raises or hangs is a line of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from jax_agent_rl.errors import ConfigError, JaxAgentRLError


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """The run may start; read it."""
    FAIL = "fail"
    """The run would not start, or not do what it is meant to."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check.

    Attributes:
        check: what was looked at.
        status: how bad it is.
        text: what was found; where it is not ok, with what to do.
    """

    check: str
    status: Status
    text: str


@dataclass(frozen=True)
class Reporter:
    """Factory of one check's findings."""

    check: str

    def ok(self, text: str) -> Finding:
        return Finding(check=self.check, status=Status.OK, text=text)

    def warn(self, text: str) -> Finding:
        return Finding(check=self.check, status=Status.WARN, text=text)

    def fail(self, text: str) -> Finding:
        return Finding(check=self.check, status=Status.FAIL, text=text)


class UnmetError(Exception):
    """A check lacks what an earlier one should have found."""


Check = Callable[[Reporter], Awaitable[Iterable[Finding]]]
"""A check returns its findings; whatever it raises is a finding, too."""


async def run_checks(checks: Iterable[tuple[str, Check]], *, timeout: float) -> AsyncIterator[Finding]:
    """Yield findings in the order of the checks.

    Args:
        checks: each with its name.
        timeout: seconds one may take.
    """
    for name, check in checks:
        report = Reporter(name)
        try:
            async with asyncio.timeout(timeout):
                findings = list(await check(report))
        except UnmetError as error:
            findings = [report.warn(f"not checked: {error}")]
        except ConfigError as error:
            findings = [report.fail(problem) for problem in error.problems]
        except JaxAgentRLError as error:
            findings = [report.fail(str(error))]
        except TimeoutError:
            findings = [report.fail(f"no answer within {timeout:g} s")]
        except Exception as error:  # of the user's code, or of the machine: told, and the other checks go on
            findings = [report.fail(f"{type(error).__name__}: {error}")]
        for finding in findings:
            yield finding
