"""What the configuration's keys mean, for people and editors: ``jax-agent-rl config``.

All of it is derived from the models in :mod:`jax_agent_rl.config`; nothing about a key is said twice.
"""
