"""Rewards.

``registry`` finds the function of a row's ``data_source`` and its arguments · ``scoring`` calls it · ``rules`` and
``code`` built-in functions · ``judge`` a model as judge, and a reward server · ``workers`` processes that can be
killed.
"""

from jax_agent_rl.rewards import code as _code  # registers its functions, like judge and rules
from jax_agent_rl.rewards.judge import ModelJudge, RemoteReward
from jax_agent_rl.rewards.registry import load_rewards, register_reward, require_rewards
from jax_agent_rl.rewards.rules import boxed, has_format, tagged
from jax_agent_rl.rewards.scoring import score, solution_text

__all__ = [
    "ModelJudge",
    "RemoteReward",
    "boxed",
    "has_format",
    "load_rewards",
    "register_reward",
    "require_rewards",
    "score",
    "solution_text",
    "tagged",
]

del _code
