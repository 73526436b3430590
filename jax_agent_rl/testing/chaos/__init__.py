"""Runs under injected faults: ``jax-agent-rl chaos``.

::

    run        the command: the same schedule without and with faults, and the verdict
    testbed    the system: real trainer, collector, agents, client and servers
    faults     what strikes when, on server processes and on the proxies
    proxy      the network before each server
    ledger     the invariants, and the verification of every token
    engine     what the servers run

An engine's model is a table whose tokens follow from weights, context and seed. So an engine starts
in half a second, and every token that reaches the learner can be verified against its version of
the weights.
"""
