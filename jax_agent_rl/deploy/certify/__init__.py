"""``jax-agent-rl certify``: measures a machine and compares it with what the documentation claims.

``machine`` the configuration, the devices and a run's parts on them · ``kernels``, ``speed``, ``system`` the checks ·
``results`` what they return · ``page`` the report as JSON and HTML.

A check that raises is a result, and ends no other. With several hosts, each runs the checks of its own devices;
exchanges and the training run are of all hosts together, in the same order everywhere.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.deploy.certify import kernels, speed, system
from jax_agent_rl.deploy.certify.machine import Machine
from jax_agent_rl.deploy.certify.results import CheckOutcome, CheckResult, Claim, NotRunError, Recorder
from jax_agent_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name, title: for ``--only``, and for people.
        run: records measurements, or raises.
        claim: of the documentation; measurements may name others.
        seconds: budget, see :meth:`Recorder.has_time`.
    """

    name: str
    title: str
    run: Callable[[Machine, Recorder], None]
    claim: Claim
    seconds: float


CHECKS = (
    Check(
        name="collectives",
        title="Exchanges between devices",
        run=system.check_collectives,
        claim=system.COLLECTIVES,
        seconds=60,
    ),
    Check(
        name="kernels",
        title="Kernels against float64",
        run=kernels.check_kernels,
        claim=kernels.CLAIM,
        seconds=240,
    ),
    Check(
        name="conformance",
        title="Backends against the protocol",
        run=system.check_conformance,
        claim=system.CONFORMANCE,
        seconds=120,
    ),
    Check(name="peaks", title="Peaks of the device", run=speed.check_peaks, claim=speed.PEAKS, seconds=20),
    Check(
        name="speed",
        title="Speed beside plan and peaks",
        run=speed.check_speed,
        claim=speed.IDEAL,
        seconds=120,
    ),
    Check(name="memory", title="Memory beside plan", run=speed.check_memory, claim=speed.MEMORY, seconds=30),
    Check(
        name="agreement",
        title="Engine and learner, per precision",
        run=system.check_agreement,
        claim=system.AGREEMENT,
        seconds=150,
    ),
    Check(
        name="checkpoint",
        title="Checkpoint written and restored",
        run=system.check_checkpoint,
        claim=system.CHECKPOINT,
        seconds=60,
    ),
    Check(
        name="training",
        title="A short training run",
        run=system.check_training,
        claim=system.ACCOUNTING,
        seconds=120,
    ),
)
"""In order: what needs the devices to itself comes before the learner is built, the training run when it is gone."""


def select_checks(only: Collection[str]) -> list[Check]:
    """Return the checks of these names; all without any.

    Raises:
        ConfigError: there is no check of a name.
    """
    names = [check.name for check in CHECKS]
    if unknown := sorted(set(only) - set(names)):
        raise ConfigError(f"--only {' '.join(unknown)}: there is no such check; there are {', '.join(names)}")
    return [check for check in CHECKS if not only or check.name in only]


def run_checks(machine: Machine, checks: Collection[Check]) -> Iterator[CheckResult]:
    """Run checks one after the other, and yield each result."""
    for check in checks:
        record = Recorder(seconds=check.seconds, claim=check.claim, clock=machine.clock)
        begin, reason = machine.clock(), ""
        try:
            check.run(machine, record)
        except NotRunError as error:
            outcome, reason = CheckOutcome.NOT_RUN, str(error)
        except Exception as error:  # whatever this machine does to it: the other checks still run
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.name}, line {where.lineno} of {Path(where.filename).name}"
            outcome, reason = CheckOutcome.FAILED, f"{type(error).__name__}: {error} ({place})"
        else:
            limited = [one for one in record.measurements if one.limited]
            outcome = CheckOutcome.AS_CLAIMED if limited else CheckOutcome.MEASURED
            if any(one.deviates for one in record.measurements):
                outcome = CheckOutcome.DEVIATES
        yield CheckResult(
            name=check.name,
            title=check.title,
            outcome=outcome,
            claim=check.claim,
            reason=reason,
            seconds=machine.clock() - begin,
            measurements=record.measurements,
            left_out=record.left_out,
        )
