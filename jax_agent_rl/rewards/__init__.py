"""Rewards: ``registry`` finds and calls the function of a row's ``data_source``, ``rules`` holds exact-answer rules."""

from jax_agent_rl.rewards import rules as _rules  # registers the built-in rules
from jax_agent_rl.rewards.registry import load_rewards, register_reward, require_rewards, score, solution_text

__all__ = ["load_rewards", "register_reward", "require_rewards", "score", "solution_text"]

del _rules
