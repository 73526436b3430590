"""``jax-agent-rl report``: a run folder as one self-contained HTML page.

::

    run folder ─► RunData ──┬─► charts         curves of metrics.jsonl, the timeline        ─┬─► command ─► report.html
                            └─► trajectories   tokens with their numbers, groups as trees  ─┘
"""
