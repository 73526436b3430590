"""The reward of a trajectory.

The names of a function's parameters say what it is given; docs/write/reward.md of the source folder
lists them.
"""

from jax_agent_rl.rewards import register_reward
from jax_agent_rl.rewards.rules import last_number


# For the rows whose data_source begins with "trains/".
@register_reward("trains/*")
def compute_score(solution_str: str, ground_truth: str) -> float:
    """Pay for the right number at the end of the answer.

    Args:
        solution_str: the last message of the policy.
        ground_truth: of the row, ``reward_model.ground_truth``.
    """
    return float(last_number(solution_str) == last_number(ground_truth))
