"""``jax-agent-rl report``: a run folder as one HTML page that needs nothing else.

::

    run folder ─► reading, choosing ─┬─► charts      curves of metrics.jsonl         ─┐
                                     ├─► timeline    when engine and learner worked   ├─► page ─► report.html
                                     ├─► tokens      ids, texts, numbers of each token│
                                     └─► forest      groups as trees of turns        ─┘
"""
