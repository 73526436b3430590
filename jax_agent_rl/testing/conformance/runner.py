"""``jax-agent-rl conformance``: runs the suite on a backend with pytest, and prints its report.

::

    make ─► start ─► check … check ─► close
                       │
                       ├─ after each: cancel its requests, resume, restore the base weights
                       └─ if that fails: close the backend; the next check starts a new one
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import itertools
import json
import os
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import Capabilities, RolloutBackend
from jax_agent_rl.testing.conformance.backends import (
    BASE,
    MIN_CONTEXT,
    BackendOptions,
    BackendUnderTest,
    select_backend,
)
from jax_agent_rl.testing.conformance.client import CheckClient, CheckFailed
from jax_agent_rl.testing.conformance.models import prepare_folders
from jax_agent_rl.testing.leaks import Footprint
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.text import printable

try:
    import pytest
except ImportError:
    raise ConfigError(
        f"the conformance suite runs on pytest: {install_command('conformance')}"
    ) from None

Check = Callable[[CheckClient], Awaitable[None]]
"""A check of the suite; its docstring states the rule."""
SUITE = Path(__file__).parent / "suite"
_FILES = ("outputs", "batching", "replay", "weights", "control")
"""The suite's files in order: the last test of the last file closes the backend."""
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
CLEAN_UP_SECONDS = 30.0
SETTLE_SECONDS = 5.0
_PYTEST_OPTIONS = (
    "-c",
    os.devnull,
    "--disable-plugin-autoload",
    "--noconftest",
    "--import-mode=importlib",
    "--capture=no",
    "-o",
    "truncation_limit_lines=0",
    "-o",
    "truncation_limit_chars=0",
    "-pno:cacheprovider",
    "-pno:faulthandler",
    "-pno:logging",
    "-pno:terminal",
    "-pno:warnings",
    # These collect garbage for seconds.
    "-pno:threadexception",
    "-pno:unraisableexception",
)
"""Options that keep pytest silent, and independent of the folder that the command runs in."""


def check(*needs: str) -> Callable[[Check], Callable[[BackendSession], None]]:
    """Make a pytest test of an async function whose docstring states a rule.

    Args:
        needs: :class:`Capabilities` fields that must be truthy, or the test is skipped;
            ``pause_modes:keep`` asks for a member.
    """

    def make_test(function: Check) -> Callable[[BackendSession], None]:
        @functools.wraps(function)
        def test(backend_session: BackendSession) -> None:
            backend_session.run(function, needs)

        del test.__wrapped__  # pytest would read the fixtures' names from its signature
        return test

    return make_test


class BackendSession(contextlib.AbstractContextManager["BackendSession"]):
    """A started backend that tests share; it is replaced if it dies or hangs, and closed on exit.

    Raises:
        ConfigError: on entry, if the backend's context is too short for the suite.
        Exception: on entry, whatever the backend's ``start`` raises.
    """

    def __init__(self, subject: BackendUnderTest) -> None:
        self._subject = subject
        self._loop = asyncio.Runner()
        self._numbers = itertools.count()
        self._footprint = Footprint.now()
        self._backend: RolloutBackend | None = None

    def __enter__(self) -> BackendSession:
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with self._loop:
            self._loop.run(self._close())

    def run(self, check: Check, needs: Sequence[str]) -> None:
        """Run a check, or skip it if the backend does not declare what it needs.

        Raises:
            AssertionError: the backend broke the rule, failed, or did not answer in time.
        """
        self._loop.run(self._run(check, needs))

    async def _run(self, check: Check, needs: Sequence[str]) -> None:
        backend = self._backend or await self._start()
        missing = _missing(backend.capabilities, needs)
        if missing:
            pytest.skip(missing)

        client = CheckClient(
            self._subject, backend, numbers=self._numbers, footprint=self._footprint
        )
        try:
            async with asyncio.timeout(self._subject.timeout):
                await check(client)
        except AssertionError:
            raise
        except TimeoutError:
            raise CheckFailed(
                "the check ends",
                expected=f"an answer within {self._subject.timeout:g} s",
                got="none",
                cause=(
                    "a request or call hangs: a lost wake-up, a pause that never ends, or a slot"
                    " that is never freed"
                ),
            ) from None
        except Exception as error:
            raise CheckFailed(
                str(check.__doc__),
                expected="no error",
                got=f"{type(error).__name__}: {error}",
                cause="the backend refuses or fails something its Capabilities promise",
            ) from error
        finally:
            if not await _restore(client):
                await self._close()

    async def _start(self) -> RolloutBackend:
        backend = self._subject.make()
        await backend.start()
        length = backend.capabilities.max_model_len
        if length < MIN_CONTEXT:
            await backend.close()
            raise ConfigError(
                f"the suite needs max_model_len >= {MIN_CONTEXT}, {self._subject.name} has {length}"
            )
        self._backend = backend
        return backend

    async def _close(self) -> None:
        backend = self._backend
        self._backend = None
        if backend is None:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                await backend.close()


def _missing(capabilities: Capabilities, needs: Sequence[str]) -> str | None:
    """Describe the first required capability that is not declared; None if all are."""
    for need in needs:
        name, _, member = need.partition(":")
        value = getattr(capabilities, name)
        if member and member not in value:
            return f"Capabilities.{name} does not hold {member!r}"
        if not member and not value:
            return f"Capabilities.{name} is {value}"
    return None


async def _restore(client: CheckClient) -> bool:
    """Return the backend to idle, resumed and on the base weights; False if that fails."""
    backend = client.backend
    try:
        async with asyncio.timeout(CLEAN_UP_SECONDS):
            await client.clean_up()
            health = await backend.health()
            if not health.ok:
                return False
            if backend.capabilities.pause_modes:
                await backend.resume()
            if client.serving != BASE:
                await client.serve(BASE)

            deadline = time.monotonic() + SETTLE_SECONDS
            while True:
                health = await backend.health()
                if not health.ok or time.monotonic() >= deadline:
                    return False
                if health.running == 0 and health.waiting == 0:
                    return True
                await asyncio.sleep(0.02)
    except Exception:  # whatever failed, a fresh backend replaces this one
        pass
    return False


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check.

    Attributes:
        check: the check's name, which is the name of its test in kebab case.
        claim: the rule that it tests.
        outcome: ``passed``, ``failed`` or ``skipped``.
        detail: why it failed or was skipped.
    """

    check: str
    claim: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of one backend."""

    backend: str
    results: tuple[Result, ...]

    def count(self, outcome: str) -> int:
        return len([result for result in self.results if result.outcome == outcome])

    @property
    def ok(self) -> bool:
        return self.count("failed") == 0

    def to_json(self) -> dict:
        """Return the counts of each outcome and every result."""
        counts = {outcome: self.count(outcome) for outcome in _STYLES}
        results = [asdict(result) for result in self.results]
        return {"backend": self.backend, **counts, "results": results}


def run_suite(
    subject: BackendUnderTest,
    *,
    only: Sequence[str] = (),
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Run the suite and close the backend.

    Args:
        only: names of checks to run; empty for all.
        on_result: called with each result as it arrives.

    Raises:
        ConfigError: ``only`` names an unknown check, or the backend's context is too short for the
            suite.
        Exception: whatever the backend's ``start`` raises.
    """
    plugin = _Plugin(subject, only, on_result)
    files = (str(SUITE / f"test_{name}.py") for name in _FILES)
    status = pytest.main([*_PYTEST_OPTIONS, f"--rootdir={SUITE}", *files], [plugin])
    if plugin.error:
        raise plugin.error
    if status == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")
    return Report(backend=subject.name, results=tuple(plugin.results))


class _Plugin:
    """Provides the tests with the backend, and collects their results."""

    def __init__(
        self,
        subject: BackendUnderTest,
        only: Sequence[str],
        on_result: Callable[[Result], None] | None,
    ) -> None:
        self._subject = subject
        self._only = only
        self._on_result = on_result
        self.results: list[Result] = []
        self.error: Exception | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.error = RuntimeError(report.longreprtext)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = {_check_name(item): item for item in items}
        unknown = sorted(set(self._only) - tests.keys())
        if unknown:
            self.error = ConfigError(f"there are no checks {unknown}; there are {', '.join(tests)}")
        selected = []
        for name, item in tests.items():
            if not self._only or name in self._only:
                selected.append(item)
        items[:] = selected

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        with contextlib.ExitStack() as stack:
            if self.error is None:
                try:
                    self._backend_session = stack.enter_context(BackendSession(self._subject))
                except Exception as error:  # run_suite raises it
                    self.error = error
            if self.error:
                session.items.clear()
            return (yield)

    @pytest.fixture
    def backend_session(self) -> BackendSession:
        return self._backend_session

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str]:
        expected = f"{op} {right!r}"
        if op in ("==", "is"):
            expected = repr(right)
        return ["", f"expected: {expected}", f"got:      {left!r}"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call":
            detail = ""
            if call.excinfo:
                detail = _explain(call.excinfo)
            result = Result(
                check=_check_name(item),
                claim=item.obj.__doc__,  # type: ignore[attr-defined]
                outcome=report.outcome,
                detail=detail,
                seconds=call.duration,
            )
            self.results.append(result)
            if self._on_result:
                self._on_result(result)
        return report


def _check_name(item: pytest.Item) -> str:
    return item.name.removeprefix("test_").replace("_", "-")


def _explain(failure: pytest.ExceptionInfo) -> str:
    """Describe a failure: what was asserted and expected, the result, and the likely cause."""
    cause, _, comparison = str(failure.value).partition("\nassert \n")
    if not comparison:  # not an assertion of the suite
        return str(failure.value)
    (statement,) = ast.parse(textwrap.dedent(str(failure.traceback[-1].statement))).body
    asserted = "an assertion"
    if isinstance(statement, ast.Assert):
        asserted = ast.unparse(statement.test)
    return f"{asserted}\n{comparison}\n  likely:   {cause}"


# --- the command ----------------------------------------------------------------------------------


def run_command(
    backend: str,
    *,
    model: Path | None,
    only: Sequence[str],
    as_json: bool,
    console: Console,
    **options: Any,
) -> Report:
    """Run the suite on a backend and print the report.

    Args:
        backend: a name in :data:`~jax_agent_rl.testing.conformance.backends.BACKENDS`, or
            ``module:function``.
        model: model folder; None for a tiny random one.
        only: names of checks to run; empty for all.
        as_json: whether to print one JSON object as the last line.
        console: where the report is printed.
        options: fields of :class:`~jax_agent_rl.testing.conformance.backends.BackendOptions`.

    Raises:
        ConfigError: the backend is not available.
    """
    with (
        tempfile.TemporaryDirectory(prefix="conformance-") as scratch,
        console.status("preparing") as status,
    ):
        folders = prepare_folders(model, Path(scratch))
        subject = select_backend(backend, BackendOptions(folders=folders, **options))
        report = run_suite(
            subject,
            only=only,
            on_result=lambda result: status.update(f"{result.check}: {result.outcome}"),
        )
    _print_report(report, console)
    if as_json:
        print(json.dumps(report.to_json()))
    return report


def _print_report(report: Report, console: Console) -> None:
    """Print one row per check, then each failure in detail."""
    table = Table(title=f"conformance of {report.backend}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("rule, or why it was skipped")

    for result in report.results:
        note = result.claim
        if result.outcome == "skipped":
            note = result.detail

        style = _STYLES[result.outcome]
        table.add_row(
            result.check,
            f"[{style}]{result.outcome}[/]",
            f"{result.seconds:.1f}",
            escape(printable(note)),
        )

    console.print(table)
    for result in report.results:
        if result.outcome == "failed":
            console.print(
                f"[bold red]{result.check}[/]: {escape(printable(result.detail))}\n",
                highlight=False,
            )

    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in _STYLES)
    console.print(f"{report.backend}: {counts}", highlight=False)
