"""Long runs under injected faults; ``jax-agent-rl chaos``."""
