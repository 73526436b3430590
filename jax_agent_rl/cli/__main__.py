"""``python -m jax_agent_rl.cli``."""

from jax_agent_rl.cli import main

main()
