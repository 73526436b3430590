"""The checks. Importing this package registers all of them, in the order below."""

from jax_agent_rl.conformance.checks import outputs, stops, batch, pictures, adapters, control, weights, life  # noqa: F401, I001
