"""Runs under injected faults: ``jax-agent-rl chaos``.

::

    command          the same schedule without and with faults, and the verdict
    run              one run: start, strike, stop, look for leaks
    testbed          the system: real trainer, collector, agents, client and servers
    faults           what strikes when, on ``children`` (processes) and ``proxy`` (the network before each of them)
    ledger           the invariants, and the verification of every token
    policy           weights and sampling; ``engine_process``, ``learner`` and ``tool`` run it

An engine's model is a table whose tokens follow from weights, context and seed. So an engine starts in half a second,
and every token that reaches the learner can be verified against its version of the weights.
"""
