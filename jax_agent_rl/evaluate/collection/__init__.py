"""``jax-agent-rl rollout``: trajectories without training, as files others can train on or look into.

``columns`` a group as rows of a table · ``journal`` what has been collected so far, by which an interrupted collection
goes on · ``files`` the journal as Parquet, JSON Lines or a dataset folder · ``run`` sampling to files · ``command`` the
command line.
"""
