"""``jax-agent-rl eval``, ``rollout`` and ``rescore``: trajectories without training.

::

    evaluation    from sampling to pass@k, means and their confidence intervals
    collection    from rows to groups, a journal and files
    journal       the groups of a collection while it runs, from which a later process continues
    rescore       recorded trajectories, scored again by other reward functions
    replay        recorded replies, played again in their environments
    export        the table of a collection: Parquet, JSON Lines or a dataset folder
"""
