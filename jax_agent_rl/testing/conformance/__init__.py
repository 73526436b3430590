"""The conformance suite: checks that every :class:`~jax_agent_rl.rollout.protocol.RolloutBackend` must pass.

``run_suite(subject)`` checks exactly what the backend's ``Capabilities`` declare. A :class:`BackendUnderTest` holds a
factory for the backend, a :class:`Reference` that gives correct log-probs, and payloads for weight updates;
:mod:`~jax_agent_rl.testing.conformance.subjects` builds one for each backend of this package from a model folder.

>>> report = asyncio.run(run_suite(subject))                         # doctest: +SKIP
>>> print(report.count("passed"), report.count("failed"))            # doctest: +SKIP

``backend_under_test`` the suite's input · ``subjects`` the backends of this package · ``models`` model folders and
weight updates · ``reference`` float64 forward passes · ``probe`` a check's access to the backend · ``check`` the
registry · ``checks/`` the rules · ``runner`` · ``command`` the command line.
"""

import jax_agent_rl.testing.conformance.checks  # noqa: F401  (registers the checks)
from jax_agent_rl.testing.conformance.backend_under_test import BASE, MIXED, OTHER, BackendUnderTest
from jax_agent_rl.testing.conformance.check import CHECKS
from jax_agent_rl.testing.conformance.probe import CheckFailed
from jax_agent_rl.testing.conformance.reference import Reference
from jax_agent_rl.testing.conformance.runner import Report, Result, run_suite

__all__ = [
    "BASE",
    "CHECKS",
    "MIXED",
    "OTHER",
    "CheckFailed",
    "Reference",
    "Report",
    "Result",
    "BackendUnderTest",
    "run_suite",
]
