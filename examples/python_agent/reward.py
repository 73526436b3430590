"""The reward of the Python agent's questions."""

from jax_agent_rl.rewards import register_reward
from jax_agent_rl.rewards.rules import last_number


@register_reward("python_agent")
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 if the answer, what the policy wrote after its last call, ends in the right number."""
    answer = solution_str.rpartition("</tool>")[2]
    return float(last_number(answer) == last_number(ground_truth))
