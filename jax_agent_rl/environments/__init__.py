"""Environments: worlds a policy lives in, turn by turn.

``base`` the interface, environments by name, and pools of them · ``snapshots`` their states between
turns · ``environment_tool`` tools that lease one · ``users`` simulated users · ``calls`` tools of
an episode · ``adapters`` reasoning-gym and TextWorld · ``verifiers`` its tasksets · ``openenv``,
``nemo_gym`` servers of environments, by ``server_session``.
"""

from jax_agent_rl.environments import adapters as _adapters  # these register environments
from jax_agent_rl.environments import nemo_gym as _nemo_gym
from jax_agent_rl.environments import openenv as _openenv
from jax_agent_rl.environments import verifiers as _verifiers
from jax_agent_rl.environments.base import (
    Environment,
    EnvironmentPool,
    EnvironmentPools,
    LeasedEnvironment,
    Observation,
    get_environment,
    in_thread,
    load_environments,
    register_environment,
    require_environment,
    row_environment,
)
from jax_agent_rl.environments.environment_tool import EnvironmentTool, environment_tool

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
    "require_environment",
]

del _adapters, _nemo_gym, _openenv, _verifiers
