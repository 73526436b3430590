"""Conformance: one suite of checks that every :class:`~jax_agent_rl.rollout.protocol.RolloutBackend` has to pass.

``run_suite(subject)`` runs what the backend's ``Capabilities`` promise. A :class:`BackendUnderTest` is a way to build
the backend, right answers (a :class:`Reference`), and payloads for weight updates;
:mod:`~jax_agent_rl.testing.conformance.subjects` makes them for the backends of this package from a model folder.

>>> report = asyncio.run(run_suite(subject))                         # doctest: +SKIP
>>> print(report.count("passed"), report.count("failed"))            # doctest: +SKIP

``check`` what a check is · ``checks/`` the rules · ``probe`` a check's tools · ``runner`` · ``report`` · ``reference``
right answers · ``models`` model folders to test with · ``updates`` weights with their probe · ``subjects`` the backends
of this package · ``served`` a backend behind a server of its own · ``footprint`` threads and processes.
"""

from jax_agent_rl.testing.conformance.check import CHECKS, CheckFailed
from jax_agent_rl.testing.conformance.reference import Reference
from jax_agent_rl.testing.conformance.runner import Report, Result, run_suite
from jax_agent_rl.testing.conformance.subject import BASE, MIXED, OTHER, BackendUnderTest

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
