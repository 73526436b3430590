"""Rewards.

``registry`` finds the function of a row's ``data_source`` · ``arguments`` what it may request · ``scoring`` calls it ·
``rules, qa, code`` built-in functions, and what they extract answers with · ``judge`` a model as judge · ``remote`` a
reward server · ``workers, worker`` processes that can be killed, and their program.
"""

from jax_agent_rl.rewards import code as _code  # these register the built-in functions
from jax_agent_rl.rewards import qa as _qa
from jax_agent_rl.rewards.judge import ModelJudge
from jax_agent_rl.rewards.registry import load_rewards, register_reward, require_rewards, services_asked_for
from jax_agent_rl.rewards.remote import RemoteReward
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
    "services_asked_for",
    "solution_text",
    "tagged",
]

del _code, _qa
