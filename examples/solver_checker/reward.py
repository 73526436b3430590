"""The rewards of the two roles."""

from jax_agent_rl.rewards import answer_of, register_reward
from jax_agent_rl.rewards.rules import last_number


@register_reward("solver_checker")
def compute_score(role, solution_str, ground_truth, extra_info):
    """Return 1 for the right sum from the solver, and for the right verdict from the checker."""
    answer = solution_str if role == "solver" else extra_info["answer"]
    right = last_number(answer) == last_number(ground_truth)
    if role == "solver":
        return float(right)
    return float(answer_of(solution_str).strip().lower().startswith("yes" if right else "no"))
