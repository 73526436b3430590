"""The checks: pytest tests of one :class:`~jax_agent_rl.testing.conformance.runner.BackendSession`."""
