"""``jax-agent-rl eval``: how good a policy is, by the agents, tools and rewards it is trained with.

``estimates`` pass@k and confidence intervals · ``scores`` groups to numbers, by data source · ``run`` sampling to
summary · ``command`` the command line.
"""
