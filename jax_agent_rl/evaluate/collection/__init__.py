"""``jax-agent-rl rollout``: trajectories without training, as files to train on or look into.

``journal`` what has been collected so far, from which an interrupted collection continues · ``files`` the journal as
Parquet, JSON Lines or a dataset folder · ``run`` from sampling to files.
"""
