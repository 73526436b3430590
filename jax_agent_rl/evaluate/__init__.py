"""``jax-agent-rl eval``: how good a policy is, with the agents, tools and rewards of its training.

``scores`` groups to numbers with confidence intervals, by data source · ``run`` from sampling to the summary ·
``collection`` trajectories without training.
"""
