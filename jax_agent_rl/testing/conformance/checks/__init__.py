"""The checks. Importing this package registers all of them, in the order below."""

from jax_agent_rl.testing.conformance.checks import outputs, stops, batch, images, adapters, control, weights  # noqa: F401, I001
