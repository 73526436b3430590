"""Environments: worlds a policy lives in, turn by turn.

``base`` the interface, and environments by name · ``pool`` instances, their limits and end · ``environment_tool`` tools
that lease one · ``users`` simulated users · ``reasoning_gym``, ``textworld``, ``verifiers`` adapters; each imports
its package when it is first used.
"""

from jax_agent_rl.environments import reasoning_gym as _reasoning_gym  # these register the adapters
from jax_agent_rl.environments import textworld as _textworld
from jax_agent_rl.environments import verifiers as _verifiers
from jax_agent_rl.environments.base import (
    Environment,
    Observation,
    get_environment,
    in_thread,
    load_environments,
    register_environment,
    require_environments,
    row_environment,
)
from jax_agent_rl.environments.environment_tool import EnvironmentTool, environment_tool
from jax_agent_rl.environments.pool import EnvironmentPool, EnvironmentPools, LeasedEnvironment

__all__ = [
    "Environment",
    "EnvironmentPool",
    "EnvironmentPools",
    "EnvironmentTool",
    "LeasedEnvironment",
    "Observation",
    "row_environment",
    "environment_tool",
    "get_environment",
    "in_thread",
    "load_environments",
    "register_environment",
    "require_environments",
]

del _reasoning_gym, _textworld, _verifiers
