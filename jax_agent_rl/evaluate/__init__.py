"""``jax-agent-rl eval`` and ``rollout``: trajectories without training.

``evaluation`` from sampling to the summary · ``scores`` pass@k, means, confidence intervals · ``collection`` from
sampling to files · ``journal`` progress of a collection, from which it continues after an interruption · ``export`` the
journal as Parquet, JSON Lines or a dataset folder
"""
