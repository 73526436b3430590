"""The ``certify`` command: a line for each check as it ends, then the report."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.certify import Check, run_checks, select_checks
from jax_agent_rl.deploy.certify.machine import Machine, load_config
from jax_agent_rl.deploy.certify.page import as_json, deviations, write
from jax_agent_rl.deploy.certify.results import CheckOutcome, CheckResult
from jax_agent_rl.observe.progress import duration, print_line
from jax_agent_rl.runtime import use_compilation_cache
from jax_agent_rl.runtime.multihost import initialize
from jax_agent_rl.runtime.policy import with_resolved_model

_STYLES = {
    CheckOutcome.AS_CLAIMED: "green",
    CheckOutcome.MEASURED: "green",
    CheckOutcome.DEVIATES: "bold red",
    CheckOutcome.FAILED: "bold red",
    CheckOutcome.NOT_RUN: "yellow",
}


def run_command(
    file: Path | None, overrides: Sequence[str], *, only: Sequence[str], out: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    """Certify this machine, print and write the report, and return it.

    Args:
        file: a run's configuration; None for the quickstart's model and task.
        overrides: ``key=value``.
        only: names of checks; empty for all.
        out: folder of the report.
        arguments: the command line, for the report.

    Raises:
        ConfigError: the configuration is wrong, or there is no such check.
        StorageError: the report cannot be written.
    """
    checks = select_checks(only)
    use_compilation_cache()
    with tempfile.TemporaryDirectory(prefix="jax_agent_rl-certify-") as folder:
        scratch = Path(folder)
        config = load_config(file, overrides, scratch, devices=1)
        host = initialize(config.learner.multihost)
        if file is None and jax.default_backend() != "cpu":  # whose simulated devices share its cores
            config = load_config(file, overrides, scratch, devices=jax.device_count())
        # The lines of the training run are not shown, so its warnings would stand alone.
        logging.getLogger("jax_agent_rl.agents").setLevel(logging.ERROR)
        report, made = {}, ()
        name = "certify" if host == 0 else f"certify-host-{host}"
        console, command = Console(), shlex.join(arguments)
        # Written after every check, as a machine may end the process: the report then says before which one.
        for report in certify(with_resolved_model(config), checks, scratch, console, command=command):
            made = write(report, out, name=name)
    print_line(console, f"{report['verdict']}; report: {', '.join(map(str, made))}")
    return report


def certify(
    config: Config,
    checks: Sequence[Check],
    scratch: Path,
    console: Console,
    *,
    command: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """Run checks, print a line for each, and yield the report so far after each.

    Args:
        config: the resolved configuration.
        checks: what to run.
        scratch: folder for what they write.
        console: takes the lines.
        command: the command line, for the report.
        clock: seconds of a monotonic clock.
    """
    machine, date, begin = Machine(config, scratch, clock=clock), datetime.now(UTC), clock()
    about = machine.describe()
    console.print(
        f"{about['devices']} x {about['device']} ({about['platform']}), {about['model']}: {len(checks)} checks",
        highlight=False,
    )
    results = []
    for result in run_checks(machine, checks):
        results.append(result)
        _print_result(result, console)
        yield as_json(
            results,
            unfinished=[check.name for check in checks[len(results) :]],
            machine=about,
            command=command,
            date=date.isoformat(timespec="seconds"),
            seconds=clock() - begin,
        )


def _print_result(result: CheckResult, console: Console) -> None:
    """Print a check's line, and one for each deviation with the claim that it concerns."""
    line = Text(f"{result.outcome:<10}  ", style=_STYLES[result.outcome])
    line.append(f"{result.name}: ", style="bold")
    line.append(f"{len(result.measurements)} measured in {duration(result.seconds)}", style="default")
    reasons = [result.reason] if result.outcome is CheckOutcome.NOT_RUN else []
    if len(result.left_out) > 1:
        reasons.append(f"{len(result.left_out)} parts were not run, see the report")
    else:
        reasons += [f"without {part}" for part in result.left_out]
    line.append("".join(f"; {text}" for text in reasons))
    console.print(line, soft_wrap=True)
    for text, claim in deviations([result.to_json()]):
        print_line(console, f"    {text}\n        concerns {claim['page']}: “{claim['text']}”")
