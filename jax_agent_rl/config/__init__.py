"""The configuration: one frozen tree, loaded from YAML plus ``a.b=c`` overrides.

``load("configs/quickstart.yaml", ["learner.learning_rate=1e-5"])`` returns a :class:`Config` or
raises one :class:`~jax_agent_rl.errors.ConfigError` that lists *every* problem with its path and,
for an unknown key, the nearest valid name. Every key is read somewhere; a key that does nothing
must not exist.

Modules::

    run                            the root, what its keys imply, load
    commands, roots                the roots of other commands; which command a file is for
    task, agent, server_tool, endpoint, command_agent, rollout, engines, algorithm, kl, learner,
    trainer                        the sections; task: model, data, reward, tools; kl: and distill
    checks                         checks across sections; a section's file checks itself
    default_agent                  the agent loop of rows that name none
    base                           what sections consist of, and the conditions of keys
    loading, recipes               YAML files, overrides, and recipes by name
    reference                      the documentation of all keys
    resume                         which keys a resumed run may change
    overrides_script, from_verl, verl_keys
                                   configurations imported from verl
"""

from jax_agent_rl.config.agent import AgentConfig, ToolFormatName
from jax_agent_rl.config.algorithm import AlgorithmConfig, CriticConfig
from jax_agent_rl.config.endpoint import EndpointConfig
from jax_agent_rl.config.engines import (
    EngineMeshConfig,
    JetStreamConfig,
    SglangConfig,
    VllmConfig,
)
from jax_agent_rl.config.kl import DistillConfig, KLConfig, TeacherConfig
from jax_agent_rl.config.learner import LearnerConfig, LoraConfig, MeshConfig, MultihostConfig
from jax_agent_rl.config.rollout import RolloutConfig
from jax_agent_rl.config.run import Config, build, load
from jax_agent_rl.config.server_tool import ServerToolConfig
from jax_agent_rl.config.task import (
    DataConfig,
    DataSource,
    EnvironmentsConfig,
    InteractionsConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
    SearchConfig,
    ToolClientConfig,
    ToolsConfig,
)
from jax_agent_rl.config.trainer import TraceConfig, TrainerConfig

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DataSource",
    "DistillConfig",
    "EndpointConfig",
    "EngineMeshConfig",
    "EnvironmentsConfig",
    "InteractionsConfig",
    "JetStreamConfig",
    "JudgeConfig",
    "KLConfig",
    "LearnerConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "MultihostConfig",
    "RewardConfig",
    "RolloutConfig",
    "SearchConfig",
    "ServerToolConfig",
    "SglangConfig",
    "TeacherConfig",
    "ToolClientConfig",
    "ToolFormatName",
    "ToolsConfig",
    "TraceConfig",
    "TrainerConfig",
    "VllmConfig",
    "build",
    "load",
]
