"""``./launch/gpu.sh``: a run as a Ray job, on this machine or on a cluster.

::

    gpu.sh ──► cluster: RAY_ADDRESS, or one of this machine ──► job: ray_driver
      │ ◄────────────────────────── its output ─────────────────────┘   │
      │                                                                 ▼
      │                                        learner processes (actors) ──► engines (actors)
      └─ Ctrl-C ──► SIGTERM: the run saves and ends; once more ──► its processes are killed

Reading order: ``__main__`` (the launcher), ``ray_driver`` (what the job runs), ``ray_process`` (a
process on a node). ``arguments``, ``printer`` and ``templates`` are shared with ``tpu``, and import
the standard library only.
"""
