"""Simulation of a run in virtual time: real scheduling on simulated engines, tools and learner.

::

    recipe (rollout.*, trainer.*) ──► Trainer, GroupStream, RolloutBuffer, RolloutCollector,
                                      LLMServerClient, Balancer: all real
                                          │
                                          ▼
    assumptions (workload.py) ──► SimulatedLearner, SimulatedAgent, SimulatedEngine
                                          │
                                          ▼
                                  VirtualLoop: time jumps to the next event
"""
