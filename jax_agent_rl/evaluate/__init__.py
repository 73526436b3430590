"""``jax-agent-rl eval`` and ``rollout``: trajectories without training.

``evaluation`` from sampling to pass@k, means and their confidence intervals · ``collection`` from
sampling to files · ``export`` the journal of a collection, and its table as Parquet, JSON Lines or
a dataset folder
"""
