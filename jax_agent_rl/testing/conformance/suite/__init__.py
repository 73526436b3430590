"""The checks: pytest tests of a :class:`~jax_agent_rl.testing.conformance.runner.BackendSession`.

The docstring of a check is the rule that it tests, which reports show.
"""
