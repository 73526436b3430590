"""Where metrics (``trainer.logger``) and traces (``trace.sinks``) go besides the run folder.

::

    metrics.jsonl record ─► MetricSinks ─► queue ─► thread ─► TensorBoard | W&B | Trackio
    finished trajectory ──► TraceSinks ──► queue ─► thread ─► traces.jsonl | MLflow | Trackio | …

Every sink has its own queue and thread (``threads``), so that no library, network or full disk can
stop or slow training. A thread consumes queued items, produces what its library stores, and waits
for the next item or for the library. The sinks are in ``metrics`` and ``traces``.
"""
