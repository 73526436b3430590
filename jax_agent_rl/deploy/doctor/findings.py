"""Findings of checks, and how checks run: one that fails, raises or hangs is a finding, and hides no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
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
        check: name of the check.
        status: severity.
        text: what was found and, unless ok, what to do.
    """

    check: str
    status: Status
    text: str


@dataclass(frozen=True)
class Reporter:
    """The findings of one check."""

    check: str
    findings: list[Finding] = field(default_factory=list)

    def ok(self, text: str) -> None:
        self.add(Status.OK, text)

    def warn(self, text: str) -> None:
        self.add(Status.WARN, text)

    def fail(self, text: str) -> None:
        self.add(Status.FAIL, text)

    def add(self, status: Status, text: str) -> None:
        self.findings.append(Finding(check=self.check, status=status, text=text))


class UnmetError(Exception):
    """A check lacks what an earlier one should have found."""


Check = Callable[[Reporter], Awaitable[None]]
"""Reports its findings; whatever it raises is reported, too."""


async def run_checks(checks: Iterable[tuple[str, Check]], *, timeout: float) -> AsyncIterator[Finding]:
    """Yield findings in the order of the named checks, each of which may take ``timeout`` seconds."""
    for name, check in checks:
        report = Reporter(name)
        try:
            async with asyncio.timeout(timeout):
                await check(report)
        except UnmetError as error:
            report.warn(f"not checked: {error}")
        except ConfigError as error:
            for problem in error.problems:
                report.fail(problem)
        except JaxAgentRLError as error:
            report.fail(str(error))
        except TimeoutError:
            report.fail(f"no answer within {timeout:g} s")
        except Exception as error:  # raised by the user's code or the machine; the other checks still run
            report.fail(f"{type(error).__name__}: {error}")
        for finding in report.findings:
            yield finding
