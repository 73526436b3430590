"""Rewards: a trajectory is scored by the function of its row's data source, called in bounded time.

``scorer`` scores a trajectory · ``registry`` finds the function of a row's ``data_source`` ·
``rules`` and ``code`` built-in functions · ``judge`` a model as judge, and a reward server ·
``workers`` processes that can be killed.

``solution_str`` is the text of the last assistant turn unless the function was registered with
another ``solution``: it excludes tool results, so an answer that only a tool wrote earns nothing.
The function's result is the final reward. Tools give rewards of their own (``tool_rewards`` per
call, ``tool_scores`` per tool for the whole trajectory), and an environment gives one per turn
(``turn_scores``); a function may request them by name to combine them. A function that exceeds
``reward.timeout`` loses its trajectory, not the run.

::

    async def ──► awaited here     (blocking code holds up the run; a warning names it)
    def ──► of reward.path, requests no service ──► a worker process, killed on timeout
        ──► any other ──► a thread, abandoned on timeout: this package's rules take linear time
"""

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.rewards import code as _code  # registers its functions, like judge and rules
from jax_agent_rl.rewards.judge import ModelJudge, RemoteReward
from jax_agent_rl.rewards.registry import load_rewards, register_reward, require_rewards
from jax_agent_rl.rewards.rules import boxed, has_format, tagged
from jax_agent_rl.rewards.scorer import score, solution_text

__all__ = [
    "ModelJudge",
    "RemoteReward",
    "answer_of",
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
