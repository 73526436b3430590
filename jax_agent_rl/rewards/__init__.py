"""Rewards.

``registry`` finds the function of a row's ``data_source`` · ``arguments`` what it may ask for · ``scoring`` calls it ·
``rules, qa, mathematics, code`` functions that come registered · ``text`` what they are built from · ``judge`` another
model's opinion · ``remote`` a reward server · ``workers`` helper processes.
"""

from jax_agent_rl.rewards import code as _code  # these register the built-in functions
from jax_agent_rl.rewards import mathematics as _mathematics
from jax_agent_rl.rewards import qa as _qa
from jax_agent_rl.rewards import rules as _rules
from jax_agent_rl.rewards.judge import ModelJudge
from jax_agent_rl.rewards.registry import load_rewards, register_reward, require_rewards, services_asked_for
from jax_agent_rl.rewards.remote import RemoteReward
from jax_agent_rl.rewards.scoring import score, solution_text
from jax_agent_rl.rewards.text import boxed, has_format, tagged

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

del _code, _mathematics, _qa, _rules
