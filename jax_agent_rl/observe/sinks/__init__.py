"""Where metrics (``trainer.logger``) and traces (``trace.sinks``) go besides the run folder.

::

    metrics.jsonl record ─► scalars ─► MetricSinks ─┬─ queue ─► thread ─► TensorBoard | W&B | Trackio
    trajectory is over ─► Tracer ─► TraceSinks ─────┴─ queue ─► thread ─► traces.jsonl | MLflow | Trackio | Weave

    thread  consumes: items.  produces: what its library stores.  waits for: the next item, the library.

``background`` one queue and thread per sink, so that a slow or failing library never holds up the run · ``metrics`` ·
``traces``.
"""
