"""The reward of the SQL agent's questions."""

from jax_agent_rl.rewards import register_reward
from jax_agent_rl.rewards.rules import last_number


@register_reward("sql_agent")
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 if what the policy wrote after the last observation ends in the right number."""
    answer = solution_str.rpartition("</observation>")[2].rpartition("</sql>")[2]
    return float(last_number(answer) == last_number(ground_truth))
