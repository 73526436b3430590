"""Runs under injected faults: ``python -m tests.chaos``.

::

    __main__     the command
    run          the same schedule without and with faults, and the verdict
    testbed      the system: real trainer, collector, agents, client and servers
    faults       what strikes when, on server processes and on the proxies
    proxy        the network before each server
    invariants   what has to hold, and the verification of every token
    leaks        what must not be left behind
    engine       what the rollout servers run
    tool         what the tool server runs

An engine's model is a table whose tokens follow from weights, context and seed. So an engine starts
in half a second, and every token that reaches the learner can be verified against its version of
the weights.
"""
