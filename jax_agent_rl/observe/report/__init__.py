"""``jax-agent-rl report``: a run folder as one self-contained HTML page.

::

    run folder ─► RunData ─┬─► charts: curves of metrics.jsonl, timeline ──┬─► command
                           └─► trajectories: tokens, groups as trees ──────┘      │
                                                                                  ▼
                                                                             report.html
"""
