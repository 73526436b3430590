"""Runs under injected faults: ``jax-agent-rl chaos``.

::

    command   the same schedule without faults and with them, and the verdict
    play      one run: start, strike, stop, look for what is left
    stage     the system: real trainer, collector, agents, client, servers; ``engine``, ``policy``, ``learner`` stand in
              for the model, ``text`` and ``tool`` are what it writes and calls
    faults    what strikes when, on ``children`` (processes) and ``proxy`` (the network before each of them)
    ledger    what must hold while it runs; ``proof`` recomputes every token, ``footprint`` measures memory and tasks

An engine's model is a table whose tokens follow from weights, context and seed. So an engine starts in half a second,
and each token that reaches the learner can be proven to be the one that its version of the weights gives there.
"""
