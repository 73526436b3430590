"""The conformance suite: pytest tests that every rollout backend must pass.

A backend is a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`. The suite tests exactly what
its ``Capabilities`` declare. A :class:`BackendUnderTest` holds a factory for the backend, a
:class:`Reference` that gives correct log-probs, and payloads for weight updates.

>>> from jax_agent_rl.testing.conformance.runner import run_suite    # doctest: +SKIP
>>> report = run_suite(backend_under_test)                           # doctest: +SKIP
>>> print(report.count("passed"), report.count("failed"))            # doctest: +SKIP

::

    suite/      the checks
    runner      runs them, also as a command
    client      a check's client of the backend
    backends    the backends of this package
    models      model folders, weight updates, float64 forward passes
"""

from jax_agent_rl.testing.conformance.backends import BASE, MIXED, OTHER, BackendUnderTest
from jax_agent_rl.testing.conformance.models import Reference

__all__ = ["BASE", "MIXED", "OTHER", "BackendUnderTest", "Reference"]
