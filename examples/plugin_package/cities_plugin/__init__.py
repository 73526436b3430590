"""One of everything that a package can add to jax_agent_rl; ``pyproject.toml`` gives each its name.

Nothing is imported here: what runs agents must not import jax, and what learns needs no tools.
"""
