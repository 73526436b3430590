"""``jax-agent-rl certify``: runs the checks, and prints and writes what they find."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.certify import kernels, speed, system
from jax_agent_rl.deploy.certify.machine import Machine, NotRunError, load_config
from jax_agent_rl.deploy.certify.report import (
    Check,
    CheckOutcome,
    CheckResult,
    as_json,
    deviations,
    write,
)
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.progress import duration, print_line
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.runtime.multihost import initialize
from jax_agent_rl.runtime.policy import with_resolved_model
from jax_agent_rl.utils.text import counted, printable

CHECKS = (
    Check(
        "collectives", "Exchanges between devices", system.check_collectives, system.COLLECTIVES, 60
    ),
    Check("kernels", "Kernels against float64", kernels.check_kernels, kernels.CLAIM, 240),
    Check(
        "conformance",
        "Backends against the protocol",
        system.check_conformance,
        system.CONFORMANCE,
        120,
    ),
    Check("peaks", "Peaks of the device", speed.check_peaks, speed.PEAKS, 20),
    Check("speed", "Speed beside plan and peaks", speed.check_speed, speed.IDEAL, 120),
    Check("memory", "Memory beside plan", speed.check_memory, speed.MEMORY, 30),
    Check(
        "agreement",
        "Engine and learner, per precision",
        system.check_agreement,
        system.AGREEMENT,
        150,
    ),
    Check(
        "checkpoint",
        "Checkpoint written and restored",
        system.check_checkpoint,
        system.CHECKPOINT,
        60,
    ),
    Check("training", "A short training run", system.check_training, system.ACCOUNTING, 120),
)
"""Checks in order: first the ones that need the devices to themselves, then the ones with a
learner, and the training run."""

_STYLES = {
    CheckOutcome.AS_CLAIMED: "green",
    CheckOutcome.MEASURED: "green",
    CheckOutcome.DEVIATES: "bold red",
    CheckOutcome.FAILED: "bold red",
    CheckOutcome.NOT_RUN: "yellow",
}


def run_command(
    file: Path | None,
    overrides: Sequence[str],
    *,
    only: Sequence[str],
    out: Path,
    arguments: Sequence[str],
    console: Console,
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
        # The devices of CPUs are simulated and share the cores: one is enough.
        if file is None and jax.default_backend() != "cpu":
            config = load_config(file, overrides, scratch, devices=jax.device_count())
        # The lines of the training run are not shown, so its warnings would stand alone.
        logging.getLogger("jax_agent_rl.agents").setLevel(logging.ERROR)

        report: dict[str, Any] = {}
        written: tuple[Path, ...] = ()
        name = "certify" if host == 0 else f"certify-host-{host}"
        command = shlex.join(arguments)
        # Written after every check, as a machine may end the process: the report then says before
        # which check.
        for report in _certify(with_resolved_model(config), checks, scratch, console, command):
            written = write(report, out, name=name)
    print_line(console, f"{report['verdict']}; report: {', '.join(map(str, written))}")
    return report


def select_checks(only: Collection[str]) -> list[Check]:
    """Return the checks of these names; all without any.

    Raises:
        ConfigError: there is no check of a name.
    """
    names = [check.name for check in CHECKS]
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise ConfigError(
            f"--only {' '.join(unknown)}: there is no such check; there are {', '.join(names)}"
        )
    if not only:
        return list(CHECKS)
    return [check for check in CHECKS if check.name in only]


def _certify(
    config: Config, checks: Sequence[Check], scratch: Path, console: Console, command: str
) -> Iterator[dict[str, Any]]:
    """Run checks, print a line for each, and yield the report so far after each."""
    machine = Machine(config, scratch, clock=time.perf_counter)
    date = datetime.now(UTC)
    start_time = time.perf_counter()
    description = machine.describe()
    console.print(
        f"{description['devices']} x {description['device']} ({description['platform']}),"
        f" {description['model']}: {counted(len(checks), 'check')}",
        highlight=False,
    )

    results: list[CheckResult] = []
    for result in run_checks(machine, checks):
        results.append(result)
        _print_result(result, console)
        yield as_json(
            results,
            unfinished=[check.name for check in checks[len(results) :]],
            machine=description,
            command=command,
            date=date.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - start_time,
        )


def run_checks(machine: Machine, checks: Collection[Check]) -> Iterator[CheckResult]:
    """Run checks one after the other, and yield each result."""
    for check in checks:
        result = CheckResult(check=check, clock=machine.clock)
        try:
            check.run(machine, result)
            result.outcome = _outcome(result)
        except NotRunError as error:
            result.outcome = CheckOutcome.NOT_RUN
            result.reason = str(error)
        except Exception as error:  # whatever this machine does to it: the other checks still run
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.name}, line {frame.lineno} of {Path(frame.filename).name}"
            result.outcome = CheckOutcome.FAILED
            result.reason = f"{type(error).__name__}: {error} ({place})"
        result.seconds = machine.clock() - result.begin
        yield result


def _outcome(result: CheckResult) -> CheckOutcome:
    """Return the outcome of a check that ran to its end."""
    if any(measurement.deviates for measurement in result.measurements):
        return CheckOutcome.DEVIATES
    if any(measurement.limited for measurement in result.measurements):
        return CheckOutcome.AS_CLAIMED
    return CheckOutcome.MEASURED


def _print_result(result: CheckResult, console: Console) -> None:
    """Print a check's line, and one for each deviation with the claim that it concerns."""
    line = Text(f"{result.outcome:<10}  ", style=_STYLES[result.outcome])
    line.append(f"{result.check.name}: ", style="bold")
    line.append(
        f"{len(result.measurements)} measured in {duration(result.seconds)}", style="default"
    )
    if result.outcome is CheckOutcome.NOT_RUN:
        line.append(f"; {printable(result.reason)}")
    if len(result.left_out) > 1:
        line.append(f"; {len(result.left_out)} parts were not run, see the report")
    elif result.left_out:
        line.append(f"; without {printable(result.left_out[0])}")
    console.print(line, soft_wrap=True)
    for text, claim in deviations([result.to_json()]):
        print_line(console, f"    {text}\n        concerns {claim['page']}: “{claim['text']}”")
