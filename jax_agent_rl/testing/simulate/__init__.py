"""A run's real scheduling code on simulated engines, tools and learner, in virtual time: hours of a cluster in seconds.

::

    recipe (rollout.*, trainer.*) ──► Trainer, GroupStream, RolloutBuffer, RolloutCollector, LLMServerClient, Balancer
                                          │                     │                                       │     all real
    assumptions (workload.py) ──► SimulatedLearner        SimulatedAgent                        SimulatedEngine
                                          └────────────── VirtualLoop: time jumps to the next event ────┘
"""
