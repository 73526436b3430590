"""``./launch/gpu.sh``: rollout servers and a learner on one CUDA host or on several, as one command.

::

    check ──► environment ──► data ──► [Ray head ──► Ray workers] ──► rollout servers ──► healthy? ──► learner
    every host, at the same time        only on several hosts                                            │
                 any process that ends early, or Ctrl-C ──► everything is ended, last started first ◄────┘

Reading order: ``__main__`` (the command line), ``hosts`` (GPUs and drivers, ssh), ``settings`` (what decides where
things run), ``plan`` (GPUs of each process, and the commands), ``runner`` (runs them), ``watchdog`` (ends a process
with its launcher), ``ray_servers`` (servers as Ray actors).

The launcher starts before the project's environment exists: it imports the standard library only, and asks the
environment's own Python where it needs more.
"""
