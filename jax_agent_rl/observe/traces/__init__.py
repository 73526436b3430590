"""Where the traces of :mod:`jax_agent_rl.tracing` go.

::

    trajectory is over ─► Tracer ─► TraceWriter ─┬─ queue ─► thread ─► FileSink      traces.jsonl
                        (event loop)             ├─ queue ─► thread ─► MlflowSink
                                                 └─ …                  TrackioSink, WeaveSink

A slow sink never holds up the run: what its queue has no room for is lost and counted.
"""
